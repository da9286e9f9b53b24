"""A front ends in order once the head of its cluster is lost for long, or its model cannot be served."""

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


def ends(*looks: Exception | None):
    """Return a look that does nothing, or raises what it is given, time after time."""
    left = iter(looks)

    def follow():
        if (error := next(left)) is not None:
            raise error

    return follow


GONE = WorkerError("the model was deleted")


def end_of(alive, follow=lambda: None, **given) -> str:
    """Return what ends the watch."""
    given = {"lost_s": 0.05, "look_s": 0.001, "model_look_s": 0.0} | given
    watch = ClusterWatch(lambda: HEAD, follow, alive=alive, **given)
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
    told = end_of(lambda _: next(answers), ends(*[None] * 20, GONE), lost_s=30)
    assert told == str(GONE)


def test_a_model_that_cannot_be_served_ends_the_front():
    assert end_of(lambda _: True, ends(GONE)) == str(GONE)


def test_a_model_that_is_replaced_is_looked_at_at_once():
    urgent = iter([False] * 3 + [True] * 100)
    told = end_of(lambda _: True, ends(GONE), is_urgent=lambda: next(urgent), model_look_s=3600)
    assert told == str(GONE)
    assert len(list(urgent)) > 90


def test_a_controller_that_does_not_answer_ends_no_front(caplog):
    restarted = RuntimeError("the actor 10.0.0.5 was restarted")
    assert end_of(lambda _: True, ends(restarted, restarted, GONE)) == str(GONE)
    assert "whether the model is still the same" in caplog.text


def test_a_controller_that_hangs_hides_no_lost_head():
    hangs, asked = threading.Event(), threading.Event()

    def follow():
        asked.set()
        hangs.wait()

    try:
        told = end_of(lambda _: not asked.is_set(), follow)
    finally:
        hangs.set()
    assert "has not answered" in told


def test_a_look_that_ends_after_the_watch_tells_nobody(caplog, monkeypatch):
    goes_on, began, failed = threading.Event(), threading.Event(), []
    monkeypatch.setattr(threading, "excepthook", failed.append)
    threads = []

    def follow():
        threads.append(threading.current_thread())
        began.set()
        goes_on.wait()

    assert "has not answered" in end_of(lambda _: not began.is_set(), follow)
    goes_on.set()
    threads[0].join(20)
    assert failed == []
    assert [record for record in caplog.records if record.levelname == "ERROR"] == []
