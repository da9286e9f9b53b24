"""Replicas that could not be reached are left out for longer and longer, until one takes a request."""

from __future__ import annotations

import logging

import pytest

from llorch_serve.cluster.unreachable import FIRST_PAUSE_S, LONGEST_PAUSE_S, Unreachable


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def test_a_replica_is_left_out_for_twice_as_long_each_time(caplog: pytest.LogCaptureFixture) -> None:
    clock = Clock()
    out, pause_s = Unreachable(clock), FIRST_PAUSE_S
    assert "a" not in out
    with caplog.at_level(logging.WARNING):
        for _ in range(8):
            out.failed("a")
            out.failed("a")  # of another request that was on its way
            clock.now_s += 0.99 * pause_s
            assert "a" in out
            assert "b" not in out
            clock.now_s += 0.02 * pause_s
            assert "a" not in out
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
    assert caplog.text.count("a cannot be reached") == 1


def test_one_that_takes_a_request_again_is_as_good_as_any() -> None:
    clock = Clock()
    out = Unreachable(clock)
    for _ in range(3):
        out.failed("a")
        clock.now_s += LONGEST_PAUSE_S
    out.failed("a")
    out.reached("a")
    out.reached("b")
    assert "a" not in out
    out.failed("a")
    clock.now_s += 1.01 * FIRST_PAUSE_S
    assert "a" not in out


def test_one_that_has_gone_is_forgotten() -> None:
    out = Unreachable(Clock())
    out.failed("a")
    out.failed("b")
    out.keep({"b"})
    assert ("a" in out, "b" in out) == (False, True)
