"""Block quantisation of a weight matrix into the layout of ONNX Runtime's MatMulNBits.

The layout (contrib operator ``com.microsoft.MatMulNBits``): a row of K inputs is cut into ``ceil(K / block)``
blocks, the last one padded; a block holds ``block * bits / 8`` bytes, at 4 bits with the lower nibble first.
Values are unsigned with zero point ``2 ** (bits - 1)``; a block's weights are ``(q - zero_point) * scale``.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import numpy as np
import numpy.typing as npt

_CHUNK_ELEMENTS: Final = 2**21  # temporaries stay near 8 MiB each, whatever the matrix


def block_count(columns: int, block_size: int) -> int:
    """Return the number of blocks of one row."""
    return -(-columns // block_size)


def quantize_blocks(
    weight: npt.NDArray[np.float32], *, bits: int, block_size: int
) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.float32]]:
    """Quantise ``weight`` [N, K] symmetrically, round to nearest.

    Returns packed values [N, blocks, block_size * bits / 8] and scales [N, blocks]. The scale carries the sign of
    the block's largest magnitude, so that this weight falls on the one code, ``-2 ** (bits - 1)``, that has no
    positive counterpart and is met exactly.
    """
    rows, columns = weight.shape
    blocks = block_count(columns, block_size)
    packed = np.empty((rows, blocks, block_size * bits // 8), np.uint8)
    scales = np.empty((rows, blocks), np.float32)
    for part in _row_chunks(rows, columns):
        packed[part], scales[part] = _quantize_rows(weight[part], bits, block_size, blocks)
    return packed, scales


def _row_chunks(rows: int, columns: int) -> Iterator[slice]:
    step = max(1, _CHUNK_ELEMENTS // columns)
    for start in range(0, rows, step):
        yield slice(start, min(start + step, rows))


def _quantize_rows(
    weight: npt.NDArray[np.float32], bits: int, block_size: int, blocks: int
) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.float32]]:
    rows, columns = weight.shape
    padding = blocks * block_size - columns
    if padding:
        weight = np.pad(weight, ((0, 0), (0, padding)))
    grouped = weight.reshape(rows, blocks, block_size)
    low, high = grouped.min(axis=2), grouped.max(axis=2)
    extreme = np.where(-low >= high, low, high)
    half = 2 ** (bits - 1)
    scales = (extreme / np.float32(-half)).astype(np.float32)
    # Below the smallest normal number a scale has no finite reciprocal; such a block adds nothing to any sum.
    scales[np.abs(scales) < np.finfo(np.float32).tiny] = 0
    inverse = np.divide(np.float32(1), scales, out=np.zeros_like(scales), where=scales != 0)
    codes = grouped * inverse[:, :, None]
    np.rint(codes, out=codes)
    codes += half
    np.clip(codes, 0, 2 * half - 1, out=codes)
    quantised = codes.astype(np.uint8)
    if bits == 4:
        quantised = quantised[:, :, 0::2] | (quantised[:, :, 1::2] << 4)
    return quantised, scales
