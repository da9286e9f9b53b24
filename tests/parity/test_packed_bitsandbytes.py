"""bitsandbytes' 4-bit and 8-bit weights: exact values, and what becomes of them in the graph."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from llorch_export.checkpoint.packed.tables import nearest_codes
from llorch_export.options import ExportOptions
from llorch_export.pipeline import export
from llorch_export.source.open import open_checkpoint
from support.builders.packed_bitsandbytes import eight_bits, four_bits, normal_table, settings, table_of
from support.builders.packed_checkpoints import Packed
from support.builders.packed_folders import Maker, write_packed
from support.builders.tiny_exports import all_logits, export_tiny, random_ids, silent
from support.harness.packed import load_error
from support.oracles import numpy_llama
from tolerances import FP32_LOGITS, QUANTISED_LOGITS_LEVEL_0

SHAPE: dict[str, Any] = {"hidden_size": 128, "intermediate_size": 192, "head_dim": 32}
# 96 and 160 inputs: blocks of 64 begin in one row and end in the next.
TAILS: dict[str, Any] = {"hidden_size": 96, "intermediate_size": 160, "head_dim": 24}
IDS = random_ids(24)
ROWS: dict[str, tuple[str | None, Maker]] = {
    "nf4": ("nf4", four_bits("nf4")),
    "nf4, blocks of 128": ("nf4", four_bits("nf4", block=128)),
    "nf4, blocks of 4096": ("nf4", four_bits("nf4", block=4096)),
    "nf4, double": ("nf4", four_bits("nf4", nested=256)),
    "fp4": ("fp4", four_bits("fp4")),
    "fp4, double, blocks of 32": ("fp4", four_bits("fp4", block=32, nested=16)),
    "nf4 as bfloat16": ("nf4", four_bits("nf4", storage=ml_dtypes.bfloat16)),
    "nf4 as float32": ("nf4", four_bits("nf4", storage=np.float32)),
    "int8": (None, eight_bits),
}


def _write(path: Path, row: str = "nf4", shape: dict[str, Any] = SHAPE, **more: object) -> Packed:
    table, maker = ROWS[row]
    skip = ("lm_head", "layers.1.self_attn.k_proj")  # as transformers leaves the head
    return write_packed(path / "m", shape, maker, settings(table, **more), skip=skip)


@pytest.mark.parametrize("shape", [SHAPE, TAILS], ids=["even", "tails"])
@pytest.mark.parametrize("row", ROWS)
def test_values_are_exact(tmp_path: Path, row: str, shape: dict[str, Any]) -> None:
    packed = _write(tmp_path, row, shape)
    tensors = open_checkpoint(str(packed.folder)).tensors
    for name, value in packed.values.items():
        np.testing.assert_array_equal(tensors[name].load(), value, err_msg=name)
        odd = tensors[name].load_rows(3, 8)
        np.testing.assert_array_equal(odd, value[3:8], err_msg=name)


def test_logits_of_eight_bits_are_those_of_the_values(tmp_path: Path) -> None:
    packed = _write(tmp_path, "int8")
    artifact = export_tiny(packed.folder, tmp_path / "a", precision="source", accuracy_level=0)
    expected = numpy_llama.forward(packed.config, packed.values, IDS)
    np.testing.assert_allclose(all_logits(artifact, IDS), expected, atol=QUANTISED_LOGITS_LEVEL_0, rtol=0)


def test_logits_of_a_table_are_exact_in_fp32(tmp_path: Path) -> None:
    packed = _write(tmp_path)
    artifact = export_tiny(packed.folder, tmp_path / "a", precision="fp32")
    expected = numpy_llama.forward(packed.config, packed.values, IDS)
    np.testing.assert_allclose(all_logits(artifact, IDS), expected, atol=FP32_LOGITS, rtol=0)


@pytest.mark.parametrize("row", ["nf4", "fp4", "nf4, double"])
def test_codes_come_as_near_to_a_table_as_they_say(tmp_path: Path, row: str) -> None:
    packed = _write(tmp_path, row, TAILS)
    name = "model.layers.0.mlp.down_proj.weight"
    tensor = open_checkpoint(str(packed.folder)).tensors[name]
    assert tensor.codes is not None
    assert 0 < tensor.codes.rounding < 0.004
    block = 64
    largest = np.abs(packed.values[name].reshape(-1, block)).max(axis=1)  # all sixteen codes are in most
    apart = np.abs(tensor.codes.values(0, tensor.shape[0]) - packed.values[name]).reshape(-1, block)
    assert (apart.max(axis=1) <= 1.6 * tensor.codes.rounding * largest).all()


def test_nf4_is_the_table_of_normal_quantiles() -> None:
    np.testing.assert_allclose(table_of("nf4"), normal_table(), atol=2e-6)


def test_the_nearest_codes_are_the_best_of_all_steps() -> None:
    for name in ("nf4", "fp4"):
        table, found = table_of(name).astype(np.float64), nearest_codes(name)
        near = found.step * (found.codes.astype(float) - 128)
        assert np.abs(near - table).max() == pytest.approx(found.rounding, abs=1e-7)
        steps = 1 / np.linspace(60, 127, 4000)
        squares = [((np.rint(table / step) * step - table) ** 2).sum() for step in steps]
        assert ((near - table) ** 2).sum() <= min(squares) * 1.001


def test_an_artifact_says_what_became_of_a_table(tmp_path: Path) -> None:
    packed = _write(tmp_path)
    options = ExportOptions(str(packed.folder), tmp_path / "a", precision="source")
    notices = export(options, silent).notices
    assert any("bitsandbytes NF4" in line and "within 0.38%" in line for line in notices), notices


def test_old_settings_without_a_method_are_understood(tmp_path: Path) -> None:
    packed = _write(tmp_path)
    packed.config["quantization_config"] = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
    packed.rewrite()
    name = "model.layers.0.mlp.down_proj.weight"
    tensor = open_checkpoint(str(packed.folder)).tensors[name]
    np.testing.assert_array_equal(tensor.load(), packed.values[name])


MODULE = "model.layers.0.mlp.up_proj"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"shape": [192, 127]}, "shape is [192, 127], expected [192, 128]"),
        ({"shape": "huge"}, "shape"),
        ({"blocksize": 0}, "blocksize is 0"),
        ({"blocksize": 2**40}, "blocksize"),
        ({"blocksize": 32}, "absmax is F32 [384], expected F32 [768]"),
        ({"quant_type": "fp4"}, "quant_type is 'fp4', expected 'nf4'"),
        ({"nested_blocksize": 256, "nested_dtype": "float16"}, "nested_dtype"),
        (
            {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": float("nan")},
            "nested_offset",
        ),
        ({"new": 1}, "keys that are not understood: new"),
    ],
)
def test_a_state_that_does_not_fit_is_refused(tmp_path: Path, change: dict[str, Any], said: str) -> None:
    packed = _write(tmp_path)
    name = f"{MODULE}.weight.quant_state.bitsandbytes__nf4"
    state = json.loads(packed.stored[name].tobytes()) | change
    packed.stored[name] = np.frombuffer(json.dumps(state).encode(), np.uint8)
    assert said in load_error(packed, f"{MODULE}.weight")


def test_damaged_parts_are_refused_by_name(tmp_path: Path) -> None:
    packed = _write(tmp_path)
    kept = dict(packed.stored)
    state = f"{MODULE}.weight.quant_state.bitsandbytes__nf4"

    def refusal(changed: dict[str, Any]) -> str:
        packed.stored = kept | changed
        return load_error(packed, f"{MODULE}.weight")

    assert "not valid JSON" in refusal({state: np.frombuffer(b"[1", np.uint8)})
    assert "not an object" in refusal({state: np.frombuffer(b"[]", np.uint8)})
    assert "expected at most 4096 bytes" in refusal({state: np.zeros(5000, np.uint8)})
    assert "12287 bytes, expected 12288" in refusal({f"{MODULE}.weight": np.zeros((12287, 1), np.uint8)})
    assert "not the table of nf4" in refusal({f"{MODULE}.weight.quant_map": np.zeros(16, np.float32)})
    infinite = np.full(384, np.inf, np.float32)
    assert "scales that are NaN or infinite" in refusal({f"{MODULE}.weight.absmax": infinite})
    packed.stored = {name: value for name, value in kept.items() if name != f"{MODULE}.weight.absmax"}
    assert "but no weight.absmax" in load_error(packed, f"{MODULE}.weight")
    packed.stored = {name: value for name, value in kept.items() if name != state}
    assert "but no weight.quant_state.bitsandbytes__nf4" in load_error(packed, f"{MODULE}.weight")


def test_eight_bits_in_the_order_of_a_kernel_are_refused(tmp_path: Path) -> None:
    packed = _write(tmp_path, "int8")
    packed.stored[f"{MODULE}.weight_format"] = np.array(2, np.uint8)
    assert "load the model with bitsandbytes and save it again" in load_error(packed, f"{MODULE}.weight")


def test_settings_that_contradict_themselves_are_refused(tmp_path: Path) -> None:
    both = _write(tmp_path, load_in_8bit=True)
    assert "load_in_4bit is True, expected true, or load_in_8bit true instead" in load_error(
        both, f"{MODULE}.weight"
    )
    unknown = _write(tmp_path, bnb_4bit_quant_type="nf5")
    assert "bnb_4bit_quant_type is 'nf5', expected 'nf4' or 'fp4'" in load_error(unknown, f"{MODULE}.weight")
    new = _write(tmp_path, bnb_9bit=True)
    assert "keys that are not understood: bnb_9bit" in load_error(new, f"{MODULE}.weight")
