"""``verify`` and ``verify --layers`` hold a transformed artifact against the checkpoint as it was before."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from llorch_export.terminal.layers import table
from llorch_export.verify.divergence import verify
from llorch_export.verify.layers.original_basis import RESTORED
from llorch_export.verify.layers.stages import Kind
from llorch_export.verify.layers.verify import LayerReport, verify_layers
from support.builders.arch_rows import HF
from support.builders.checkpoints import write_hf_folder
from support.builders.tiny_exports import export_tiny, silent
from support.builders.transform_rows import ALL, TEXT, uneven
from tolerances import KL_FP32

pytestmark = pytest.mark.reference

ROWS: dict[str, dict[str, Any]] = {
    "biases, tied": {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
    "qwen2": HF["qwen2"],
    "qwen3": HF["qwen3"],
    "granite, tied, biases": HF["granite, tied, biases"],
    "phi3": HF["phi3"],
    "gemma": HF["gemma, tied, one kv head"],
}


def prove(tmp_path: Path, overrides: dict[str, Any], transforms: tuple[str, ...]) -> LayerReport:
    source = write_hf_folder(tmp_path / "model", overrides, edit=uneven)
    (tmp_path / "text.txt").write_text(TEXT)
    measured = {"equalise", "smooth"} & set(transforms)
    calibration = tmp_path / "text.txt" if measured else None
    export_tiny(source, tmp_path / "out", transforms=transforms, calibration=calibration)
    return verify_layers(tmp_path / "out", str(source), silent)


@pytest.mark.parametrize("name", ROWS)
def test_turned_stages_are_compared_in_the_checkpoints_basis(tmp_path: Path, name: str) -> None:
    found = prove(tmp_path, ROWS[name], ("rotate", "hadamard"))
    assert found.passed, found.first_departing
    assert {stage.kind for stage in found.stages} == set(Kind) - {Kind.LLAMA_CPP, Kind.ROUTER, Kind.EXPERTS}
    assert not found.rescaled
    turned = {stage.name for stage in found.stages if stage.source == RESTORED}
    last = "model.layers.1"
    assert turned & {"embedding", "embedding/scaled"}
    assert {"model.norm", f"{last}.input_layernorm/residual", "present.0.value"} <= turned
    assert not turned & {f"{last}.mlp.silu", f"{last}.mlp.act"}
    assert f"{len(turned)} of them were turned back" in table(found)


@pytest.mark.parametrize("name", ROWS)
def test_rescaled_stages_are_named_and_what_they_end_in_is_compared(tmp_path: Path, name: str) -> None:
    found = prove(tmp_path, ROWS[name], ALL)
    assert found.passed, found.first_departing
    compared = {stage.name for stage in found.stages}
    assert {"present.0.key", "model.layers.0.mlp.up_proj"} <= set(found.rescaled)
    assert not compared & set(found.rescaled)
    assert "model.layers.0.self_attn.heads/scores" in compared
    assert "model.layers.0.mlp.down_proj" in compared
    assert "scaled by what a transform measured, so not compared: " in table(found)


def test_a_plain_artifact_has_nothing_turned_or_rescaled(tmp_path: Path) -> None:
    found = prove(tmp_path, {}, ())
    assert not found.rescaled
    assert not [stage for stage in found.stages if stage.source == RESTORED]


def test_damage_to_a_transformed_artifact_is_found(tmp_path: Path) -> None:
    source = write_hf_folder(tmp_path / "model", edit=uneven)
    artifact = export_tiny(source, tmp_path / "out", transforms=("rotate", "hadamard"))
    assert verify(tmp_path / "out", str(source), silent).kl < KL_FP32
    model = onnx.load(artifact.graph_path, load_external_data=False)
    tensor = next(t for t in model.graph.initializer if t.name == "model.layers.1.mlp.down_proj.weight")
    place = {entry.key: entry.value for entry in tensor.external_data}
    data = np.memmap(artifact.folder / place["location"], np.float32, "r+", int(place["offset"]), (64 * 96,))
    data[64 * 40] += 1
    data.flush()
    found = verify_layers(tmp_path / "out", str(source), silent)
    assert not found.passed
    assert found.first_departing is not None
    assert found.first_departing.name == "model.layers.1.mlp.down_proj"
