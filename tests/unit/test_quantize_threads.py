"""Parts of a matrix on threads: all of them, in order, and errors where they are asked for."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from llorch_export.quantize import threads
from llorch_export.quantize.threads import in_order, in_threads

PARTS = [slice(at, at + 1) for at in range(20)]


@pytest.fixture(params=[1, 3, 50])
def processors(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(threads, "usable_cpus", lambda: request.param)
    found: int = request.param
    return found


@pytest.mark.usefixtures("processors")
@pytest.mark.parametrize("count", [0, 1, 20])
def test_every_part_is_done(count: int) -> None:
    done: list[slice] = []
    in_threads(done.append, PARTS[:count])
    assert sorted(part.start for part in done) == [*range(count)]


@pytest.mark.usefixtures("processors")
def test_an_error_of_a_part_is_raised() -> None:
    with pytest.raises(ZeroDivisionError):
        in_threads(lambda part: 1 // (part.start - 7), PARTS)  # type: ignore[arg-type, return-value]
    with pytest.raises(ZeroDivisionError):
        list(in_order(lambda number: 1 // (number - 7), range(20)))


@pytest.mark.usefixtures("processors")
def test_results_come_in_the_order_of_items() -> None:
    assert list(in_order(lambda number: number * number, range(20))) == [n * n for n in range(20)]


def test_no_more_is_taken_ahead_than_there_are_processors(processors: int) -> None:
    taken = 0

    def items() -> Iterator[int]:
        nonlocal taken
        for number in range(20):
            taken = number + 1
            yield number

    most = min(processors, 8)
    for given, _ in enumerate(in_order(lambda number: number, items())):
        assert taken == min(20, given + most)


def test_items_are_made_at_the_same_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "usable_cpus", lambda: 2)
    meeting = threading.Barrier(2, timeout=20)
    assert len(list(in_order(lambda _: meeting.wait(), range(6)))) == 6
