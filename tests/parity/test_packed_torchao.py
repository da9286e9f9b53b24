"""torchao's weights: exact values by the class that a file's header names."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from llorch_export.config.packed.base import Packing
from llorch_export.config.packed.reading import read_packing
from llorch_export.source.open import open_checkpoint
from llorch_serve.errors import ArtifactError
from support.builders.packed_checkpoints import Packed
from support.builders.packed_folders import Maker
from support.builders.packed_torchao import floats, offsets, whole_numbers, write_torchao
from support.harness.packed import load_error, require_carried, require_values

SHAPE: dict[str, Any] = {"hidden_size": 128, "intermediate_size": 192, "head_dim": 32}
INT4 = {"target_dtype": {"_type": "torch.dtype", "_data": "int4"}}
INT3 = {"target_dtype": {"_type": "torch.dtype", "_data": "int3"}}
ROWS: dict[str, tuple[Maker, str, dict[str, Any], int]] = {
    "int8": (whole_numbers(8, 0), "Int8Tensor", {}, 0),
    "int8, zero points": (whole_numbers(8, 0, zeros=True), "Int8Tensor", {}, 0),
    "int8, groups": (whole_numbers(8, 64), "Int8Tensor", {}, 64),
    "int4": (whole_numbers(4, 32, scales=ml_dtypes.bfloat16), "IntxUnpackedToInt8Tensor", INT4, 32),
    "int4, zero points": (whole_numbers(4, 64, zeros=True), "IntxUnpackedToInt8Tensor", INT4, 64),
    "int3": (whole_numbers(3, 32), "IntxUnpackedToInt8Tensor", INT3, 32),
    "fp8": (floats, "Float8Tensor", {}, 0),
    "int4 with offsets": (offsets, "Int4Tensor", {}, 32),
}
MODULE = "model.layers.0.mlp.up_proj"
WEIGHT = f"{MODULE}.weight"


def _write(path: Path, row: str = "int4") -> Packed:
    return write_torchao(path / "m", SHAPE, *ROWS[row])


@pytest.mark.parametrize("row", ROWS)
def test_values_are_exact(tmp_path: Path, row: str) -> None:
    packed = _write(tmp_path, row)
    require_values(packed)


@pytest.mark.parametrize("row", ["int8, zero points", "int4, zero points", "int3"])
def test_codes_reach_the_graph_as_they_are(tmp_path: Path, row: str) -> None:
    packed = _write(tmp_path, row)
    require_carried(packed, tmp_path / "a")


@pytest.mark.parametrize(
    ("note", "said"),
    [
        (None, "its header does not describe model.layers.0.mlp.up_proj.weight"),
        ("[", "is no JSON object"),
        ("[1]", "is no JSON object"),
        (
            '{"_type": "Int4TilePackedTo4dTensor"}',
            "which only its own kernels read; expected one of Int8Tensor",
        ),
        ('{"_type": "Int8Tensor"}', "has no _data"),
        ('{"_type": "Int8Tensor", "_data": {"block_size": [0, 32]}}', "block_size is [0, 32]"),
        ('{"_type": "Int8Tensor", "_data": {"block_size": [1, 16]}}', "expected [192, 8]"),
        ('{"_type": "IntxUnpackedToInt8Tensor", "_data": {"block_size": [1, 32]}}', "target_dtype"),
        (
            '{"_type": "IntxUnpackedToInt8Tensor", "_data": {"block_size": [1, 32], "target_dtype": '
            '{"_data": "int2"}}}',
            "from -2 to 1",
        ),
        ('{"_type": "Float8Tensor", "_data": {"block_size": [1, 32]}}', "expected F8_E4M3 or F8_E5M2"),
    ],
)
def test_a_description_that_does_not_fit_is_refused(tmp_path: Path, note: str | None, said: str) -> None:
    packed = _write(tmp_path)
    assert packed.notes is not None
    del packed.notes[WEIGHT]
    if note is not None:
        packed.notes[WEIGHT] = note
    assert said in load_error(packed, WEIGHT)


@pytest.mark.parametrize("row", ["int4", "int4 with offsets"])
def test_inputs_are_multiplied_where_they_are_to_be(tmp_path: Path, row: str) -> None:
    packed = _write(tmp_path, row)
    factors = np.random.default_rng(1).uniform(0.5, 1.5, 128).astype(np.float32)
    packed.stored[f"{MODULE}._weight_act_pre_scale"] = factors
    packed.values[WEIGHT] = packed.values[WEIGHT] * factors
    packed.rewrite()
    require_values(packed)
    require_carried(packed, tmp_path / "a")


def test_factors_of_inputs_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    packed = _write(tmp_path)
    packed.stored[f"{MODULE}._weight_act_pre_scale"] = np.ones(127, np.float32)
    assert "F16 or BF16 [128]" in load_error(packed, WEIGHT)
    packed.stored[f"{MODULE}._weight_act_pre_scale"] = np.full(128, np.inf, np.float32)
    assert "NaN or infinite" in load_error(packed, WEIGHT)


def test_pickles_are_refused_with_the_line_that_converts(tmp_path: Path) -> None:
    packed = _write(tmp_path)
    (packed.folder / "model.safetensors").rename(packed.folder / "pytorch_model.bin")
    with pytest.raises(ArtifactError, match=r"are never read.*packed by torchao.*save_pretrained") as caught:
        open_checkpoint(str(packed.folder))
    assert "pip install" in str(caught.value)
    assert json.loads((packed.folder / "config.json").read_text())["quantization_config"]


@pytest.mark.parametrize(
    ("kind", "rounds"),
    [
        ("int8_weight_only", False),
        ("int4_weight_only", False),
        ("int8_dynamic_activation_int8_weight", True),
        ("int8_dynamic_activation_int4_weight", True),
        ("float8_dynamic_activation_float8_weight", True),
        ("float8_static_activation_float8_weight", True),
        ({"default": {"_type": "Int8WeightOnlyConfig", "_data": {}}}, False),
        ({"default": {"_type": "Int8DynamicActivationIntxWeightConfig", "_data": {}}}, True),
        ({"default": {"_type": "MXDynamicActivationMXWeightConfig", "_data": {}}}, True),
        ({"default": {"_type": "Int8StaticActivationInt8WeightConfig", "_data": {}}}, True),
        (
            {
                "default": {
                    "_type": "FqnToConfig",
                    "_data": {"a": {"_type": "Int8DynamicActivationInt8Weight"}},
                }
            },
            True,
        ),
    ],
)
def test_rounding_of_inputs_is_said(kind: object, rounds: bool) -> None:
    packing = read_packing({"quant_method": "torchao", "quant_type": kind}, origin="config.json")
    assert isinstance(packing, Packing)
    assert any("torchao rounds the inputs of layers" in notice for notice in packing.notices) is rounds
