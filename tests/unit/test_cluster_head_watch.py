"""A front whose cluster has lost its head ends with one line that names it."""

from __future__ import annotations

import asyncio
import logging
import os
import signal

import pytest

from llorch_serve.cluster.head import HeadAddress, answers
from llorch_serve.cluster.head_watch import HeadWatch
from llorch_serve.errors import WorkerError
from llorch_serve.lifecycle.serving import serve
from llorch_serve.rpc.server import ServerConfig
from support.fakes.generator import FakeGenerator

HEAD = HeadAddress("10.0.0.5", 6379)


def run(answered, lost_s=0.05):
    watch = HeadWatch(HEAD, answered, lost_s=lost_s, interval_s=0.005)
    asyncio.run(serve(FakeGenerator, ServerConfig(port=0, drain_timeout_s=1), companions=(watch,)))


def test_a_head_that_does_not_come_back_ends_the_front_with_its_address(caplog):
    with pytest.raises(WorkerError, match=r"10\.0\.0\.5:6379 has not answered for 0\.05 s"):
        run(lambda: False)
    assert caplog.text.count("does not answer") == 1


def test_a_head_that_comes_back_in_time_ends_nothing(caplog):
    looks = []

    def answered():
        looks.append(len(looks))
        if len(looks) == 12:
            os.kill(os.getpid(), signal.SIGTERM)
        return len(looks) % 4 != 0

    with caplog.at_level(logging.WARNING):
        run(answered, lost_s=10)
    assert "answers again" in caplog.text


def test_nothing_answers_where_nothing_listens():
    assert not answers(HeadAddress("127.0.0.1", 1), None)
