"""Dequantisation of packed blocks from the layout's definition, in numpy: the oracle of quantised weights."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from llorch_export.quantize import quantize_blocks

Matrix = npt.NDArray[np.float32]


def unpack(packed: npt.NDArray[np.uint8], bits: int) -> npt.NDArray[np.int64]:
    """Return codes [rows, blocks, block_size]; at 4 bits the lower nibble of a byte comes first."""
    if bits == 8:
        return packed.astype(np.int64)
    rows, blocks, nbytes = packed.shape
    codes = np.empty((rows, blocks, 2 * nbytes), np.int64)
    codes[..., 0::2] = packed % 16
    codes[..., 1::2] = packed // 16
    return codes


def dequantise(packed: npt.NDArray[np.uint8], scales: Matrix, *, bits: int, columns: int) -> Matrix:
    """Return ``(code - 2 ** (bits - 1)) * scale``, [rows, columns], without the padding."""
    values = (unpack(packed, bits) - 2 ** (bits - 1)) * scales[..., None].astype(np.float64)
    return values.reshape(len(packed), -1)[:, :columns].astype(np.float32)


def rounded(weight: Matrix, *, bits: int, block_size: int) -> Matrix:
    """Return what quantisation leaves of a matrix."""
    packed, scales = quantize_blocks(weight, bits=bits, block_size=block_size)
    return dequantise(packed, scales, bits=bits, columns=weight.shape[1])
