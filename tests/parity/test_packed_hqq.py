"""HQQ's weights: exact values for every width and both axes, and codes where groups lie along inputs."""

from __future__ import annotations

import tracemalloc
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from llorch_export.source.open import open_checkpoint
from support.builders.packed_checkpoints import Packed
from support.builders.packed_folders import Maker, write_packed
from support.builders.packed_hqq import SETTINGS, matrix
from support.harness.packed import load_error, require_carried, require_values

SHAPE: dict[str, Any] = {"hidden_size": 128, "intermediate_size": 192, "head_dim": 32}
ROWS: dict[str, Maker] = {
    "4 bits": matrix(4, 64),
    "4 bits, zero points below 0": matrix(4, 64, low=-20),
    "4 bits, fractions": matrix(4, 64, whole=False),
    "1 bit, fractions": matrix(1, 32, whole=False),
    "4 bits, axis 0": matrix(4, 64, axis=0),
    "4 bits as bfloat16": matrix(4, 64, storage=ml_dtypes.bfloat16),
    "8 bits": matrix(8, 128),
    "3 bits": matrix(3, 64),
    "3 bits, axis 0": matrix(3, 64, axis=0),
    "2 bits": matrix(2, 16),
    "1 bit": matrix(1, 32),
    "groups across outputs": matrix(4, 256),
    "axis 0, as many outputs as inputs": matrix(4, 128, axis=0),
    "axis 0, few words a strip": matrix(3, 16, axis=0),
}
MODULE = "model.layers.0.mlp.up_proj"


def _write(path: Path, row: str = "4 bits") -> Packed:
    return write_packed(path / "m", SHAPE, ROWS[row], SETTINGS, skip=("lm_head",))


@pytest.mark.parametrize("row", ROWS)
def test_values_are_exact(tmp_path: Path, row: str) -> None:
    packed = _write(tmp_path, row)
    require_values(packed)


@pytest.mark.parametrize(
    ("row", "bits"),
    [
        ("4 bits", 4),
        ("4 bits, fractions", 4),
        ("4 bits, zero points below 0", 8),
        ("3 bits", 3),
        ("2 bits", 2),
        ("1 bit", 8),
    ],
)
def test_codes_reach_the_graph_as_they_are(tmp_path: Path, row: str, bits: int) -> None:
    packed = _write(tmp_path, row)
    codes = open_checkpoint(str(packed.folder)).tensors[f"{MODULE}.weight"].codes
    assert codes is not None
    assert codes.bits == bits
    require_carried(packed, tmp_path / "a")


@pytest.mark.parametrize(
    ("row", "form"),
    [
        ("4 bits", "HQQ, 4 bits, groups of 64"),
        ("8 bits", "HQQ, 8 bits, one scale an output"),
        ("groups across outputs", "HQQ, 4 bits, groups of 256"),
        ("4 bits, axis 0", "HQQ, 4 bits, groups of 64 along outputs"),
        ("axis 0, as many outputs as inputs", "HQQ, 4 bits, groups of 128 along outputs"),
    ],
)
def test_a_form_says_which_weights_share_a_scale(tmp_path: Path, row: str, form: str) -> None:
    packed = _write(tmp_path, row)
    assert open_checkpoint(str(packed.folder)).tensors[f"{MODULE}.weight"].packed == form


def test_a_scale_for_each_weight_is_read_in_pieces(tmp_path: Path) -> None:
    """Scales as many as weights are no small tensor, whichever axis they lie along."""
    shape = SHAPE | {"intermediate_size": 4096, "num_hidden_layers": 1}
    for axis in (0, 1):
        packed = write_packed(
            tmp_path / str(axis), shape, matrix(4, 1, axis=axis), SETTINGS, skip=("lm_head",)
        )
        weight = open_checkpoint(str(packed.folder)).tensors[f"{MODULE}.weight"]
        tracemalloc.start()
        found = weight.load_rows(100, 108)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        np.testing.assert_array_equal(found, packed.values[f"{MODULE}.weight"][100:108])
        assert peak < 2**18, peak


@pytest.mark.parametrize("row", ["1 bit, fractions", "groups across outputs"])
def test_what_no_block_holds_has_no_codes(tmp_path: Path, row: str) -> None:
    packed = _write(tmp_path, row)
    assert open_checkpoint(str(packed.folder)).tensors[f"{MODULE}.weight"].codes is None


def test_parts_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    packed = _write(tmp_path)
    kept = dict(packed.stored)

    def refusal(part: str, value: Any) -> str:
        packed.stored = kept | {f"{MODULE}.{part}": value}
        return load_error(packed, f"{MODULE}.weight")

    def number(value: int) -> Any:
        return np.array(value, np.int32)

    assert "has nbits 5, axis 1 and group_size 64" in refusal("nbits", number(5))
    assert "axis 2" in refusal("axis", number(2))
    assert "group_size 0" in refusal("group_size", number(0))
    assert "group_size 63" in refusal("group_size", number(63))
    assert "scales that are packed themselves" in refusal("quant_scale", number(1))
    assert "is [192, 127], expected [192, 128]" in refusal("shape", np.array([192, 127]))
    assert "expected U8 [192, 64]" in refusal("W_q", np.zeros((192, 63), np.uint8))
    assert "expected F32 or F16 or BF16 [384, 1]" in refusal("zero", np.zeros((383, 1), np.float32))
    assert "NaN or infinite" in refusal("scale", np.full((384, 1), np.inf, np.float32))
    packed.stored = {key: value for key, value in kept.items() if key != f"{MODULE}.zero"}
    assert "but no zero" in load_error(packed, f"{MODULE}.weight")


def test_scales_that_are_packed_are_refused_by_the_settings(tmp_path: Path) -> None:
    packed = _write(tmp_path)
    packed.config["quantization_config"] = SETTINGS | {"quant_config": {"scale_quant_params": {"nbits": 8}}}
    assert "expected no scale_quant_params" in load_error(packed, f"{MODULE}.weight")
