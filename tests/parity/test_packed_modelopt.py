"""ModelOpt's weights: exact values, from settings in either of its two files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llorch_export.config.packed.base import Packing
from llorch_export.config.packed.reading import read_packing
from llorch_export.source.open import open_checkpoint
from support.builders.packed_checkpoints import Packed
from support.builders.packed_folders import Maker, write_packed
from support.builders.packed_modelopt import (
    fp8,
    mxfp4,
    mxfp8,
    nvfp4,
    settings,
    whole_bytes,
    whole_nibbles,
)
from support.harness.packed import load_error, require_carried, require_values

SHAPE: dict[str, Any] = {"hidden_size": 128, "intermediate_size": 192, "head_dim": 32}
ROWS: dict[str, tuple[str, Maker]] = {
    "fp8": ("FP8", fp8("tensor")),
    "fp8, channels": ("FP8_PER_CHANNEL_PER_TOKEN", fp8("channel")),
    "fp8, blocks": ("fp8_pb_wo", fp8("128 by 128")),
    "nvfp4": ("NVFP4", nvfp4),
    "mxfp4": ("MXFP4", mxfp4),
    "mxfp8": ("MXFP8", mxfp8),
    "int4": ("W4A16_AWQ", whole_nibbles()),
    "int4, scaled inputs": ("W4A16_AWQ", whole_nibbles(scaled_inputs=True)),
    "int8": ("W8A16", whole_bytes),
}
MODULE = "model.layers.0.mlp.up_proj"


def _write(path: Path, row: str = "nvfp4", **more: object) -> Packed:
    algorithm, maker = ROWS[row]
    return write_packed(path / "m", SHAPE, maker, settings(algorithm, **more), skip=("lm_head",))


@pytest.mark.parametrize("row", ROWS)
def test_values_are_exact(tmp_path: Path, row: str) -> None:
    packed = _write(tmp_path, row)
    require_values(packed)


@pytest.mark.parametrize("row", ["nvfp4", "mxfp4", "int4", "int4, scaled inputs", "int8"])
def test_codes_reach_the_graph_as_they_are(tmp_path: Path, row: str) -> None:
    packed = _write(tmp_path, row)
    require_carried(packed, tmp_path / "a")


def test_settings_beside_the_config_are_found(tmp_path: Path) -> None:
    packed = _write(tmp_path)
    del packed.config["quantization_config"]
    packed.stored["model.layers.0.self_attn.k_proj.k_scale"] = np.array(1, np.float32)
    packed.rewrite()
    beside = {
        "producer": {"name": "modelopt", "version": "0.29.0"},
        "quantization": {
            "quant_algo": "NVFP4",
            "kv_cache_quant_algo": "FP8",
            "group_size": 16,
            "exclude_modules": ["lm_head"],
        },
    }
    (packed.folder / "hf_quant_config.json").write_text(json.dumps(beside))
    found = open_checkpoint(str(packed.folder))
    np.testing.assert_array_equal(found.tensors[f"{MODULE}.weight"].load(), packed.values[f"{MODULE}.weight"])
    assert any("rounds the inputs of layers too" in line for line in found.notices)
    assert any("rounds keys and values" in line for line in found.notices)


def test_settings_without_a_method_are_told_by_their_producer(tmp_path: Path) -> None:
    packed = _write(tmp_path, quant_method=None)
    found = open_checkpoint(str(packed.folder)).tensors[f"{MODULE}.weight"]
    np.testing.assert_array_equal(found.load(), packed.values[f"{MODULE}.weight"])


def test_parts_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    packed = _write(tmp_path)
    kept = dict(packed.stored)

    def refusal(part: str, value: Any) -> str:
        packed.stored = kept | {f"{MODULE}.{part}": value}
        return load_error(packed, f"{MODULE}.weight")

    assert "expected [192, groups] with equal groups of the 128 inputs" in refusal(
        "weight_scale", kept[f"{MODULE}.weight_scale"][:, :7]
    )
    assert "expected [192, groups]" in refusal("weight_scale", np.zeros(192, np.uint8))
    assert "expected F8_E4M3 [192, 8]" in refusal("weight_scale", np.zeros((192, 8), np.float32))
    assert "is U8 [192, 63]" in refusal("weight", np.zeros((192, 63), np.uint8))
    assert "NaN or infinite" in refusal("weight_scale_2", np.array(np.inf, np.float32))
    assert "weight_scale_2 is F32 [2], expected F32 [1]" in refusal("weight_scale_2", np.ones(2, np.float32))


def test_a_grid_of_scales_that_nobody_writes_is_refused(tmp_path: Path) -> None:
    packed = _write(tmp_path, "fp8")
    packed.stored[f"{MODULE}.weight_scale"] = np.ones((3, 5), np.float32)
    assert "is [3, 5], expected [1, 1], [192, 1], [2, 1]" in load_error(packed, f"{MODULE}.weight")


@pytest.mark.parametrize(
    ("algorithm", "said"),
    [
        ("NVFP4_SVD", "quant_algo is 'NVFP4_SVD', expected one of FP8, "),
        (
            "W4A8_AWQ",
            "quant_algo is 'W4A8_AWQ', expected one of FP8, ",
        ),  # weights are rounded to E4M3 besides
        ("FP9", "quant_algo is 'FP9', expected one of FP8, "),
        (None, "quant_algo is None, expected one of FP8, "),
    ],
)
def test_algorithms_that_are_not_known_are_refused(tmp_path: Path, algorithm: str | None, said: str) -> None:
    assert said in load_error(_write(tmp_path, quant_algo=algorithm), f"{MODULE}.weight")
    own = {"quant_algo": "MIXED_PRECISION", "quantized_layers": {MODULE: {"quant_algo": algorithm}}}
    found = load_error(_write(tmp_path, **own), f"{MODULE}.weight")
    assert f"quantized_layers: {MODULE}: {said}" in found


def test_settings_that_are_not_known_are_refused(tmp_path: Path) -> None:
    assert "keys that are not understood: svd_rank" in load_error(
        _write(tmp_path, svd_rank=32), f"{MODULE}.weight"
    )


@pytest.mark.parametrize(
    ("algorithm", "more", "rounds"),
    [
        ("FP8", {}, True),
        ("W4A8_MXFP4_FP8", {}, True),
        ("MXFP8", {}, True),
        ("W4A16_NVFP4", {}, False),
        ("mxfp4", {}, True),
        ("fp8_pb_wo", {}, False),
        ("fp8_pb_real", {}, True),
        ("W4A16_AWQ", {"config_groups": {"g": {"input_activations": {"num_bits": 8}}}}, True),
        ("MIXED_PRECISION", {"quantized_layers": {"a": {"quant_algo": "W4A16_AWQ"}}}, False),
        (
            "MIXED_PRECISION",
            {"quantized_layers": {"a": {"quant_algo": "W8A16"}, "b": {"quant_algo": "NVFP4"}}},
            True,
        ),
        ("MIXED_PRECISION", {"config_groups": {}}, True),  # which layers have which is said nowhere
    ],
)
def test_rounding_of_inputs_is_said(algorithm: str, more: dict[str, object], rounds: bool) -> None:
    packing = read_packing(settings(algorithm, **more), origin="config.json")
    assert isinstance(packing, Packing)
    assert [line.split(";")[0] for line in packing.notices] == (
        [f"{algorithm} of ModelOpt rounds the inputs of layers too"] if rounds else []
    )


@pytest.mark.parametrize("row", ["fp8", "fp8, blocks", "int4", "int8", "mxfp8"])
def test_a_second_scale_that_no_such_weight_has_is_refused(tmp_path: Path, row: str) -> None:
    packed = _write(tmp_path, row)
    packed.stored[f"{MODULE}.weight_scale_2"] = np.array(2, np.float32)
    found = load_error(packed, f"{MODULE}.weight")
    assert f"{MODULE} has weight_scale_2" in found
    assert "expected" in found
