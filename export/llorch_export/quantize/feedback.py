"""Error feedback: each column's rounding error is made up for by the columns that are still to be rounded.

After GPTQ (Frantar et al. 2022). With ``H`` the mean of ``x x^T`` over inputs ``x`` of the layer, the error of a row's
output is ``e H e^T``. Columns are rounded from the first to the last; the error of one is spread over those after it in the
way that adds least to the output's, which a Cholesky factor of ``H``'s inverse says. Scales and zero points of a block are
searched when its turn comes, on the weights as they have become.
"""

from __future__ import annotations

from collections.abc import Callable
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
from llorch_export.quantize.search import searched
from llorch_serve.manifest import ScaleType

SecondMoments = Callable[[str], Matrix]
"""Gives for the name of a weight the mean of ``x_i x_j`` [K, K] over its inputs."""

_DAMPING: Final = (
    0.01  # of the mean of H's diagonal: channels that the text hardly moved must not be bent without end
)


def error_factor(moments: Matrix) -> Matrix:
    """Return the upper Cholesky factor of the damped inverse of ``moments`` [K, K], the means of ``x_i x_j``."""
    size = len(moments)
    damped = moments.astype(np.float64)
    mean = float(np.trace(damped)) / size
    if mean == 0:  # nothing went through the layer, so no column can make up for another
        return np.eye(size, dtype=np.float32)
    damped[np.diag_indices(size)] += _DAMPING * mean
    factor: Matrix = np.linalg.cholesky(np.linalg.inv(damped)).T.astype(np.float32)
    return factor


def quantize_feedback(
    weight: Matrix, factor: Matrix, *, bits: int, block_size: int, scale_type: ScaleType = "float32"
) -> Blocks:
    """Quantise ``weight`` [rows, K] with a zero point for each block; rows are independent of each other.

    factor: [K, K], of the layer's inputs, see :func:`error_factor`.
    """
    rows, columns = weight.shape
    blocks = block_count(columns, block_size)
    codes = np.zeros((rows, blocks, block_size), np.float32)
    scales, zeros = np.empty((rows, blocks), np.float32), np.empty((rows, blocks), np.float32)
    left = weight.astype(np.float32)  # a copy: what is still to be rounded, errors so far included
    for block in range(blocks):
        span = slice(block * block_size, min((block + 1) * block_size, columns))
        scale, zero = searched(
            grouped(left[:, span], block_size), bits, zero_points=True, scale_type=scale_type
        )
        scales[:, block], zeros[:, block] = scale[:, 0], zero[:, 0]
        found, errors = _rounded(left[:, span], factor[span, span], scale[:, 0], zero[:, 0], bits)
        codes[:, block, : found.shape[1]] = found
        codes[:, block, found.shape[1] :] = zero  # padding stands for zero
        left[:, span.stop :] -= errors @ factor[span, span.stop :]
    packed = pack(codes, bits)
    return Blocks(packed, scales.astype(SCALE_DTYPES[scale_type]), pack(zeros, bits))


def _rounded(
    left: Matrix, factor: Matrix, scale: npt.NDArray[np.float32], zero: npt.NDArray[np.float32], bits: int
) -> tuple[Matrix, Matrix]:
    """Round the columns of one block [rows, n] in turn; return codes, and errors in units of the factor's diagonal."""
    top = np.float32(2**bits - 1)
    remaining = left.copy()
    inverse = reciprocal(scale)
    codes, errors = np.empty_like(left), np.empty_like(left)
    for column in range(left.shape[1]):
        value = remaining[:, column]
        code = np.clip(np.rint(value * inverse) + zero, 0, top)
        error = (value - (code - zero) * scale) / factor[column, column]
        codes[:, column], errors[:, column] = code, error
        remaining[:, column + 1 :] -= np.outer(error, factor[column, column + 1 :])
    return codes, errors
