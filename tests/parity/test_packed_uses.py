"""What is done with packed checkpoints beside a plain export: adapters, other targets, other runtimes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llorch_export.adapter.apply import with_adapters
from llorch_export.adapter.choice import AdapterChoice
from llorch_export.options import ExportOptions
from llorch_export.pipeline import export
from llorch_export.source.open import open_checkpoint
from llorch_export.verify.layers.verify import verify_layers
from llorch_serve.artifact.manifest import Target
from support.builders.adapters import write_adapter
from support.builders.arch_rows import HF
from support.builders.checkpoints import of_family
from support.builders.packed_checkpoints import Packed, write_gptq
from support.builders.packed_folders import write_packed
from support.builders.packed_hqq import SETTINGS, matrix
from support.builders.tiny_exports import all_logits, export_tiny, open_tiny, random_ids, silent
from support.oracles import numpy_llama
from support.oracles.genai_feeding import GenaiFeeder
from tolerances import QUANTISED_LOGITS_LEVEL_0, STEPWISE_LOGITS

SHAPE: dict[str, Any] = {"hidden_size": 128, "intermediate_size": 192, "head_dim": 32}
SOURCE: dict[str, Any] = {"precision": "source", "kv_dtype": "float32"}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": SHAPE,
    "phi3": SHAPE | of_family("phi3", head_dim=None),
    "exaone": SHAPE | of_family("exaone", head_dim=32),
}
IDS = random_ids(24)


@pytest.mark.parametrize("order", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_an_adapter_is_merged_into_the_values(tmp_path: Path, family: str, order: bool) -> None:
    source = write_gptq(tmp_path / "m", FAMILIES[family], order=order, skip=("wte",)).folder
    base = open_checkpoint(str(source))
    factors = write_adapter(tmp_path / "lora", base.config)
    choice = AdapterChoice(tmp_path / "lora")
    found = with_adapters(open_checkpoint(str(source)), (choice,)).tensors
    for module in (name.removesuffix(".a") for name in factors if name.endswith(".a")):
        added = factors[f"{module}.b"].astype(np.float64) @ factors[f"{module}.a"] * (6 / 4)
        expected = base.tensors[f"{module}.weight"].load() + added
        weight = found[f"{module}.weight"]
        np.testing.assert_array_almost_equal_nulp(weight.load(), expected.astype(np.float32), nulp=1)
        assert weight.codes is None
        assert weight.packed is None
    options = ExportOptions(str(source), tmp_path / "a", "int8", lora=(choice,), kv_dtype="float32")
    (said,) = [notice for notice in export(options, silent).notices if "are packed" in notice]
    assert "--precision source" not in said  # which no adapter goes with


@pytest.mark.parametrize("target", ["openvino", "webgpu"])
def test_another_target_has_the_codes_too(tmp_path: Path, target: Target) -> None:
    packed = write_gptq(tmp_path / "m", SHAPE, symmetric=False, version=2, order=True)
    artifact = export_tiny(packed.folder, tmp_path / "a", target=target, accuracy_level=0, **SOURCE)
    expected = numpy_llama.forward(packed.config, packed.values, IDS)
    np.testing.assert_allclose(all_logits(artifact, IDS), expected, atol=QUANTISED_LOGITS_LEVEL_0, rtol=0)


def test_another_runtime_loads_the_codes_too(tmp_path: Path) -> None:
    packed = write_gptq(tmp_path / "m", SHAPE, order=True)
    artifact = export_tiny(packed.folder, tmp_path / "a", interop="genai", **SOURCE)
    own, guest = open_tiny(artifact), GenaiFeeder(artifact.folder)
    for start, end in ((0, 20), (20, 21), (21, 24)):
        expected = own.prefill(0, IDS[start:end], start)
        np.testing.assert_allclose(guest.feed(IDS[start:end]), expected, atol=STEPWISE_LOGITS, rtol=0)


def _dense(path: Path) -> Packed:
    return write_gptq(path, SHAPE, order=True)


def _anew(path: Path) -> Packed:
    return write_packed(path, SHAPE, matrix(1, 64, whole=False), SETTINGS, skip=("lm_head",))


def _of_experts(path: Path) -> Packed:
    return write_gptq(path, HF["qwen3_moe"])


@pytest.mark.reference
@pytest.mark.parametrize("write", [_dense, _anew, _of_experts])
def test_a_proof_layer_by_layer_passes(tmp_path: Path, write: Any) -> None:
    source = write(tmp_path / "m").folder
    export_tiny(source, tmp_path / "a", **SOURCE)
    found = verify_layers(tmp_path / "a", str(source), silent)
    assert found.passed, found.first_departing
    assert found.same_source
