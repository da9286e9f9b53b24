"""Numbers of rows that steps are recorded for."""

from __future__ import annotations

import pytest

from llorch_serve.runtime.step_sizes import size_of, step_sizes


@pytest.mark.parametrize(
    ("slots", "sizes"),
    [
        (1, (1,)),
        (2, (1, 2)),
        (3, (1, 2, 3)),
        (8, (1, 2, 4, 8)),
        (13, (1, 2, 4, 8, 12, 13)),
        (32, (1, 2, 4, 8, 12, 16, 24, 32)),
        (128, (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128)),
    ],
)
def test_sizes_end_with_all_slots(slots: int, sizes: tuple[int, ...]) -> None:
    assert step_sizes(slots) == sizes


def test_padding_is_bounded_and_so_is_the_number_of_sizes() -> None:
    for slots in range(1, 1025):
        sizes = step_sizes(slots)
        assert list(sizes) == sorted(set(sizes))
        assert len(sizes) <= 2 * slots.bit_length()
        for rows in range(1, slots + 1):
            size = size_of(sizes, rows)
            assert rows <= size <= slots
            assert size - rows < size / 2 if size <= 8 else size - rows <= size / 3
