"""Packed checkpoints of every form: values exactly as the format defines them, to the last bit."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from llorch_export.checkpoint.folder import ModelFolder
from llorch_export.checkpoint.packed.base import PackedModule
from llorch_export.checkpoint.packed.modules import reader_of
from llorch_export.checkpoint.packed.stored import DTYPES, StoredArray
from llorch_export.checkpoint.safetensors import file_tensors
from llorch_export.config.packed.base import Packing
from llorch_export.config.packed.reading import read_packing
from llorch_export.source.open import open_checkpoint
from support.builders.packed_checkpoints import Group, Packed, write_awq, write_compressed, write_gptq
from support.builders.raw_safetensors import save

PUBLISHED = Path(__file__).parent.parent / "data" / "published" / "packed_vectors.jsonl"
VECTORS: list[dict[str, Any]] = [json.loads(line) for line in PUBLISHED.read_text().splitlines()]
SHAPE: dict[str, Any] = {"hidden_size": 128, "intermediate_size": 192, "head_dim": 32, "attention_bias": True}
# Heads that make 96 inputs of the output projection, and 160 of the down projection: tails everywhere.
TAILS: dict[str, Any] = {"hidden_size": 96, "intermediate_size": 160, "head_dim": 24}
V2: dict[str, Any] = {"symmetric": False, "version": 2}
Write = Callable[[Path], Packed]

GPTQ: dict[str, dict[str, Any]] = {
    "4 bits": {},
    "8 bits": {"bits": 8},
    "2 bits": {"bits": 2},
    "3 bits": {"bits": 3},
    "3 bits, affine": {"bits": 3, **V2},
    "affine": V2,
    "affine, version 1": {"symmetric": False, "lowest_zero": 1},
    "affine 2 bits, order": {"bits": 2, "order": True, **V2},
    "affine 8 bits": {"bits": 8, **V2},
    "order": {"order": True},
    "order, groups of 128": {"order": True, "group": 128},
    "one group": {"group": -1},
    "one group, affine": {"group": -1, **V2},
    "a short last group": {"group": 128},
    "bfloat16 scales": {"group": 64, "scales": "bfloat16"},
    "groups of 96": {"group": 96},
    "head is plain": {"skip": ("lm_head",)},
}
AWQ: dict[str, dict[str, Any]] = {
    "gemm": {},
    "gemm, groups of 128": {"group": 128},
    "gemm, one group": {"group": -1},
    "gemm, no zero point": {"zero_point": False},
    "gemv": {"version": "gemv"},
    "gemv, groups of 64": {"version": "gemv", "group": 64},
    "gemv, groups of 128": {"version": "gemv", "group": 128},
    "some plain": {"skip": ("lm_head", "layers.1.mlp")},
}
COMPRESSED: dict[str, Group] = {
    "w4a16": Group(),
    "w4a16, affine": Group(symmetric=False),
    "w4a16, order": Group(order=True),
    "w4a16, affine, order": Group(order=True, symmetric=False),
    "w4a16, channel": Group(strategy="channel"),
    "w4a16, tensor": Group(strategy="tensor"),
    "w3a16": Group(bits=3),
    "w2a16, affine": Group(bits=2, symmetric=False),
    "w8a16": Group(bits=8, group=128, scales="float16"),
    "w5a16": Group(bits=5),
    "w8a8": Group("int-quantized", bits=8, strategy="channel"),
    "w8a8, affine": Group("int-quantized", bits=8, strategy="channel", symmetric=False),
    "w8a8, tensor": Group("int-quantized", bits=8, strategy="tensor", scales="float32"),
    "w8, block": Group("int-quantized", bits=8, strategy="block"),
    "w4 in bytes": Group("int-quantized", bits=4),
    "naive": Group("naive-quantized", bits=8, strategy="channel"),
    "fp8": Group("float-quantized", "float", 8, "channel"),
    "fp8, tensor": Group("float-quantized", "float", 8, "tensor", scales="float32"),
    "fp8, block": Group("float-quantized", "float", 8, "block"),
    "fp8, groups": Group("float-quantized", "float", 8, "group"),
    "nvfp4": Group("nvfp4-pack-quantized", "float", 4, "tensor_group", 16),
    "mxfp4": Group("mxfp4-pack-quantized", "float", 4, "group", 32),
}


def stored(part: dict[str, Any]) -> npt.NDArray[Any]:
    data = np.frombuffer(base64.b64decode(part["data"]), DTYPES[part["kind"]])
    return data.reshape(part["shape"])


def _same(packed: Packed) -> None:
    tensors = open_checkpoint(str(packed.folder)).tensors
    for name, value in packed.values.items():
        tensor = tensors[name]
        np.testing.assert_array_equal(tensor.load(), value, err_msg=name)
        middle = tensor.shape[0] // 3 + 1
        np.testing.assert_array_equal(tensor.load_rows(middle, middle + 5), value[middle : middle + 5])


@pytest.mark.parametrize("shape", [SHAPE, TAILS], ids=["even", "tails"])
@pytest.mark.parametrize("settings", GPTQ.values(), ids=GPTQ)
def test_gptq(tmp_path: Path, settings: dict[str, Any], shape: dict[str, Any]) -> None:
    _same(write_gptq(tmp_path / "m", shape, **settings))


@pytest.mark.parametrize("settings", AWQ.values(), ids=AWQ)
def test_awq(tmp_path: Path, settings: dict[str, Any]) -> None:
    _same(write_awq(tmp_path / "m", SHAPE, **settings))


@pytest.mark.parametrize("shape", [SHAPE, TAILS], ids=["even", "tails"])
@pytest.mark.parametrize("group", COMPRESSED.values(), ids=COMPRESSED)
def test_compressed_tensors(tmp_path: Path, group: Group, shape: dict[str, Any]) -> None:
    _same(write_compressed(tmp_path / "m", shape, group))


@pytest.mark.parametrize("row", VECTORS, ids=[f"{row['tool']}: {row['label']}" for row in VECTORS])
def test_the_tools_own_matrices_are_read_as_the_tools_read_them(tmp_path: Path, row: dict[str, Any]) -> None:
    save(tmp_path / "model.safetensors", {f"m.{name}": stored(part) for name, part in row["parts"].items()})
    tensors = file_tensors(tmp_path / "model.safetensors", ModelFolder(tmp_path), packed=True)
    parts = {name.removeprefix("m."): StoredArray.at(t.source, t.dtype) for name, t in tensors.items()}
    packing = read_packing(row["settings"], origin="config.json")
    assert isinstance(packing, Packing)
    expected = stored(row["weight"])
    found = reader_of(packing).read(PackedModule("m", expected.shape, parts))
    assert found is not None
    rows = found.load_rows(0, expected.shape[0])
    # Some tools compute in half precision, and round what is exact here.
    np.testing.assert_array_equal(rows.astype(expected.dtype), expected)
