"""Matrices as torchao's tensor subclasses are stored, by their definitions."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from support.builders.packed_checkpoints import Packed
from support.builders.packed_folders import Made, Maker, width_of, write_packed

SETTINGS: dict[str, object] = {
    "quant_method": "torchao",
    "quant_type": {"default": {"_type": "Int8WeightOnlyConfig", "_data": {}, "_version": 2}},
    "modules_to_not_convert": None,
    "include_input_output_embeddings": False,
    "untie_embedding_weights": False,
}


def whole_numbers(bits: int, group: int, *, zeros: bool = False, scales: Any = np.float32) -> Maker:
    """Return a maker of bytes that hold numbers of ``bits`` bits. group: 0 for one scale an output."""

    def make(shape: tuple[int, int], rng: np.random.Generator) -> Made:
        rows, columns = shape
        size, half = group or columns, 2 ** (bits - 1)
        width = 2 * width_of(columns) / half
        found = rng.uniform(width / 2, width, (rows, columns // size)).astype(scales)
        codes = rng.integers(-half, half, shape, dtype=np.int8)
        offsets = (
            rng.integers(-half, half, found.shape, dtype=np.int8) if zeros else np.zeros_like(found, np.int8)
        )
        wide = np.repeat(found.astype(np.float32), size, axis=1)
        values = wide * (codes.astype(np.float32) - np.repeat(offsets, size, axis=1).astype(np.float32))
        return {"_weight_qdata": codes, "_weight_scale": found, "_weight_zero_point": offsets}, values

    return make


def floats(shape: tuple[int, int], rng: np.random.Generator) -> Made:
    """Make a matrix in floating point of 8 bits, with a scale for each output."""
    codes = rng.normal(0, 60, shape).astype(ml_dtypes.float8_e4m3fn)
    scales = rng.uniform(0.5, 1, (shape[0], 1)).astype(np.float32) * np.float32(width_of(shape[1]) / 60)
    return {"_weight_qdata": codes, "_weight_scale": scales}, codes.astype(np.float32) * scales


def offsets(shape: tuple[int, int], rng: np.random.Generator) -> Made:
    """Make a matrix of 4 bits in groups of 32, with offsets in floating point."""
    rows, columns = shape
    codes = rng.integers(-8, 8, shape, dtype=np.int8)
    width = width_of(columns) / 4
    scales, zeros = (
        rng.uniform(low, high, (columns // 32, rows)).astype(ml_dtypes.bfloat16)
        for low, high in ((width / 2, width), (-width, width))
    )
    wide, moved = (np.repeat(part.T.astype(np.float32), 32, axis=1) for part in (scales, zeros))
    packed = (codes[:, 0::2] & 15) | (codes[:, 1::2] << 4)
    parts = {"_weight_qdata": packed, "_weight_scale": scales, "_weight_zero_point": zeros}
    return parts, codes.astype(np.float32) * wide + moved


def write_torchao(
    path: Path, overrides: dict[str, Any], maker: Maker, kind: str, data: dict[str, Any], group: int = 0
) -> Packed:
    """Write a folder. kind: the class of all packed weights; data: its attributes but ``block_size``."""
    packed = write_packed(path, overrides, maker, SETTINGS, skip=("lm_head",))
    packed.notes = {"format": "pt", "tensor_names": json.dumps(list(packed.values))}
    for name, value in packed.values.items():
        if name in packed.stored:
            packed.notes[name] = json.dumps({"_type": "Tensor"})
            continue
        described = {"block_size": [1, group or value.shape[1]], **data}
        packed.notes[name] = json.dumps({"_type": kind, "_data": described, "_tensor_data_names": []})
    packed.rewrite()
    return packed
