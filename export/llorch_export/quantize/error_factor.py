"""The factor by which a column's rounding error is spread over those after it, see :mod:`.feedback`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import numpy as np
import numpy.typing as npt

from llorch_export.quantize.layout import Matrix
from llorch_export.quantize.threads import in_threads

ErrorFactors = Callable[[str], Matrix]
"""Gives for the name of a weight the :func:`error_factor` [K, K] of its inputs."""

_DAMPING: Final = (
    0.01  # of the mean of H's diagonal: channels that the text hardly moved must not be bent without end
)
_PANEL: Final = 256
"""Columns that are factored together; what a thread does at a time is four times as wide."""

Doubles = npt.NDArray[np.float64]


def error_factor(moments: Matrix) -> Matrix:
    """Return the upper Cholesky factor of the damped inverse of ``moments`` [K, K], the means of ``x_i x_j``.

    With ``H = U U^T`` and ``U`` upper, which is Cholesky's factor from the last row to the first, it is
    ``U``'s inverse.
    """
    size = len(moments)
    mean = float(np.trace(moments, dtype=np.float64)) / size
    if mean == 0:  # nothing went through the layer, so no column can make up for another
        return np.eye(size, dtype=np.float32)
    damped = np.array(moments[::-1, ::-1], np.float64, order="C")
    damped[np.diag_indices(size)] += _DAMPING * mean
    _invert_cholesky(damped)
    factor: Matrix = damped[::-1, ::-1].astype(np.float32, order="C")
    return factor


def _invert_cholesky(matrix: Doubles) -> None:
    """Put the inverse of a positive definite matrix's lower Cholesky factor in its place, panel by panel."""
    size = len(matrix)
    for start in range(0, size, _PANEL):
        _invert_panel(matrix, slice(start, min(start + _PANEL, size)))


def _invert_panel(matrix: Doubles, panel: slice) -> None:
    """Go on by one panel: left of it there is the factor from here on, and above this row its inverse.

    The factor's columns of this panel follow from those before, and then the inverse's rows from those above.
    The factor's rows of this panel are not needed again, so that the inverse's lie there.
    """
    size, above = len(matrix), slice(0, panel.start)
    before = matrix[panel, above].copy()

    def subtract(rows: slice) -> None:
        matrix[rows, panel] -= matrix[rows, above] @ before.T

    in_threads(subtract, _parts(panel.start, size))
    inverse = np.tril(np.linalg.inv(np.linalg.cholesky(matrix[panel, panel])))

    def divide(rows: slice) -> None:
        matrix[rows, panel] = matrix[rows, panel] @ inverse.T

    in_threads(divide, _parts(panel.stop, size))
    negative = -inverse @ before

    def follow(columns: slice) -> None:
        lower = slice(columns.start, panel.start)  # above it the inverse has zeros
        matrix[panel, columns] = negative[:, lower] @ matrix[lower, columns]

    in_threads(follow, _parts(0, panel.start))
    matrix[panel, panel], matrix[panel, panel.stop :] = inverse, 0


def _parts(start: int, stop: int) -> list[slice]:
    return [slice(at, min(at + 4 * _PANEL, stop)) for at in range(start, stop, 4 * _PANEL)]
