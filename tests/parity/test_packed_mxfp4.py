"""Experts in MXFP4: their values are transformers' own, their codes are kept, and damage is refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from llorch_export.inspect.contents import contents
from llorch_export.options import ExportOptions
from llorch_export.pipeline import export
from llorch_export.source.open import open_checkpoint
from llorch_export.verify.layers.verify import verify_layers
from llorch_serve.artifact.manifest import Precision
from llorch_serve.errors import ArtifactError
from llorch_serve.fidelity.divergence import DivergenceSum
from support.builders.arch_rows import HF
from support.builders.packed_mxfp4 import SETTINGS, write_mxfp4
from support.builders.tiny_exports import all_logits, export_tiny, open_tiny, random_ids, silent
from support.oracles.expert_stacks import stacks
from support.oracles.stepwise import reference
from tolerances import FP32_LOGITS, KL_LEVEL_4_INT8

ROW = {**HF["gpt_oss"], "intermediate_size": 64}
IDS = random_ids(64)


@pytest.mark.reference
def test_values_and_logits_are_those_of_transformers(tmp_path: Path) -> None:
    packed = write_mxfp4(tmp_path / "model", ROW)
    found = open_checkpoint(str(packed.folder))
    gate_up = packed.values["model.layers.1.mlp.experts.gate_up_proj"]
    for part, first in (("gate_proj", 0), ("up_proj", 1)):
        tensor = found.tensors[f"model.layers.1.mlp.experts.4.{part}.weight"]
        assert tensor.packed == "MXFP4, 4 bits of floating point, groups of 32"
        np.testing.assert_array_equal(tensor.load(), gate_up[4, :, first::2].T)
        np.testing.assert_array_equal(tensor.load_rows(3, 9), gate_up[4, :, first::2].T[3:9])
    expected = reference(packed.folder, IDS, quantization_config=_dequantised())
    session = open_tiny(export_tiny(packed.folder, tmp_path / "out"))
    np.testing.assert_allclose(
        session.prefill(1, IDS, 0, range(len(IDS))), expected, atol=FP32_LOGITS, rtol=0
    )


def _dequantised() -> Any:
    import transformers

    return transformers.Mxfp4Config(dequantize=True)


def test_codes_are_kept_in_eight_bits(tmp_path: Path) -> None:
    packed = write_mxfp4(tmp_path / "model", ROW)
    options = ExportOptions(str(packed.folder), tmp_path / "out", "source", kv_dtype="float32")
    artifact = export(options, silent).artifact
    for name, values in stacks(artifact).items():
        np.testing.assert_array_equal(values, packed.values[name].swapaxes(1, 2))
    assert len(stacks(artifact)) == 4
    whole = all_logits(export_tiny(packed.folder, tmp_path / "whole"), IDS)
    divergence = DivergenceSum()
    divergence.add(whole, all_logits(artifact, IDS))
    assert divergence.result().kl < KL_LEVEL_4_INT8
    graph = contents(artifact).graph
    assert graph is not None
    experts = [module for module in graph.modules if "experts" in module.name]
    assert {(module.precision, module.block_size) for module in experts} == {("int8", 32)}


@pytest.mark.reference
@pytest.mark.parametrize("precision", ["int4", "int8"])
def test_other_precisions_start_from_the_values(tmp_path: Path, precision: Precision) -> None:
    packed = write_mxfp4(tmp_path / "model", ROW)
    options = ExportOptions(str(packed.folder), tmp_path / "out", precision, kv_dtype="float32")
    found = export(options, silent)
    assert any("36 of MXFP4" in notice for notice in found.notices)
    for name, values in stacks(found.artifact).items():
        exact = packed.values[name].swapaxes(1, 2)
        assert 0 < np.abs(values - exact).max() < 0.2 * np.abs(exact).max()


@pytest.mark.reference
def test_every_layer_is_the_references(tmp_path: Path) -> None:
    packed = write_mxfp4(tmp_path / "model", ROW)
    export_tiny(packed.folder, tmp_path / "out")
    found = verify_layers(tmp_path / "out", str(packed.folder), silent)
    assert found.passed, found.first_departing


Edit = Callable[[dict[str, npt.NDArray[Any]]], object]
NAME = "model.layers.1.mlp.experts.down_proj"


def _nan(stored: dict[str, npt.NDArray[Any]]) -> None:
    stored[f"{NAME}_scales"][0, 0, 0] = 255


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (
            lambda s: s.pop(f"{NAME}_scales"),
            "module .*down_proj has _blocks but no _scales; .* fetch it",
        ),
        (lambda s: s.pop(f"{NAME}_blocks"), "has _scales but no _blocks"),
        (
            lambda s: s.update({f"{NAME}_blocks": s[f"{NAME}_blocks"].reshape(64, 6, 2, 16)}),
            r"is U8 \[64, 6, 2, 16\], expected U8 \[6, 64, 2, 16\]",
        ),
        (
            lambda s: s.update({f"{NAME}_scales": s[f"{NAME}_scales"].view(np.int8)}),
            r"is I8 \[6, 64, 2\], expected U8",
        ),
        (_nan, "holds scales that are no numbers"),
        (
            lambda s: s.update({NAME: np.zeros((6, 64, 64), np.float16)}),
            "is there packed .* and plain .*, and it is not known which is meant",
        ),
        (
            lambda s: s.pop(f"{NAME}_bias"),
            "lacks 1 of .* that its config calls for: .*down_proj_bias",
        ),
        (lambda s: s.pop("model.layers.0.self_attn.sinks"), "lacks 1 of .*sinks"),
    ],
)
def test_damage_is_refused_by_name(tmp_path: Path, edit: Edit, message: str) -> None:
    packed = write_mxfp4(tmp_path / "model", ROW)
    edit(packed.stored)
    packed.rewrite()
    with pytest.raises(ArtifactError, match=message):
        export_tiny(packed.folder, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_inputs_that_are_no_whole_blocks_are_refused(tmp_path: Path) -> None:
    packed = write_mxfp4(tmp_path / "model", ROW)
    packed.config["intermediate_size"] = 40
    for name in [name for name in packed.stored if "gate_up" in name]:
        packed.stored[name] = np.ascontiguousarray(packed.stored[name][:, :80])
    packed.rewrite()
    with pytest.raises(ArtifactError, match=r"of 40 inputs is packed as MXFP4, expected experts .* of 32"):
        export_tiny(packed.folder, tmp_path / "out")


def test_settings_that_are_not_known_are_refused(tmp_path: Path) -> None:
    packed = write_mxfp4(tmp_path / "model", ROW)
    packed.config["quantization_config"] = {**SETTINGS, "group_size": 16}
    packed.rewrite()
    with pytest.raises(ArtifactError, match="has keys that are not understood: group_size"):
        open_checkpoint(str(packed.folder))
