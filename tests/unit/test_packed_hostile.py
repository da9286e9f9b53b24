"""Packed weights that lie, or are damaged: refused in a sentence, before or while they are read."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llorch_export.checkpoint.codes import CodeRows, Codes
from llorch_export.config.packed.reading import read_packing, read_packing_file
from llorch_export.source.open import open_checkpoint
from llorch_serve.errors import ArtifactError
from support.builders.checkpoints import write_hf_folder
from support.builders.packed_checkpoints import Group, Packed, write_awq, write_compressed, write_gptq

SHAPE: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1}
UP = "model.layers.0.mlp.up_proj"
Stored = dict[str, Any]


def read_all(packed: Packed) -> None:
    packed.rewrite()
    for tensor in open_checkpoint(str(packed.folder)).tensors.values():
        tensor.load()


def changed(part: str, change: Callable[[Any], Any]) -> Callable[[Stored], None]:
    def edit(stored: Stored) -> None:
        stored[f"{UP}.{part}"] = change(stored[f"{UP}.{part}"].copy())

    return edit


def with_item(value: object) -> Callable[[Any], Any]:
    def change(array: Any) -> Any:
        array.reshape(-1)[0] = value
        return array

    return change


def without(part: str) -> Callable[[Stored], None]:
    def edit(stored: Stored) -> None:
        del stored[f"{UP}.{part}"]

    return edit


GPTQ: dict[str, tuple[Callable[[Stored], None], str]] = {
    "group beyond the last": (changed("g_idx", with_item(2)), r"g_idx names groups 0 to 2, and there are 2"),
    "group before the first": (changed("g_idx", with_item(-1)), "names groups -1 to 1"),
    "g_idx of another length": (changed("g_idx", lambda a: a[:-1]), r"g_idx is I32 \[63\], expected"),
    "scales of another shape": (changed("scales", lambda a: a[:1]), r"scales is F16 \[1, 96\], expected"),
    "scales of whole numbers": (changed("scales", lambda a: a.astype(np.int32)), "scales is I32"),
    "scales turned": (changed("scales", lambda a: a.T.copy()), r"scales is F16 \[96, 2\]"),
    "a scale that is NaN": (changed("scales", with_item(np.nan)), "scales that are NaN or infinite"),
    "a scale that is infinite": (changed("scales", with_item(np.inf)), "scales that are NaN or infinite"),
    "codes of another shape": (changed("qweight", lambda a: a[:-1]), r"qweight is I32 \[7, 96\]"),
    "codes of another type": (changed("qweight", lambda a: a.astype(np.float32)), "qweight is F32"),
    "zero points off the middle": (changed("qzeros", with_item(0)), "expected 8 alone, since .* sym: true"),
    "no scales": (without("scales"), f"module {UP} has .* but no scales"),
    "no codes": (without("qweight"), "but no qweight"),
    "packed and plain": (
        lambda stored: stored.update({f"{UP}.weight": np.zeros((96, 64), np.float16)}),
        "packed .* and plain",
    ),
    "a part of a module that is not": (
        lambda stored: stored.update({"model.layers.7.mlp.up_proj.qweight": np.zeros((8, 96), np.int32)}),
        "no use for",
    ),
    "a norm of whole numbers": (
        lambda stored: stored.update({"model.norm.weight": np.zeros(64, np.int32)}),
        "model.norm.weight has storage type I32",
    ),
}


@pytest.mark.parametrize(("edit", "found"), GPTQ.values(), ids=GPTQ)
def test_gptq(tmp_path: Path, edit: Callable[[Stored], None], found: str) -> None:
    packed = write_gptq(tmp_path / "m", SHAPE)
    edit(packed.stored)
    with pytest.raises(ArtifactError, match=found):
        read_all(packed)


@pytest.mark.parametrize(
    ("group", "part", "change", "found"),
    [
        (Group(), "weight_shape", with_item(1), r"weight_shape says \[1, 64\], expected \[96, 64\]"),
        (Group(), "weight_packed", lambda a: a[:, :-1], r"weight_packed is I32 \[96, 7\]"),
        (Group(), "weight_scale", with_item(np.nan), "NaN or infinite"),
        (Group(), "weight_scale", lambda a: a[:, :1], r"weight_scale is \[96, 1\], expected \[96, 2\]"),
        (Group("int-quantized", bits=4), "weight", with_item(8), "holds -8 to 8, expected numbers of 4 bits"),
        (Group(symmetric=False), "weight_zero_point", lambda a: a[:-1], "weight_zero_point is I32"),
        (Group(order=True), "weight_g_idx", with_item(9), "names groups 0 to 9"),
        (
            Group("mxfp4-pack-quantized", "float"),
            "weight_scale",
            with_item(255),
            "scales that are no numbers",
        ),
        (
            Group("nvfp4-pack-quantized", "float", 4, "tensor_group", 16),
            "weight_global_scale",
            with_item(0),
            "expected a positive number",
        ),
        (Group("float-quantized", "float", 8, "channel"), "weight", with_item(np.nan), "holds NaN"),
    ],
)
def test_compressed_tensors(
    tmp_path: Path, group: Group, part: str, change: Callable[[Any], Any], found: str
) -> None:
    packed = write_compressed(tmp_path / "m", SHAPE, group)
    changed(part, change)(packed.stored)
    with pytest.raises(ArtifactError, match=found):
        read_all(packed)


@pytest.mark.parametrize("bias", [0.0, 1.0])
def test_a_bias_of_zeros_that_a_tool_has_added_is_none(tmp_path: Path, bias: float) -> None:
    packed = write_gptq(tmp_path / "m", SHAPE)
    packed.stored[f"{UP}.bias"] = np.full(96, bias, np.float16)
    if not bias:
        read_all(packed)
        return
    with pytest.raises(ArtifactError, match=r"up_proj\.bias.*bias flags"):
        read_all(packed)


@pytest.mark.parametrize("layout", ["pack-quantized", "int-quantized"])
def test_zero_points_of_symmetric_codes_are_zero(tmp_path: Path, layout: str) -> None:
    packed = write_compressed(tmp_path / "m", SHAPE, Group(layout, bits=8, strategy="channel"))
    packed.stored[f"{UP}.weight_zero_point"] = np.zeros((96, 1), np.int8)
    read_all(packed)
    packed.stored[f"{UP}.weight_zero_point"][3] = 2
    with pytest.raises(ArtifactError, match="zero points 128 to 130, expected 128 alone"):
        read_all(packed)


@pytest.mark.filterwarnings("error")
def test_values_that_overflow_are_refused_without_a_warning(tmp_path: Path) -> None:
    group = Group("float-quantized", "float", 8, "channel", scales="float32")
    packed = write_compressed(tmp_path / "m", SHAPE, group)
    packed.stored[f"{UP}.weight_scale"][0] = 3e38
    packed.stored[f"{UP}.weight"][0] = 400
    with pytest.raises(ArtifactError, match=r"up_proj\.weight: codes times scales give NaN or infinity"):
        read_all(packed)


@pytest.mark.parametrize("sign", [1, -1])
def test_a_number_beside_codes_hides_no_overflow(sign: int) -> None:
    def read(_start: int, _stop: int) -> CodeRows:
        scale, number = np.array([[sign * 2e37]], np.float32), np.array([[3e38]], np.float32)
        return CodeRows(np.full((1, 4), 8 + 7 * sign, np.uint8), scale, number)  # 2e37 * 7 + 3e38

    codes = Codes(4, 4, 4, False, "float32", read, zero_type="float32", zero_kind="added")
    with pytest.raises(ArtifactError, match="codes times scales give NaN or infinity"):
        codes.finite("w").read(0, 1)


def test_awq(tmp_path: Path) -> None:
    packed = write_awq(tmp_path / "m", SHAPE)
    changed("qzeros", lambda a: a[:, :-1])(packed.stored)
    with pytest.raises(ArtifactError, match=r"qzeros is I32 \[2, 11\], expected I32 or U32 \[2, 12\]"):
        read_all(packed)


def test_what_the_settings_call_plain_is_not_packed(tmp_path: Path) -> None:
    packed = write_compressed(tmp_path / "m", SHAPE, Group(), ignore=(UP,))
    with pytest.raises(ArtifactError, match="says that it is not quantised"):
        read_all(packed)


def test_a_file_that_ends_early_is_refused(tmp_path: Path) -> None:
    packed = write_gptq(tmp_path / "m", SHAPE)
    path = packed.folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-5])
    with pytest.raises(ArtifactError, match="truncated or damaged"):
        open_checkpoint(str(packed.folder))


GROUP = {"targets": ["Linear"], "weights": {"num_bits": 4, "strategy": "group", "group_size": 32}}
CT = {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": {"g": GROUP}}
GPTQ_4 = {"quant_method": "gptq", "bits": 4, "group_size": 128}
SETTINGS: dict[str, tuple[dict[str, Any], str]] = {
    "no bits": ({"quant_method": "gptq"}, "lacks bits"),
    "5 bits": (GPTQ_4 | {"bits": 5}, "bits is 5, expected one of 2, 3, 4, 8"),
    "no group": (GPTQ_4 | {"group_size": 0}, "group_size is 0, expected"),
    "a negative group": (GPTQ_4 | {"group_size": -2}, "group_size is -2"),
    "marlin": (GPTQ_4 | {"checkpoint_format": "marlin"}, "checkpoint_format is 'marlin'"),
    "rotated": (GPTQ_4 | {"rotation": "hadamard"}, "rotation is 'hadamard', expected nothing"),
    "unknown key": (GPTQ_4 | {"twist": 1}, "keys that are not understood: twist"),
    "3 bits, affine, version 1": (GPTQ_4 | {"bits": 3, "sym": False}, "checkpoint_format gptq_v2"),
    "rule of no object": (GPTQ_4 | {"dynamic": {"+:.*": 3}}, "has no object of settings"),
    "rule that looks ahead": (GPTQ_4 | {"dynamic": {"-:(?=a)b": {}}}, "cannot be matched"),
    "rule that counts for ever": (GPTQ_4 | {"dynamic": {"-:" + "(" * 30 + "a" + ")*" * 30: {}}}, "matched"),
    "rules beyond all measure": (
        GPTQ_4 | {"dynamic": {f"+:{'x?' * 90}{number}": {} for number in range(50)}},
        "more than 8000 steps",
    ),
    "awq, 3 bits": ({"quant_method": "awq", "bits": 3}, "expected 4, the only width"),
    "awq, gemv_fast": ({"quant_method": "awq", "version": "gemv_fast"}, "version is 'gemv_fast', expected"),
    "auto-round, fp8": ({"quant_method": "auto-round", "bits": 8, "data_type": "fp8"}, "data_type is 'fp8'"),
    "auto-round, w4a8": ({"quant_method": "auto-round", "bits": 4, "act_bits": 8}, "act_bits is 8"),
    "auto-round, layout": (
        {"quant_method": "auto-round", "bits": 4, "packing_format": "auto_round:llm_compressor"},
        "packing_format is",
    ),
    "sparse": (CT | {"sparsity_config": {"format": "sparse-24-bitmask"}}, "sparsity_config is"),
    "rotated by it": (CT | {"transform_config": {"config_groups": {"R3": {}}}}, "transform_config is"),
    "another format": (CT | {"format": "marlin-24"}, "format is 'marlin-24', expected one of"),
    "floats in whole numbers": (
        CT | {"config_groups": {"g": GROUP | {"weights": {"num_bits": 8, "type": "float"}}}},
        "what pack-quantized stores",
    ),
    "a preset": (CT | {"config_groups": {"W8A8": ["Linear"]}}, "W8A8 is no object of settings"),
    "targets of numbers": (CT | {"config_groups": {"g": GROUP | {"targets": [1]}}}, "expected a list of str"),
    "a block of nothing": (
        CT
        | {
            "config_groups": {
                "g": GROUP | {"weights": {"num_bits": 8, "strategy": "block", "block_structure": [0, 1]}}
            }
        },
        "block_structure is",
    ),
}


@pytest.mark.parametrize(("settings", "found"), SETTINGS.values(), ids=SETTINGS)
def test_settings_that_are_not_understood_are_refused_by_name(settings: dict[str, Any], found: str) -> None:
    with pytest.raises(ArtifactError, match=found):
        read_packing(settings, origin="config.json")


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        (
            "quantize_config.json",
            {"bits": 4, "group_size": 32, "desc_act": False, "model_file_base_name": "m"},
        ),
        ("quant_config.json", {"w_bit": 4, "q_group_size": 32, "zero_point": True, "version": "GEMM"}),
    ],
)
def test_settings_of_older_tools_lie_in_a_file_of_their_own(
    tmp_path: Path, name: str, settings: dict[str, Any]
) -> None:
    read_packing_file(settings, name=name, origin=name)
    write = write_gptq if name == "quantize_config.json" else write_awq
    packed = write(tmp_path / "m", SHAPE)
    (packed.folder / name).write_text(json.dumps(settings))
    del packed.config["quantization_config"]
    packed.rewrite()
    tensors = open_checkpoint(str(packed.folder)).tensors
    np.testing.assert_array_equal(tensors[f"{UP}.weight"].load(), packed.values[f"{UP}.weight"])


def test_rules_for_some_modules_hold(tmp_path: Path) -> None:
    rules = {r"-:.*\.down_proj": {}, r"+:.*\.up_proj": {"bits": 8, "group_size": 16}}
    packed = write_gptq(tmp_path / "m", SHAPE, skip=("down_proj",), own={"up_proj": (8, 16)}, dynamic=rules)
    tensors = open_checkpoint(str(packed.folder)).tensors
    for name, value in packed.values.items():
        np.testing.assert_array_equal(tensors[name].load(), value, err_msg=name)
    assert tensors[f"{UP}.weight"].packed == "GPTQ, 8 bits, groups of 16"


def test_settings_of_some_modules_of_auto_round_hold(tmp_path: Path) -> None:
    packed = write_gptq(tmp_path / "m", SHAPE, skip=("lm_head",), own={"up_proj": (8, 16)})
    packed.config["quantization_config"] = {
        "quant_method": "auto-round",
        "bits": 4,
        "group_size": 32,
        "sym": True,
        "packing_format": "auto_round:auto_gptq",
        "extra_config": {UP: {"bits": 8, "group_size": 16}, "lm_head": {"bits": 16, "data_type": "float"}},
    }
    packed.rewrite()
    tensors = open_checkpoint(str(packed.folder)).tensors
    for name, value in packed.values.items():
        np.testing.assert_array_equal(tensors[name].load(), value, err_msg=name)


def test_scales_of_a_cache_are_left_aside_and_said(tmp_path: Path) -> None:
    cache = {"num_bits": 8, "type": "float", "strategy": "tensor"}
    packed = write_compressed(tmp_path / "m", SHAPE, Group(), kv_cache_scheme=cache)
    packed.stored["model.layers.0.self_attn.k_scale"] = np.ones(1, np.float32)
    packed.rewrite()
    assert any("kv_cache_scheme" in notice for notice in open_checkpoint(str(packed.folder)).notices)


def test_whole_numbers_without_settings_are_refused_as_before(tmp_path: Path) -> None:
    folder = write_hf_folder(tmp_path / "m", dtype="I32")
    with pytest.raises(ArtifactError, match="has storage type I32"):
        open_checkpoint(str(folder))
