"""Random numbers that belong to a seed and a position, so that a draw depends on nothing that happened before
it.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

_AHEAD: Final = 64  # positions computed at once: setting up the generator costs more than all of them


class Draws:
    """The numbers of one seed, by position. What is kept between calls saves time and changes nothing."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._first = 0
        self._numbers: list[float] = []

    def at(self, position: int) -> float:
        """Return the number in [0, 1) of a position of at least 0."""
        if not self._first <= position < self._first + len(self._numbers):
            self._first = position - position % _AHEAD
            self._numbers = uniforms(self._seed, self._first, _AHEAD).tolist()
        return self._numbers[position - self._first]


def uniforms(seed: int, first: int, count: int) -> npt.NDArray[np.float64]:
    """Return ``count`` numbers in [0, 1), multiples of 2**-53, of the positions from ``first`` on.

    Philox is counter-based (Salmon et al. 2011): each position has its own block of four numbers, of which
    one is used.
    """
    raw = np.random.Philox(key=seed, counter=first).random_raw(4 * count)
    numbers: npt.NDArray[np.float64] = (raw[::4] >> np.uint64(11)) * np.float64(2.0**-53)
    return numbers
