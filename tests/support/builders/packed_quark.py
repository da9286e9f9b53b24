"""Matrices as AMD's Quark exports them, by the definitions of its formats."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from support.builders.packed_folders import Made, Maker, width_of
from support.builders.packed_modelopt import mxfp4 as mxfp4


def settings(kind: str, grouping: str, *, order: str = "reorder", **more: object) -> dict[str, object]:
    """Return what Quark writes. kind, grouping: ``dtype`` and ``qscheme`` of all weights."""
    axis = {"per_tensor": None, "per_channel": 0, "per_group": 1}[grouping]
    weight = {"dtype": kind, "qscheme": grouping, "ch_axis": axis, "is_dynamic": False, "symmetric": True}
    return {
        "quant_method": "quark",
        "version": "0.13",
        "exclude": ["lm_head"],
        "algo_config": None,
        "export": {"kv_cache_group": [], "pack_method": order, "weight_format": "real_quantized"},
        "global_quant_config": {
            "weight": weight,
            "input_tensors": None,
            "output_tensors": None,
            "bias": None,
        },
        "layer_quant_config": {},
        "layer_type_quant_config": {},
        "kv_cache_quant_config": {},
        **more,
    }


def _words(codes: npt.NDArray[np.uint8], order: str) -> npt.NDArray[np.int32]:
    """Pack codes [n, out] of 4 bits into words [n, out / 8]."""
    outputs = (0, 2, 4, 6, 1, 3, 5, 7) if order == "reorder" else range(8)
    words = codes.astype(np.uint32).reshape(len(codes), -1, 8)
    found = np.zeros(words.shape[:2], np.uint32)
    for nibble, output in enumerate(outputs):
        found |= words[:, :, output] << np.uint32(4 * nibble)
    return found.view(np.int32)


def groups(kind: str, *, order: str = "reorder") -> Maker:
    """Return a maker of whole numbers in groups of 64, with zero points. kind: ``int4``, ``uint8``, ..."""

    def make(shape: tuple[int, int], rng: np.random.Generator) -> Made:
        rows, columns = shape
        bits, signed = int(kind[-1]), kind.startswith("int")
        low = -(2 ** (bits - 1)) if signed else 0
        codes = rng.integers(low, low + 2**bits, shape)
        zeros = rng.integers(low, low + 2**bits, (rows, columns // 64))
        width = width_of(columns) / 2**bits
        scales = rng.uniform(width, width * 2, zeros.shape).astype(ml_dtypes.bfloat16)
        wide = np.repeat(scales.astype(np.float32), 64, axis=1)
        values = wide * (codes - np.repeat(zeros, 64, axis=1)).astype(np.float32)
        if bits == 4:
            weight, offsets = (_words((part.T & 15).astype(np.uint8), order) for part in (codes, zeros))
        else:
            stored = np.int8 if signed else np.uint8
            weight, offsets = (np.ascontiguousarray(part.T).astype(stored) for part in (codes, zeros))
        parts = {"weight": weight, "weight_zero_point": offsets}
        return parts | {"weight_scale": np.ascontiguousarray(scales.T)}, values

    return make


def channels(shape: tuple[int, int], rng: np.random.Generator) -> Made:
    """Make signed bytes with a scale and a zero point for each output."""
    codes, zeros = rng.integers(-128, 128, shape, dtype=np.int8), rng.integers(-9, 9, shape[0], dtype=np.int8)
    width = width_of(shape[1]) / 60
    scales = rng.uniform(width / 2, width, shape[0]).astype(np.float32)
    values = (codes.astype(np.float32) - zeros[:, None]) * scales[:, None]
    return {"weight": codes, "weight_scale": scales, "weight_zero_point": zeros}, values


def fp8(shape: tuple[int, int], rng: np.random.Generator) -> Made:
    """Make E4M3 with one scale."""
    codes = rng.normal(0, 60, shape).astype(ml_dtypes.float8_e4m3fn)
    scale: npt.NDArray[Any] = np.array(width_of(shape[1]) / 60, ml_dtypes.bfloat16)
    return {"weight": codes, "weight_scale": scale}, codes.astype(np.float32) * scale.astype(np.float32)
