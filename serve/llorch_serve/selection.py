"""The largest of many numbers without sorting them all. The numbers are a row of logits, or what became of it."""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float32]
IdArray = npt.NDArray[np.int64]

_ROWS: Final = (
    32  # a row of logits is looked at as so many lines, whose maxima by column are found at memory speed
)


def kth_largest(scores: FloatArray, k: int) -> np.float32:
    """Return the k-th largest of float32 scores [size]; 1 <= k <= size."""
    columns = len(scores) // _ROWS
    if k <= columns:
        # Each column's maximum is a score of its own, so at least k scores reach the k-th largest maximum:
        # what lies below it is out, and a partition of the few that remain is far cheaper.
        maxima = scores[: columns * _ROWS].reshape(_ROWS, columns).max(axis=0)
        scores = scores[scores >= np.partition(maxima, columns - k)[columns - k]]
    return np.float32(np.partition(scores, len(scores) - k)[len(scores) - k])


def largest(scores: FloatArray, k: int) -> IdArray:
    """Return the indices of the k largest of float32 scores [size], the largest first; of equals, the lower index."""
    k = min(k, len(scores))
    if k == 0:
        return np.empty(0, dtype=np.int64)
    found = np.flatnonzero(scores >= kth_largest(scores, k))
    return found[np.argsort(-scores[found], kind="stable")[:k]]
