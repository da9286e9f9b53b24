"""A front ends in order once the head of its cluster is lost for long, or its model is another."""

from __future__ import annotations

import asyncio
import itertools
import threading
from types import SimpleNamespace

import pytest

from llorch_serve.cluster import watch as cluster_watch
from llorch_serve.cluster.head import HeadAddress
from llorch_serve.cluster.watch import ClusterWatch
from llorch_serve.errors import WorkerError

HEAD = HeadAddress("10.0.0.5", 6379)


def end_of(alive, is_current=lambda: True, **times: float) -> str:
    """Return what ends the watch."""
    given = {"lost_s": 0.05, "look_s": 0.001, "model_look_s": 0.0} | times
    watch = ClusterWatch(lambda: HEAD, is_current, alive=alive, **given)
    with pytest.raises(WorkerError) as caught:
        asyncio.run(asyncio.wait_for(watch.run(None), 60))
    return str(caught.value)


def test_a_head_that_is_lost_for_long_is_named(monkeypatch):
    asked = []
    # A second goes by with each look.
    monkeypatch.setattr(cluster_watch, "time", SimpleNamespace(monotonic=lambda: float(len(asked))))

    def alive(head):
        asked.append(head)
        return len(asked) < 4

    told = end_of(alive, lost_s=5)
    assert told.startswith("the head of the cluster at 10.0.0.5:6379 has not answered for 5 s")
    assert asked == [HEAD] * 8  # three that answered, and five seconds


def test_a_head_that_comes_back_is_not_lost():
    answers = itertools.cycle([False, True])
    looks = iter([True] * 20 + [False])
    told = end_of(lambda _: next(answers), lambda: next(looks), lost_s=30)
    assert "another artifact" in told


def test_a_model_that_is_another_ends_the_front():
    assert "deployed anew from another artifact, or deleted" in end_of(lambda _: True, lambda: False)


def test_a_controller_that_does_not_answer_ends_no_front(caplog):
    asked = []

    def is_current():
        asked.append(None)
        if len(asked) < 3:
            raise RuntimeError("the actor 10.0.0.5 was restarted")
        return False

    assert "another artifact" in end_of(lambda _: True, is_current)
    assert len(asked) == 3
    assert "whether the model is still the same" in caplog.text


def test_a_controller_that_hangs_hides_no_lost_head():
    hangs, asked = threading.Event(), threading.Event()

    def is_current():
        asked.set()
        hangs.wait()
        return True

    try:
        told = end_of(lambda _: not asked.is_set(), is_current)
    finally:
        hangs.set()
    assert "has not answered" in told
