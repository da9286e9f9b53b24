"""Tiny checkpoints whose weights are packed, written from each format's definition with numpy alone.

Codes, scales and zero points are drawn at random, so that every value of a code and every order of inputs
occurs; the values they stand for are computed here, independently of the exporter.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from support.builders.checkpoints import Weights, tiny_config, write_hf_folder
from support.builders.raw_safetensors import load, save

FLOATS: dict[str, Any] = {"float16": np.float16, "bfloat16": ml_dtypes.bfloat16, "float32": np.float32}


@dataclass
class Packed:
    """A folder, and the values that its tensors stand for, by name. notes: of the header of its file."""

    folder: Path
    config: dict[str, object]
    values: Weights
    stored: dict[str, npt.NDArray[Any]] = field(default_factory=dict)
    notes: dict[str, str] | None = None

    def rewrite(self) -> None:
        """Write ``stored`` and ``config`` again after a test has changed them."""
        save(self.folder / "model.safetensors", self.stored, self.notes)
        (self.folder / "config.json").write_text(json.dumps(self.config))


def linear_names(weights: Weights) -> list[str]:
    """Return the names of the matrices that tools pack, the head's included."""
    return [name for name, value in weights.items() if value.ndim == 2 and "embed" not in name]


def start(path: Path, overrides: dict[str, Any], *, seed: int = 0) -> Packed:
    """Write a plain folder whose matrices and vectors are float16, and return it as a packed one without
    packing.
    """
    folder = write_hf_folder(path, overrides, seed=seed)
    stored = {name: value.astype(np.float16) for name, value in load(folder / "model.safetensors").items()}
    values = {name: value.astype(np.float32) for name, value in stored.items()}
    return Packed(folder, dict(tiny_config(**overrides)), values, stored)


def pack_words(codes: npt.NDArray[np.uint8], bits: int) -> npt.NDArray[np.int32]:
    """Pack codes [rows, count] into one stream of bits a row, the lowest first, padded to words of 32."""
    bit_planes = np.unpackbits(codes[..., None], axis=-1, count=bits, bitorder="little")
    stream = bit_planes.reshape(len(codes), -1)
    stream = np.pad(stream, ((0, 0), (0, -stream.shape[1] % 32)))
    return np.ascontiguousarray(np.packbits(stream, axis=1, bitorder="little")).view("<i4")


@dataclass
class Drawn:
    """A quantised matrix: codes [out, in], scales and zero points [out, groups], group of each input [in]."""

    codes: npt.NDArray[np.uint8]
    scales: npt.NDArray[Any]
    zeros: npt.NDArray[np.uint8]
    index: npt.NDArray[np.int32]

    @property
    def values(self) -> npt.NDArray[np.float32]:
        scales, zeros = self.scales.astype(np.float32), self.zeros.astype(np.float32)
        found: npt.NDArray[np.float32] = scales[:, self.index] * (self.codes - zeros[:, self.index])
        return found


def drawn(
    shape: tuple[int, ...],
    rng: np.random.Generator,
    *,
    bits: int,
    group: int,
    symmetric: bool = True,
    order: bool = False,
    scales: str = "float16",
    lowest_zero: int = 0,
) -> Drawn:
    """Draw a matrix whose values are about as large as a tiny model's. order: groups are scattered."""
    rows, columns = shape
    size = columns if group == -1 else min(group, columns)
    groups, levels = -(-columns // size), 2**bits
    index = np.arange(columns, dtype=np.int32) // size
    if order:
        index = rng.permutation(index)
    width = 2 / (levels * np.sqrt(columns))
    zeros = rng.integers(lowest_zero, levels, (rows, groups), dtype=np.uint8)
    if symmetric:
        zeros[:] = levels // 2
    return Drawn(
        codes=rng.integers(0, levels, shape, dtype=np.uint8),
        scales=rng.uniform(width / 2, width * 2, (rows, groups)).astype(FLOATS[scales]),
        zeros=zeros,
        index=index,
    )


def write_gptq(
    path: Path,
    overrides: dict[str, Any],
    *,
    bits: int = 4,
    group: int = 32,
    symmetric: bool = True,
    order: bool = False,
    version: int = 1,
    scales: str = "float16",
    lowest_zero: int = 0,
    skip: tuple[str, ...] = (),
    own: Mapping[str, tuple[int, int]] | None = None,
    **settings: object,
) -> Packed:
    """Write a folder as AutoGPTQ or GPTQModel do. skip: parts of names of modules that stay plain; own: bits
    and groups of those that have their own.
    """
    packed = start(path, overrides)
    rng = np.random.default_rng(7)
    for name in linear_names(packed.values):
        if any(part in name for part in skip):
            continue
        module = name.removesuffix(".weight")
        width, size = next((v for part, v in (own or {}).items() if part in name), (bits, group))
        matrix = drawn(
            packed.values[name].shape,
            rng,
            bits=width,
            group=size,
            symmetric=symmetric,
            order=order,
            scales=scales,
            lowest_zero=lowest_zero,
        )
        lacking = 1 if version == 1 else 0
        zeros = (matrix.zeros.astype(np.int16) - lacking).astype(np.uint8) & np.uint8(2**width - 1)
        del packed.stored[name]
        packed.stored |= {
            f"{module}.qweight": np.ascontiguousarray(pack_words(matrix.codes, width).T),
            f"{module}.qzeros": pack_words(np.ascontiguousarray(zeros.T), width),
            f"{module}.scales": np.ascontiguousarray(matrix.scales.T),
            f"{module}.g_idx": matrix.index,
        }
        packed.values[name] = matrix.values
    packed.config["quantization_config"] = {
        "quant_method": "gptq",
        "bits": bits,
        "group_size": group,
        "sym": symmetric,
        "desc_act": order,
        "damp_percent": 0.01,
        "checkpoint_format": "gptq" if version == 1 else "gptq_v2",
        "method": "gptq",
        "pack_dtype": "int32",
        **settings,
    }
    packed.rewrite()
    return packed


def write_awq(
    path: Path,
    overrides: dict[str, Any],
    *,
    group: int = 32,
    version: str = "gemm",
    zero_point: bool = True,
    skip: tuple[str, ...] = (),
    **settings: object,
) -> Packed:
    """Write a folder as AutoAWQ does. skip: parts of names of modules that stay plain."""
    packed = start(path, overrides)
    rng = np.random.default_rng(8)
    for name in linear_names(packed.values):
        if any(part in name for part in skip):
            continue
        module = name.removesuffix(".weight")
        shape = packed.values[name].shape
        matrix = drawn(shape, rng, bits=4, group=group, symmetric=not zero_point)
        del packed.stored[name]
        parts = _awq_by_output(matrix, group) if version == "gemv" else _awq_by_input(matrix)
        packed.stored |= {f"{module}.{part}": value for part, value in parts.items()}
        packed.values[name] = matrix.values
    packed.config["quantization_config"] = {
        "quant_method": "awq",
        "bits": 4,
        "group_size": group,
        "version": version,
        "zero_point": zero_point,
        "modules_to_not_convert": list(skip) or None,
        **settings,
    }
    packed.rewrite()
    return packed


def _awq_by_input(matrix: Drawn) -> dict[str, npt.NDArray[Any]]:
    def interleaved(codes: npt.NDArray[np.uint8]) -> npt.NDArray[np.int32]:  # [n, out]
        words = codes.astype(np.uint32).reshape(len(codes), -1, 8)
        found = np.zeros(words.shape[:2], np.uint32)
        for nibble, output in enumerate((0, 2, 4, 6, 1, 3, 5, 7)):
            found |= words[:, :, output] << np.uint32(4 * nibble)
        return found.view(np.int32)

    return {
        "qweight": interleaved(matrix.codes.T),
        "qzeros": interleaved(matrix.zeros.T),
        "scales": np.ascontiguousarray(matrix.scales.T),
    }


def _awq_by_output(matrix: Drawn, group: int) -> dict[str, npt.NDArray[Any]]:
    groups = matrix.scales.shape[1]
    step = {128: 1, 64: 2, 32: 4}[group]
    words = -(-groups // 8)
    words = -(-words // step) * step
    padding = ((0, 0), (0, words * 8 - groups))
    return {
        "qweight": pack_words(matrix.codes, 4),
        "qzeros": pack_words(np.pad(matrix.zeros, padding), 4),
        "scales": np.pad(matrix.scales, padding),
    }


@dataclass
class Group:
    """A group of compressed-tensors' settings, and the matrices that belong to it.

    format, kind, bits, strategy, group, symmetric: as the settings have them. block: of strategy block.
    parts: of names; the first group with a part in a name has the matrix.
    """

    format: str = "pack-quantized"
    kind: str = "int"
    bits: int = 4
    strategy: str = "group"
    group: int = 32
    symmetric: bool = True
    block: tuple[int, int] = (32, 32)
    order: bool = False
    scales: str = "bfloat16"
    targets: tuple[str, ...] = ("Linear",)
    parts: tuple[str, ...] = ("",)
    activations: dict[str, Any] | None = None

    def settings(self) -> dict[str, Any]:
        """Return the group as a config has it."""
        return {
            "targets": list(self.targets),
            "format": self.format,
            "weights": {
                "num_bits": self.bits,
                "type": self.kind,
                "symmetric": self.symmetric,
                "strategy": self.strategy,
                "group_size": self.group if "group" in self.strategy else None,
                "block_structure": list(self.block) if self.strategy == "block" else None,
                "actorder": "group" if self.order else None,
                "dynamic": False,
                "observer": "minmax",
            },
            "input_activations": self.activations,
            "output_activations": None,
        }


def write_compressed(
    path: Path,
    overrides: dict[str, Any],
    *groups: Group,
    ignore: tuple[str, ...] = (),
    plain: tuple[str, ...] = (),
    **settings: object,
) -> Packed:
    """Write a folder as llm-compressor does. ignore: in the settings; plain: parts of names that it means."""
    packed = start(path, overrides)
    rng = np.random.default_rng(9)
    for name in linear_names(packed.values):
        if any(part in name for part in plain):
            continue
        group = next(group for group in groups if any(part in name for part in group.parts))
        make = _compressed_floats if group.kind == "float" else _compressed_numbers
        del packed.stored[name]
        parts, values = make(packed.values[name].shape, rng, group)
        module = name.removesuffix(".weight")
        packed.stored |= {f"{module}.{part}": value for part, value in parts.items()}
        packed.values[name] = values
    packed.config["quantization_config"] = {
        "quant_method": "compressed-tensors",
        "format": groups[0].format,
        "config_groups": {f"group_{i}": group.settings() for i, group in enumerate(groups)},
        "ignore": list(ignore),
        "quantization_status": "compressed",
        "kv_cache_scheme": None,
        "sparsity_config": {},
        "transform_config": {},
        "global_compression_ratio": None,
        "version": "0.13.0",
        **settings,
    }
    packed.rewrite()
    return packed


def _cuts(shape: tuple[int, ...], group: Group) -> tuple[int, int]:
    """Return how many outputs and inputs share a scale."""
    rows, columns = shape
    sizes = {
        "tensor": (rows, columns),
        "channel": (1, columns),
        "group": (1, group.group),
        "tensor_group": (1, group.group),
        "block": group.block,
    }
    high, wide = sizes[group.strategy]
    return min(high, rows), min(wide, columns)


def _spread(scales: npt.NDArray[Any], cuts: tuple[int, int], shape: tuple[int, ...]) -> npt.NDArray[Any]:
    found = np.repeat(np.repeat(scales, cuts[0], axis=0), cuts[1], axis=1)
    return found[: shape[0], : shape[1]]


def _compressed_numbers(
    shape: tuple[int, ...], rng: np.random.Generator, group: Group
) -> tuple[dict[str, npt.NDArray[Any]], npt.NDArray[np.float32]]:
    cuts, half = _cuts(shape, group), 2 ** (group.bits - 1)
    grid = (-(-shape[0] // cuts[0]), -(-shape[1] // cuts[1]))
    width = 2 / (2 * half * np.sqrt(shape[1]))
    scales = rng.uniform(width / 2, width * 2, grid).astype(FLOATS[group.scales])
    numbers = rng.integers(-half, half, shape)
    zeros = np.zeros(grid, np.int64) if group.symmetric else rng.integers(-half, half, grid)
    index = np.arange(shape[1]) // cuts[1]
    if group.order:
        index = rng.permutation(index)
    rows = np.arange(shape[0]) // cuts[0]
    scale, zero = scales.astype(np.float32)[rows][:, index], zeros[rows][:, index]
    values = scale * (numbers - zero).astype(np.float32)
    parts: dict[str, npt.NDArray[Any]] = {"weight_scale": scales}
    if group.format == "pack-quantized":
        parts["weight_packed"] = pack_words((numbers + half).astype(np.uint8), group.bits)
        parts["weight_shape"] = np.array(shape, np.int64)
        if not group.symmetric:
            along = np.ascontiguousarray((zeros + half).astype(np.uint8).T)
            parts["weight_zero_point"] = np.ascontiguousarray(pack_words(along, group.bits).T)
    else:
        parts["weight"] = numbers.astype(np.int8)
        if not group.symmetric:
            parts["weight_zero_point"] = zeros.astype(np.int8)
    if group.order:
        parts["weight_g_idx"] = index.astype(np.int32)
    if group.strategy == "tensor":
        parts["weight_scale"] = scales.reshape(1)
    return parts, values.astype(np.float32)


def _compressed_floats(
    shape: tuple[int, ...], rng: np.random.Generator, group: Group
) -> tuple[dict[str, npt.NDArray[Any]], npt.NDArray[np.float32]]:
    cuts = _cuts(shape, group)
    grid = (-(-shape[0] // cuts[0]), -(-shape[1] // cuts[1]))
    size = 1 / np.sqrt(shape[1])
    if group.bits == 8:
        weight = rng.standard_normal(shape).astype(ml_dtypes.float8_e4m3fn)
        scales = rng.uniform(size / 2, size * 2, grid).astype(FLOATS[group.scales])
        values = weight.astype(np.float32) * _spread(scales.astype(np.float32), cuts, shape)
        stored = scales.reshape(1) if group.strategy == "tensor" else scales
        return {"weight": weight, "weight_scale": stored}, values
    nibbles = rng.integers(0, 16, shape, dtype=np.uint8)
    table = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
    packed = nibbles[:, 0::2] | nibbles[:, 1::2] << np.uint8(4)
    if group.format == "nvfp4-pack-quantized":
        whole = np.array([100.0 / size], np.float32)
        scales = rng.uniform(10, 40, grid).astype(ml_dtypes.float8_e4m3fn)
        factors = scales.astype(np.float32) / whole
        parts = {"weight_packed": packed, "weight_scale": scales, "weight_global_scale": whole}
        return parts, table[nibbles] * _spread(factors, cuts, shape)
    exponents = rng.integers(120, 124, grid, dtype=np.uint8)
    factors = np.exp2(exponents.astype(np.float32) - 127)
    return {"weight_packed": packed, "weight_scale": exponents}, table[nibbles] * _spread(
        factors, cuts, shape
    )
