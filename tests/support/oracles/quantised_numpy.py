"""Dequantisation of packed blocks from the layout's definition, in numpy: the oracle of quantised weights."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from llorch_export.quantize.layout import Blocks
from llorch_serve.artifact.manifest import ScaleType

Matrix = npt.NDArray[np.float32]


def unpack(packed: npt.NDArray[np.uint8], bits: int) -> npt.NDArray[np.int64]:
    """Return codes along the last axis; the lowest bits of a byte come first."""
    each = 8 // bits
    codes = np.empty((*packed.shape[:-1], each * packed.shape[-1]), np.int64)
    for place in range(each):
        codes[..., place::each] = packed.astype(np.int64) // 2 ** (place * bits) % 2**bits
    return codes


def zero_points(blocks: Blocks, bits: int) -> npt.NDArray[np.int64]:
    """Return zero points [rows, blocks]."""
    if blocks.zero_points is None:
        return np.full(blocks.scales.shape, 2 ** (bits - 1))
    return unpack(blocks.zero_points, bits)[:, : blocks.scales.shape[1]]


def dequantise(blocks: Blocks, *, bits: int, columns: int) -> Matrix:
    """Return ``(code - zero_point) * scale``, [rows, columns], without the padding."""
    codes = unpack(blocks.packed, bits) - zero_points(blocks, bits)[..., None]
    values = codes * blocks.scales[..., None].astype(np.float64)
    return values.reshape(len(blocks.packed), -1)[:, :columns].astype(np.float32)


def as_stored(scale: float, scale_type: ScaleType) -> float:
    """Return a scale as the type keeps it: bfloat16 has the upper half of a float32, rounded to nearest, ties
    to even.
    """
    if scale_type == "float32":
        return float(np.float32(scale))
    bits = int(np.float32(scale).view(np.uint32))
    kept = (bits + 0x7FFF + (bits >> 16 & 1)) & 0xFFFF0000
    return float(np.uint32(kept).view(np.float32))
