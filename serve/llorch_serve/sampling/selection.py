"""The largest of many numbers without sorting them all. The numbers are a row of logits, or what became of
it.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float32]
IdArray = npt.NDArray[np.int64]
Values = npt.NDArray[np.float64]

_ROWS: Final = (
    32  # a row of logits is looked at as so many lines, whose maxima by column are found at memory speed
)


def largest(scores: FloatArray, k: int) -> IdArray:
    """Return the indices of the k largest of float32 scores [size], the largest first; of equals, the lower
    index.
    """
    k = min(k, len(scores))
    if k == 0:
        return np.empty(0, dtype=np.int64)
    found = at_least_kth(scores, k)
    return found[np.argsort(-scores[found], kind="stable")[:k]]


def at_least_kth(scores: FloatArray, k: int) -> IdArray:
    """Return the indices, ascending, of all that reach the k-th largest of float32 scores [size]; 1 <= k <=
    size.
    """
    columns = len(scores) // _ROWS
    if k > columns:
        return np.flatnonzero(scores >= np.partition(scores, len(scores) - k)[len(scores) - k])
    # Each column's maximum is a score of its own, so at least k scores reach the k-th largest maximum. What
    # lies below it is out, and with it every column whose maximum does: few columns remain, and a partition
    # of those few scores is far cheaper than one of all.
    table = scores[: columns * _ROWS].reshape(_ROWS, columns)
    maxima = table.max(axis=0)
    floor = np.partition(maxima, columns - k)[columns - k]
    places = np.flatnonzero(maxima >= floor)
    line, column = np.nonzero(table[:, places] >= floor)
    tail = columns * _ROWS + np.flatnonzero(scores[columns * _ROWS :] >= floor)
    ids = np.concatenate([line * columns + places[column], tail])
    values = scores[ids]
    kept: IdArray = ids[values >= np.partition(values, len(values) - k)[len(values) - k]]
    return kept


def fewest_reaching(keys: Values, weights: FloatArray, target: float, *, with_ties: bool) -> IdArray:
    """Return the indices, ascending, of the fewest elements by ascending key whose weights add up to
    ``target``.

    keys: float64, none below 0, may be infinite. weights: float32, none below 0.
    with_ties: also those whose key equals the last one's; else, of equal keys, the lower index comes first.

    A sort of a whole vocabulary would take milliseconds. The upper half of a non-negative float32's bits
    orders it as the number does, so sums over these bins find the bin at the edge, and only that one is
    sorted.
    """
    rounded = keys.astype(np.float32)
    np.abs(rounded, out=rounded)  # a difference of zeros may be a negative one, whose bits would come first
    bins = rounded.view(np.int32) >> 16
    reached = np.bincount(bins, weights=weights).cumsum()
    edge = min(int(reached.searchsorted(target)), len(reached) - 1)
    below = float(reached[edge - 1]) if edge > 0 else 0.0
    inside = np.flatnonzero(bins == edge)
    inside = inside[np.argsort(keys[inside], kind="stable")]
    sums = below + weights[inside].cumsum(dtype=np.float64)
    # Rounding may leave the last sum a hair short of the target; then the whole bin is in.
    last = min(int(sums.searchsorted(target)), len(inside) - 1)
    if with_ties:
        return np.flatnonzero(keys <= keys[inside[last]])
    kept = bins < edge
    kept[inside[: last + 1]] = True
    return np.flatnonzero(kept)
