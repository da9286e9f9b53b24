"""Error feedback: each column's rounding error is made up for by the columns that are still to be rounded.

After GPTQ (Frantar et al. 2022). With ``H`` the mean of ``x x^T`` over inputs ``x`` of the layer, the error
of a row's output is ``e H e^T``. Columns are rounded from the first to the last; the error of one is spread
over those after it in the way that adds least to the output's, which a Cholesky factor of ``H``'s inverse
says. Scales of a block, and zero points where it has one, are found when its turn comes, on the weights as
they have become.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

from llorch_export.quantize.layout import (
    SCALE_DTYPES,
    Blocks,
    Matrix,
    block_count,
    grouped,
    pack,
    reciprocal,
)
from llorch_export.quantize.nearest import nearest_scales
from llorch_export.quantize.search import searched
from llorch_serve.artifact.manifest import ScaleType

_TOGETHER: Final = 16
"""Columns whose errors reach those after them in one product, in place of one by one."""


def quantize_feedback(
    weight: Matrix,
    factor: Matrix,
    *,
    bits: int,
    block_size: int,
    zero_points: bool = True,
    scale_type: ScaleType = "float32",
) -> Blocks:
    """Quantise ``weight`` [rows, K]; rows are independent of each other.

    factor: [K, K], the :func:`~.error_factor.error_factor` of the layer's inputs. zero_points: whether each
        block has one of its own, which are searched with the scales; otherwise all are ``2 ** (bits - 1)``,
        and a block's largest magnitude gives its scale.
    """
    rows, columns = weight.shape
    blocks = block_count(columns, block_size)
    left = np.array(weight.T, np.float32, order="C")  # a column lies in one piece; errors so far are included
    codes = np.empty((blocks * block_size, rows), np.float32)
    scales, zeros = np.empty((rows, blocks), np.float32), np.empty((rows, blocks), np.float32)
    for block in range(blocks):
        start, stop = block * block_size, min((block + 1) * block_size, columns)
        found = grouped(np.ascontiguousarray(left[start:stop].T), block_size)
        scale, zero = (array[:, 0] for array in _scaled(found, bits, zero_points, scale_type))
        scales[:, block], zeros[:, block] = scale, zero
        span = slice(start, stop)
        errors = _round(left[span], codes[span], factor[span, span], scale, zero, bits)
        codes[stop : start + block_size] = zero  # padding stands for zero
        left[stop:] -= factor[span, stop:].T @ errors
    packed = pack(np.ascontiguousarray(codes.T).reshape(rows, blocks, block_size), bits)
    kept = pack(zeros, bits) if zero_points else None
    return Blocks(packed, scales.astype(SCALE_DTYPES[scale_type]), kept)


def _scaled(block: Matrix, bits: int, zero_points: bool, scale_type: ScaleType) -> tuple[Matrix, Matrix]:
    """Return scales and zero points [rows, blocks] of blocks [rows, blocks, block_size]."""
    if zero_points:
        return searched(block, bits, zero_points=True, scale_type=scale_type)
    scales = nearest_scales(block, bits, scale_type)
    return scales, np.full_like(scales, 2 ** (bits - 1))


def _round(
    left: Matrix,
    codes: Matrix,
    factor: Matrix,
    scale: npt.NDArray[np.float32],
    zero: npt.NDArray[np.float32],
    bits: int,
) -> Matrix:
    """Round the columns of one block, ``left`` [n, rows], in turn into ``codes``; return errors in units of
    the factor's diagonal.

    ``left`` is changed to what the columns were when their turn came.
    """
    size = len(left)
    inverse, low, high = reciprocal(scale), -zero, np.float32(2**bits - 1) - zero
    weights = 1 / factor.diagonal()
    errors = np.empty_like(left)
    for start in range(0, size, _TOGETHER):
        stop = min(start + _TOGETHER, size)
        for column in range(start, stop):
            value, code, error = left[column], codes[column], errors[column]
            np.multiply(value, inverse, out=code)
            np.rint(code, out=code)
            np.clip(code, low, high, out=code)
            np.multiply(code, scale, out=error)
            np.subtract(value, error, out=error)
            error *= weights[column]
            code += zero
            left[column + 1 : stop] -= factor[column, column + 1 : stop, None] * error
        left[stop:] -= factor[start:stop, stop:].T @ errors[start:stop]
    return errors
