"""Mixed graphs compute the model on the weights that each module's own format leaves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import onnx
import pytest

from llorch_export.formats.module import ModuleFormat
from llorch_export.formats.precisions import BITS
from llorch_export.graph.blocks import quantised
from llorch_export.inspect.contents import contents
from llorch_export.options import ExportOptions, Rule
from llorch_export.preview import preview
from llorch_serve.artifact.folder import Artifact
from llorch_serve.artifact.manifest import Precision, Quantizer
from support.builders.arch_rows import HF
from support.builders.checkpoints import (
    Weights,
    tiny_config,
    tiny_llama_config,
    tiny_weights,
    write_hf_folder,
)
from support.builders.tiny_exports import all_logits, export_tiny, open_tiny, random_ids
from support.oracles import numpy_llama
from support.oracles.quantised_numpy import dequantise
from tolerances import QUANTISED_LOGITS_LEVEL_0, STEPWISE_LOGITS

IDS = random_ids(60)
MODELS: dict[str, dict[str, Any]] = {
    "plain": {},
    "tied, biases": {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True},
    "padded": {"hidden_size": 72, "intermediate_size": 88, "head_dim": 16},
    # heads that the attention operator cannot rotate, so q, k and v are apart after the projection
    "heads of 24": {"head_dim": 24},
}
RULES = (
    Rule(("*.v_proj", "*.down_proj"), ("first 1",), precision="int8"),
    Rule(("model.layers.1.self_attn.q_proj",), precision="fp32"),
    Rule(("*.gate_proj",), quantizer="nearest", block_size=16, scale_type="float32"),
    Rule(("lm_head", "model.embed_tokens"), precision="int4", block_size=32),
)


def by_hand(name: str) -> tuple[Precision, int, Quantizer | None, str]:
    """Say what RULES make of a tensor of an int4 export."""
    if name in ("lm_head.weight", "model.embed_tokens.weight"):
        return "int4", 32, "affine", "bfloat16"
    if name in ("model.layers.0.self_attn.v_proj.weight", "model.layers.0.mlp.down_proj.weight"):
        return "int8", 32, None, "bfloat16"
    if name == "model.layers.1.self_attn.q_proj.weight":
        return "fp32", 0, None, "float32"
    if "gate_proj" in name:
        return "int4", 16, "nearest", "float32"
    fine = any(part in name for part in ("q_proj", "k_proj", "v_proj", "down_proj"))
    return "int4", 32 if fine else 64, "affine", "bfloat16"


def expected_weights(overrides: dict[str, Any]) -> Weights:
    def kept(name: str, value: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
        precision, block_size, quantizer, scale_type = by_hand(name)
        if value.ndim == 1 or precision == "fp32":
            return value
        form = ModuleFormat(precision, block_size, quantizer, scale_type)  # type: ignore[arg-type]
        return dequantise(quantised(value, form), bits=BITS[precision], columns=value.shape[1])

    return {name: kept(name, value) for name, value in tiny_weights(tiny_llama_config(**overrides)).items()}


@pytest.mark.parametrize("name", MODELS)
def test_every_matrix_is_stored_in_its_own_format(tmp_path: Path, name: str) -> None:
    source = write_hf_folder(tmp_path / "model", MODELS[name])
    artifact = export_tiny(
        source, tmp_path / "artifact", precision="int4", quantizer="affine", rules=RULES, accuracy_level=0
    )
    expected = numpy_llama.forward(tiny_config(**MODELS[name]), expected_weights(MODELS[name]), IDS)
    np.testing.assert_allclose(all_logits(artifact, IDS), expected, atol=QUANTISED_LOGITS_LEVEL_0, rtol=0)


@pytest.mark.parametrize("name", ["plain", "qwen3"])
def test_projections_apart_are_the_packed_ones(tmp_path: Path, name: str) -> None:
    """In fp32 a rule that changes only how layer 1's value projection is stored moves logits by that
    alone.
    """
    source = write_hf_folder(tmp_path / "model", HF.get(name, {}))
    plain = export_tiny(source, tmp_path / "plain")
    rule = Rule(("model.layers.1.self_attn.v_proj",), precision="int8", block_size=16)
    apart = export_tiny(source, tmp_path / "apart", rules=(rule,), accuracy_level=0)
    names = {node.name for node in graph(apart).node}
    assert "model.layers.1.self_attn.q_proj/MatMul" in names
    assert "model.layers.0.self_attn.qkv_proj/MatMul" in names
    difference = np.abs(all_logits(apart, IDS) - all_logits(plain, IDS)).max()
    assert 0 < difference < 0.1


def test_step_by_step_equals_prefill(tmp_path: Path) -> None:
    artifact = export_tiny(
        write_hf_folder(tmp_path / "model"),
        tmp_path / "artifact",
        precision="int4",
        rules=RULES,
        accuracy_level=0,
        kv_dtype="float32",
    )
    session = open_tiny(artifact)
    full = session.prefill(0, IDS, 0, range(len(IDS))).copy()
    session.prefill(0, IDS[:10], 0)
    for position in range(10, 30):
        found = session.decode([IDS[position]], [position + 1])[0]
        np.testing.assert_allclose(found, full[position], atol=STEPWISE_LOGITS, rtol=0)


def graph(artifact: Artifact) -> onnx.GraphProto:
    return onnx.load(artifact.graph_path, load_external_data=False).graph


def test_contents_tell_every_matrix(tmp_path: Path) -> None:
    source = write_hf_folder(tmp_path / "model")
    artifact = export_tiny(source, tmp_path / "artifact", precision="int4", rules=RULES)
    found = contents(artifact).graph
    assert found is not None
    stored = {module.name: module for module in found.modules}
    value = stored["model.layers.0.self_attn.v_proj"]
    assert (value.precision, value.block_size, value.zero_points) == ("int8", 32, False)
    assert value.bits_per_weight == 8 + 16 / 32
    packed = stored["model.layers.1.self_attn.q_proj"]
    assert (packed.precision, packed.block_size, packed.bits_per_weight) == ("fp32", None, 32)
    key = stored["model.layers.1.self_attn.k_proj"]
    assert (key.precision, key.zero_points, key.bits_per_weight) == ("int4", True, 4 + 16 / 32 + 8 / 64)
    gate = stored["model.layers.0.mlp.gate_proj"]
    assert (gate.block_size, gate.zero_points, gate.bits_per_weight) == (16, False, 4 + 32 / 16)
    assert stored["lm_head"].precision == stored["model.embed_tokens"].precision == "int4"
    assert len(stored) == 2 + 2 * 7


def test_the_fingerprint_and_the_preview_know_the_rules(tmp_path: Path) -> None:
    source = write_hf_folder(tmp_path / "model")
    artifacts = [
        export_tiny(source, tmp_path / str(n), precision="int4", quantizer="affine", rules=RULES[:n])
        for n in (0, 1, 2)
    ]
    assert len({artifact.manifest.fingerprint for artifact in artifacts}) == 3
    options = ExportOptions(
        source=str(source), output=Path(), precision="int4", quantizer="affine", rules=RULES[:2]
    )
    seen = preview(options)
    assert seen["recipe"] == artifacts[2].manifest.recipe
    assert seen["data_bytes"] == (artifacts[2].folder / "model.onnx.data").stat().st_size
    assert msgspec.to_builtins(artifacts[2].manifest.recipe)["rules"][0]["modules"] == (
        "model.layers.0.self_attn.v_proj",
        "model.layers.0.mlp.down_proj",
    )
