"""Matrices as optimum-quanto stores them, by the definitions of its types."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from support.builders.packed_checkpoints import Packed
from support.builders.packed_folders import Made, Maker, width_of, write_packed


def _pack(codes: npt.NDArray[np.uint8], bits: int) -> npt.NDArray[np.uint8]:
    """Pack rows [n, columns]: a byte holds codes that lie a part of the rows apart, the lowest first."""
    each = 8 // bits
    step = -(-len(codes) // each)
    padded = np.pad(codes, ((0, step * each - len(codes)), (0, 0)))
    parts = [padded[place * step : (place + 1) * step] << np.uint8(place * bits) for place in range(each)]
    return np.bitwise_or.reduce(parts)


def narrow(bits: int, group: int, *, whole: bool = False) -> Maker:
    """Return a maker of codes of 2 or 4 bits. group: 0 for one scale an output; whole: shifts are numbers."""

    def make(shape: tuple[int, int], rng: np.random.Generator) -> Made:
        rows, columns = shape
        size = group or columns
        count = rows * columns // size
        codes = rng.integers(0, 2**bits, (count, size), dtype=np.uint8)
        width = 2 * width_of(columns) / 2**bits
        scales = rng.uniform(width / 2, width, (count, 1)).astype(ml_dtypes.bfloat16)
        shifts: npt.NDArray[Any] = rng.integers(0, 2**bits, (count, 1), dtype=np.uint8)
        wide = scales.astype(np.float32)
        if whole:
            values = wide * (codes.astype(np.float32) - shifts.astype(np.float32))
        else:
            shifts = rng.uniform(-1, 2 * width * 2**bits, (count, 1)).astype(ml_dtypes.bfloat16)
            values = wide * codes.astype(np.float32) - shifts.astype(np.float32)
        parts = {"weight._data._data": _pack(codes, bits), "weight._scale": scales, "weight._shift": shifts}
        return parts, values.reshape(shape)

    return make


def whole_bytes(shape: tuple[int, int], rng: np.random.Generator) -> Made:
    """Make signed bytes with a scale for each output."""
    codes = rng.integers(-127, 128, shape, dtype=np.int8)
    width = width_of(shape[1]) / 60
    scales = rng.uniform(width / 2, width, (shape[0], 1)).astype(ml_dtypes.bfloat16)
    return {"weight._data": codes, "weight._scale": scales}, codes.astype(np.float32) * scales.astype(
        np.float32
    )


def floats(shape: tuple[int, int], rng: np.random.Generator) -> Made:
    """Make E4M3 with a scale for each output."""
    parts, _ = whole_bytes(shape, rng)
    codes = rng.normal(0, 60, shape).astype(ml_dtypes.float8_e4m3fn)
    values = codes.astype(np.float32) * parts["weight._scale"].astype(np.float32)
    return parts | {"weight._data": codes}, values


def write_quanto(
    path: Path, overrides: dict[str, Any], maker: Maker, kind: str, *, activations: str = "none"
) -> Packed:
    """Write a folder. kind: of all packed weights."""
    packed = write_packed(path, overrides, maker, {}, skip=("lm_head",))
    del packed.config["quantization_config"]
    modules = {name.split(".weight._")[0] for name in packed.stored if ".weight._" in name}
    for module in modules:
        for side in ("input_scale", "output_scale"):
            packed.stored[f"{module}.{side}"] = np.array(1, ml_dtypes.bfloat16)
    qmap = {module: {"weights": kind, "activations": activations} for module in sorted(modules)}
    (packed.folder / "quanto_qmap.json").write_text(json.dumps(qmap))
    packed.rewrite()
    return packed
