"""Each process of tests that run side by side has cores of its own."""

from __future__ import annotations

import os
import sys

import pytest

from support.harness import cores
from support.harness.cores import share


@pytest.mark.parametrize(("number", "count"), [(2, 2), (8, 4), (5, 3), (2, 1)])
def test_every_core_is_one_processs(number: int, count: int) -> None:
    shares = [share(list(range(number)), place, count) for place in range(count)]
    assert sorted(core for one in shares for core in one) == list(range(number))
    assert all(shares)


def test_fewer_cores_than_processes() -> None:
    assert [share([3, 5], place, 3) for place in range(3)] == [[3], [5], [3]]


def test_one_that_stands_in_for_another_has_no_less() -> None:
    assert share(list(range(8)), 4, 4) == [0, 4]


@pytest.mark.skipif(sys.platform != "linux", reason="affinity is set as Linux does")
def test_a_share_is_taken_and_all_are_given_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    own, ends = os.sched_getaffinity(0), {min(cores._ALL), max(cores._ALL)}
    monkeypatch.setattr(cores, "_ALL", frozenset(ends))
    monkeypatch.setenv("PYTEST_XDIST_WORKER", "gw1")
    monkeypatch.setenv("PYTEST_XDIST_WORKER_COUNT", "2")
    try:
        cores.take_share()
        assert os.sched_getaffinity(0) == {max(ends)}
        with cores.all_cores():
            assert os.sched_getaffinity(0) == ends
        assert os.sched_getaffinity(0) == {max(ends)}
    finally:
        os.sched_setaffinity(0, own)
