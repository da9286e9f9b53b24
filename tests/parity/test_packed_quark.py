"""Quark's weights: exact values, by the scheme that the settings give each module."""

from __future__ import annotations

import copy
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llorch_export.config.packed.quark import QuarkPacking, QuarkScheme
from llorch_export.config.packed.reading import read_packing
from llorch_export.source.open import open_checkpoint
from llorch_serve.errors import ArtifactError
from support.builders.packed_checkpoints import Packed
from support.builders.packed_folders import Maker, write_packed
from support.builders.packed_quark import channels, fp8, groups, mxfp4, settings
from support.harness.packed import load_error, require_carried, require_values

SHAPE: dict[str, Any] = {"hidden_size": 128, "intermediate_size": 192, "head_dim": 32}
ROWS: dict[str, tuple[dict[str, object], Maker]] = {
    "int4": (settings("int4", "per_group"), groups("int4")),
    "uint4": (settings("uint4", "per_group"), groups("uint4")),
    "uint4, in order": (settings("uint4", "per_group", order="order"), groups("uint4", order="order")),
    "int8, groups": (settings("int8", "per_group"), groups("int8")),
    "uint8, groups": (settings("uint8", "per_group"), groups("uint8")),
    "int8": (settings("int8", "per_channel"), channels),
    "fp8": (settings("fp8_e4m3", "per_tensor"), fp8),
    "mxfp4": (settings("fp4", "per_group"), mxfp4),
}
MODULE = "model.layers.0.mlp.up_proj"


def _write(path: Path, row: str = "uint4") -> Packed:
    said, maker = ROWS[row]
    said = copy.deepcopy(said)  # tests change it
    return write_packed(path / "m", SHAPE, maker, said, skip=("lm_head",))


@pytest.mark.parametrize("row", ROWS)
def test_values_are_exact(tmp_path: Path, row: str) -> None:
    packed = _write(tmp_path, row)
    require_values(packed)


@pytest.mark.parametrize("row", ["int4", "uint8, groups", "int8"])
def test_codes_reach_the_graph_as_they_are(tmp_path: Path, row: str) -> None:
    packed = _write(tmp_path, row)
    require_carried(packed, tmp_path / "a")


def _said(packed: Packed) -> dict[str, Any]:
    found = packed.config["quantization_config"]
    assert isinstance(found, dict)
    return found


def test_the_first_pattern_that_fits_has_a_module(tmp_path: Path) -> None:
    packed = _write(tmp_path)
    up, gate = (f"model.layers.0.mlp.{name}_proj.weight" for name in ("up", "gate"))
    signed = settings("int4", "per_group")["global_quant_config"]
    _said(packed)["layer_quant_config"] = {
        "*.up_proj": signed,
        "*.mlp.*": _said(packed)["global_quant_config"],
    }
    packed.rewrite()
    tensors = open_checkpoint(str(packed.folder)).tensors
    np.testing.assert_array_equal(tensors[gate].load(), packed.values[gate])
    signs = packed.stored[up.replace("weight", "weight_zero_point")]
    assert signs.any()
    assert not np.array_equal(tensors[up].load(), packed.values[up])


def test_many_names_are_looked_up_and_many_patterns_refused(tmp_path: Path) -> None:
    """A name is compared with each pattern, so a file's patterns are few; of names it may have many."""
    everything = settings("uint4", "per_group")["global_quant_config"]
    plain = {"weight": None}
    packing = read_packing(
        settings("int4", "per_group")
        | {
            "layer_quant_config": {
                **{f"model.layers.{layer}.mlp.up_proj": plain for layer in range(2**14 - 3)},
                "*.[0-3].mlp.*": everything,
                MODULE.replace("up", "gate"): plain,
            }
        },
        origin="config.json",
    )
    assert isinstance(packing, QuarkPacking)
    started = time.process_time()
    for _ in range(1000):
        assert packing.of(MODULE) is None  # the first that fits, by its place in the file
        assert packing.of(MODULE.replace("up", "down")) == QuarkScheme("uint4", grouped=True)
        assert packing.of(MODULE.replace("up", "gate")) == QuarkScheme("uint4", grouped=True)
        assert packing.of("lm_head") == QuarkScheme("int4", grouped=True)
    assert time.process_time() - started < 1
    many = {f"*{number}*{'a*' * 60}": plain for number in range(2**14)}
    with pytest.raises(
        ArtifactError, match=r"layer_quant_config is dict of 16384 items, expected patterns .* at most 16384"
    ):
        read_packing(settings("int4", "per_group") | {"layer_quant_config": many}, origin="config.json")


def test_what_quark_rounds_beside_weights_is_said(tmp_path: Path) -> None:
    packed = _write(tmp_path)
    spec = {"dtype": "fp8_e4m3", "qscheme": "per_tensor"}
    _said(packed)["kv_cache_quant_config"] = {"*k_proj": {"output_tensors": spec}}
    _said(packed)["global_quant_config"]["input_tensors"] = spec
    for part in ("input_scale", "output_scale"):
        packed.stored[f"model.layers.0.self_attn.k_proj.{part}"] = np.array(1, np.float32)
    packed.rewrite()
    found = open_checkpoint(str(packed.folder))
    assert [line.split(";")[0] for line in found.notices] == [
        "Quark rounds the inputs of layers too",
        "Quark rounds keys and values by stored scales",
    ]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"dtype": "int3"}, "dtype is 'int3', expected one of int4"),
        ({"qscheme": "per_block"}, "qscheme is 'per_block'"),
        ({"ch_axis": 0}, "ch_axis is 0"),
        ({"is_dynamic": True}, "is_dynamic is True"),
        ({"zero_point_type": "float32"}, "zero_point_type is 'float32'"),
        ({"qscheme": "per_channel", "ch_axis": 0}, "is [2, 128], expected [128, 1]"),
    ],
)
def test_schemes_that_cannot_be_read_are_refused(tmp_path: Path, change: dict[str, Any], said: str) -> None:
    packed = _write(tmp_path)
    _said(packed)["global_quant_config"]["weight"] |= change
    assert said in load_error(packed, f"{MODULE}.weight")


def test_settings_that_cannot_be_read_are_refused(tmp_path: Path) -> None:
    packed = _write(tmp_path)
    kept = dict(_said(packed))

    def refusal(**changed: object) -> str:
        packed.config["quantization_config"] = kept | changed
        return load_error(packed, f"{MODULE}.weight")

    assert "pack_method is 'odd'" in refusal(export={"pack_method": "odd"})
    assert "weight_format is 'fake_quantized'" in refusal(export={"weight_format": "fake_quantized"})
    assert "keys that are not understood: rotation" in refusal(rotation={"online": True})
    assert "packed in several steps" in refusal(global_quant_config={"weight": [{}, {}]})
    assert "says that it is not quantised" in refusal(global_quant_config={"weight": None})
    assert "layer_quant_config: *.up_proj is no object" in refusal(layer_quant_config={"*.up_proj": 1})


def test_parts_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    packed = _write(tmp_path)
    kept = dict(packed.stored)

    def refusal(part: str, value: Any) -> str:
        packed.stored = kept | {f"{MODULE}.{part}": value}
        return load_error(packed, f"{MODULE}.weight")

    assert "expected [groups, 192]" in refusal("weight_scale", np.ones((3, 192), np.float32))
    assert "expected I32 [128, 24]" in refusal("weight", np.zeros((128, 23), np.int32))
    assert "expected I32 [2, 24]" in refusal("weight_zero_point", np.zeros((2, 23), np.int32))
    assert "NaN or infinite" in refusal("weight_scale", np.full((2, 192), np.nan, np.float32))
    packed.stored = {key: value for key, value in kept.items() if not key.endswith("weight_zero_point")}
    assert "but no weight_zero_point" in load_error(packed, f"{MODULE}.weight")
