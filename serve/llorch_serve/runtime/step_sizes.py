"""How many rows recorded steps have: few sizes, so that recordings are few, and little padding."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

_DENSE: Final = 8
"""From here on there is a size between two powers of two."""


def step_sizes(slots: int) -> tuple[int, ...]:
    """Return the numbers of rows that steps over ``slots`` slots are recorded for, ascending.

    Powers of two, from 8 on also 1.5 times each (1, 2, 4, 8, 12, 16, 24, ...), and all slots. So padding is
    less than half of a small step and at most a third of a large one, and there are at most two sizes for
    each doubling: 12 for 128 slots.
    """
    return (*_below(slots), slots)


def size_of(sizes: Sequence[int], rows: int) -> int:
    """Return the least size that holds so many rows. sizes: ascending."""
    return next(size for size in sizes if size >= rows)


def _below(slots: int) -> Iterator[int]:
    size = 1
    while size < slots:
        yield size
        if size >= _DENSE and size + size // 2 < slots:
            yield size + size // 2
        size *= 2
