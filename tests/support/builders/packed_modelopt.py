"""Matrices as NVIDIA's ModelOpt stores them, by the definitions of its formats."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from support.builders.packed_folders import Made, Maker, width_of

E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)


def settings(algorithm: str, **more: object) -> dict[str, object]:
    """Return what ModelOpt writes into ``config.json``."""
    return {
        "quant_method": "modelopt",
        "quant_algo": algorithm,
        "ignore": ["lm_head"],
        "producer": {"name": "modelopt", "version": "0.47.0"},
        "config_groups": {"group_0": {"weights": {"num_bits": 8, "type": "float"}, "targets": ["Linear"]}},
        **more,
    }


def _scale(value: Any) -> npt.NDArray[np.float32]:
    return np.array(value, np.float32)


def fp8(block: str) -> Maker:
    """Return a maker of E4M3. block: ``tensor``, ``channel`` or ``128 by 128``."""

    def make(shape: tuple[int, int], rng: np.random.Generator) -> Made:
        rows, columns = shape
        codes = rng.normal(0, 60, shape).astype(ml_dtypes.float8_e4m3fn)
        width = width_of(columns) / 60
        sizes = {"tensor": (), "channel": (rows,), "128 by 128": (-(-rows // 128), 1, -(-columns // 128), 1)}
        scales = _scale(rng.uniform(width / 2, width, sizes[block]))
        if block == "channel":
            wide = scales[:, None]
        elif scales.ndim:
            wide = np.repeat(np.repeat(scales[:, 0, :, 0], 128, axis=0), 128, axis=1)[:rows, :columns]
        else:
            wide = scales.reshape(1, 1)
        parts = {"weight": codes, "weight_scale": scales}
        if block != "128 by 128":
            parts["input_scale"] = _scale(0.01)
        return parts, codes.astype(np.float32) * wide

    return make


def nvfp4(shape: tuple[int, int], rng: np.random.Generator) -> Made:
    """Make E2M1 in groups of 16, with scales in E4M3 and one for all of them."""
    rows, columns = shape
    codes = rng.integers(0, 16, shape, dtype=np.uint8)
    scales = rng.uniform(100, 400, (rows, columns // 16)).astype(ml_dtypes.float8_e4m3fn)
    whole = _scale(width_of(columns) / 1000)
    values = E2M1[codes] * np.repeat(scales.astype(np.float32) * whole, 16, axis=1)
    packed = codes[:, 0::2] | codes[:, 1::2] << np.uint8(4)
    parts = {
        "weight": packed,
        "weight_scale": scales,
        "weight_scale_2": whole,
        "input_scale": _scale(0.01),
    }
    return parts, values


def mxfp4(shape: tuple[int, int], rng: np.random.Generator) -> Made:
    """Make E2M1 in groups of 32, with powers of two as scales."""
    rows, columns = shape
    codes = rng.integers(0, 16, shape, dtype=np.uint8)
    exponents = rng.integers(120, 124, (rows, columns // 32), dtype=np.uint8)
    scales = np.float32(2) ** (exponents.astype(np.float32) - 127)
    packed = codes[:, 0::2] | codes[:, 1::2] << np.uint8(4)
    parts = {"weight": packed, "weight_scale": exponents}
    return parts, E2M1[codes] * np.repeat(scales, 32, axis=1)


def mxfp8(shape: tuple[int, int], rng: np.random.Generator) -> Made:
    """Make E4M3 in groups of 32, with powers of two as scales."""
    rows, columns = shape
    codes = rng.normal(0, 60, shape).astype(ml_dtypes.float8_e4m3fn)
    exponents = rng.integers(116, 120, (rows, columns // 32), dtype=np.uint8)
    scales = np.float32(2) ** (exponents.astype(np.float32) - 127)
    return {"weight": codes, "weight_scale": exponents}, codes.astype(np.float32) * np.repeat(
        scales, 32, axis=1
    )


def whole_nibbles(scaled_inputs: bool = False) -> Maker:
    """Return a maker of numbers from -8 to 7 in groups of 64, two outputs in a byte."""

    def make(shape: tuple[int, int], rng: np.random.Generator) -> Made:
        rows, columns = shape
        codes = rng.integers(-8, 8, shape, dtype=np.int8)
        width = width_of(columns) / 4
        scales = _scale(rng.uniform(width / 2, width, (rows, columns // 64)))
        packed = ((codes[0::2] & 15) | codes[1::2] << 4).view(np.uint8)
        values = codes.astype(np.float32) * np.repeat(scales, 64, axis=1)
        parts = {"weight": packed, "weight_scale": scales}
        if scaled_inputs:
            parts["pre_quant_scale"] = _scale(rng.uniform(0.5, 1.5, columns))
            values = values * parts["pre_quant_scale"]
        return parts, values

    return make


def whole_bytes(shape: tuple[int, int], rng: np.random.Generator) -> Made:
    """Make signed bytes with a scale for each output."""
    codes = rng.integers(-127, 128, shape, dtype=np.int8)
    width = width_of(shape[1]) / 60
    scales = _scale(rng.uniform(width / 2, width, shape[0]))
    return {"weight": codes, "weight_scale": scales}, codes.astype(np.float32) * scales[:, None]
