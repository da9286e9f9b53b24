"""Answers that come in any order go on in the order of their lines, as long as memory allows it."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from llorch_serve.batch.reordered import Reordered

TURNS = st.integers(1, 30).flatmap(lambda count: st.permutations(range(count)))


@given(turns=TURNS)
def test_the_order_is_kept(turns: list[int]) -> None:
    reordered: Reordered[str] = Reordered(most_bytes=10**6)
    gone: list[str] = []
    for count, turn in enumerate(turns, 1):
        gone += reordered.put(turn, str(turn), 10)
        assert len(gone) == next(first for first in range(count + 1) if first not in turns[:count])
    assert gone == [str(turn) for turn in range(len(turns))]


@given(turns=TURNS, most=st.integers(0, 100), data=st.data())
def test_nothing_is_held_beyond_the_bound_and_all_goes_on_once(
    turns: list[int], most: int, data: st.DataObject
) -> None:
    reordered: Reordered[int] = Reordered(most_bytes=most)
    sizes = {turn: data.draw(st.integers(1, 40)) for turn in turns}
    gone: list[int] = []
    for count, turn in enumerate(turns, 1):
        going = reordered.put(turn, turn, sizes[turn])
        assert going == sorted(going)
        gone += going
        assert sum(sizes[held] for held in set(turns[:count]) - set(gone)) <= most
    assert sorted(gone) == list(range(len(turns)))
