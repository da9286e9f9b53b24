"""Each process of tests that run side by side has cores of its own."""

from __future__ import annotations

import os
import sys

import pytest

from support.harness.cores import all_cores, share


@pytest.mark.parametrize(("cores", "count"), [(2, 2), (8, 4), (5, 3), (2, 1)])
def test_every_core_is_one_processs(cores: int, count: int) -> None:
    shares = [share(list(range(cores)), place, count) for place in range(count)]
    assert sorted(core for one in shares for core in one) == list(range(cores))
    assert all(shares)


def test_fewer_cores_than_processes() -> None:
    assert [share([3, 5], place, 3) for place in range(3)] == [[3], [5], [3]]


@pytest.mark.skipif(sys.platform != "linux", reason="affinity is set as Linux does")
def test_what_needs_all_has_all_for_a_while() -> None:
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(before)})
    try:
        with all_cores():
            assert os.sched_getaffinity(0) >= before
        assert os.sched_getaffinity(0) == {min(before)}
    finally:
        os.sched_setaffinity(0, before)
