"""The layout of ONNX Runtime's MatMulNBits and GatherBlockQuantized, and the way from codes to its bytes.

A row of K inputs is cut into ``ceil(K / block)`` blocks, the last one padded; a block holds ``block * bits /
8`` bytes, at 4 bits with the lower nibble first. Codes are unsigned; a block's weights are ``(code -
zero_point) * scale``. Without stored zero points, the zero point is ``2 ** (bits - 1)``; stored ones lie as
codes do, a row padded to whole bytes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import ml_dtypes
import numpy as np
import numpy.typing as npt

from llorch_serve.artifact.manifest import ScaleType

Matrix = npt.NDArray[np.float32]
Bytes = npt.NDArray[np.uint8]

SCALE_DTYPES: Final[dict[ScaleType, npt.DTypeLike]] = {
    "float32": np.float32,
    "bfloat16": ml_dtypes.bfloat16,
    "float16": np.float16,
}
_SMALLEST_SCALE: Final = np.finfo(np.float32).tiny


@dataclass(frozen=True, slots=True)
class Blocks:
    """A quantised matrix.

    packed: codes [rows, blocks, block_size * bits / 8].
    scales: [rows, blocks], in the recipe's scale type.
    zero_points: packed like codes, [rows, ceil(blocks * bits / 8)]; None if all are ``2 ** (bits - 1)``.
    """

    packed: Bytes
    scales: npt.NDArray[np.generic]
    zero_points: Bytes | None

    @property
    def arrays(self) -> tuple[npt.NDArray[np.generic], ...]:
        """What is stored, in the order of the operators' inputs."""
        parts = (self.packed, self.scales)
        return parts if self.zero_points is None else (*parts, self.zero_points)


def block_count(columns: int, block_size: int) -> int:
    """Return the number of blocks of one row."""
    return -(-columns // block_size)


def zero_point_bytes(columns: int, block_size: int, bits: int) -> int:
    """Return the bytes that the stored zero points of one row take."""
    return -(-block_count(columns, block_size) * bits // 8)


def row_chunks(rows: int, columns: int, elements: int) -> Iterator[slice]:
    """Cut ``rows`` into runs of about ``elements`` values, so that temporaries stay small whatever the
    matrix.
    """
    step = max(1, elements // columns)
    for start in range(0, rows, step):
        yield slice(start, min(start + step, rows))


def grouped(weight: Matrix, block_size: int) -> Matrix:
    """Return ``weight`` [rows, K] as [rows, blocks, block_size], the last block filled with zeros."""
    rows, columns = weight.shape
    blocks = block_count(columns, block_size)
    padding = blocks * block_size - columns
    if padding:
        weight = np.pad(weight, ((0, 0), (0, padding)))
    return weight.reshape(rows, blocks, block_size)


def storable(scales: Matrix, scale_type: ScaleType) -> Matrix:
    """Return the scales as they will be read back.

    Below the smallest normal number a scale has no finite reciprocal; such a block adds nothing to any sum
    and gets 0.
    """
    limit = float(ml_dtypes.finfo(SCALE_DTYPES[scale_type]).max)
    bounded = np.clip(scales, -limit, limit)
    rounded = bounded.astype(SCALE_DTYPES[scale_type]).astype(np.float32)
    rounded[np.abs(rounded) < _SMALLEST_SCALE] = 0
    return rounded


def reciprocal(scales: Matrix) -> Matrix:
    """Return ``1 / scales``, and 0 for what is below the smallest normal number, whose reciprocal is not
    finite.
    """
    usable = np.abs(scales) >= _SMALLEST_SCALE
    return np.divide(np.float32(1), scales, out=np.zeros_like(scales), where=usable)


def pack(codes: Matrix | Bytes, bits: int) -> Bytes:
    """Pack whole numbers 0 to ``2 ** bits - 1`` of 2, 4 or 8 bits along the last axis, the lowest bits first;
    what is left of the last byte is filled with zeros.
    """
    whole: Bytes = codes.astype(np.uint8, copy=False)
    each = 8 // bits
    if each == 1:
        return whole
    if left := -whole.shape[-1] % each:
        whole = np.concatenate([whole, np.zeros((*whole.shape[:-1], left), np.uint8)], axis=-1)
    packed = whole[..., 0::each].copy()
    for place in range(1, each):
        packed |= whole[..., place::each] << np.uint8(place * bits)
    return packed
