"""Clients that leave at every moment and in every way: nothing remains of them, in the worker or in its
log.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import threading
from collections.abc import Callable

import pytest

from llorch_serve.errors import FieldViolation, InvalidRequestError
from llorch_serve.rpc import worker_pb2 as pb
from measure.leaving_clients import MOMENTS, WAYS, busy, have_leave
from support.fakes.generator import PATIENCE_S, FakeGenerator
from support.harness.http import Answer, fake_front, send
from support.harness.rpc import open_stub


def check_that_nothing_remains(clients: int, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        leaving, generator = have_leave(clients)
        gc.collect()  # an exception that nobody has asked for is logged when its task goes
    assert [record.getMessage() for record in caplog.records] == []
    assert leaving.left.total() == clients
    assert set(generator.ends.values()) == {1}
    # Whose answer ends by itself may have it before its client's leaving is known; every other one is cut.
    short = sum(count for (_, moment, _), count in leaving.left.items() if moment == "at the last message")
    assert generator.reasons["CANCELLED"] >= len(generator.begun) - short - clients // 3 > 0
    assert generator.reasons["LENGTH"] <= short
    assert generator.reasons.total() == len(generator.ends)


def test_clients_that_leave_at_every_moment_leave_nothing_behind(caplog):
    check_that_nothing_remains(3 * len(MOMENTS) * len(WAYS) * 2, caplog)


@pytest.mark.slow
def test_ten_thousand_clients_that_leave_a_busy_core_leave_nothing_behind(caplog):
    with busy(2):
        check_that_nothing_remains(10_000, caplog)


SECRET = "the prompt's own words"


def refuse_late(generator: FakeGenerator) -> None:
    """Refuse requests, in words of their own, once they have been read for long enough."""
    generator.submit_gate = threading.Event()
    generator.fail_submit = InvalidRequestError([FieldViolation("request_id", f"found {SECRET!r}")])


async def _until(happened: Callable[[], object]) -> None:
    while not happened():
        await asyncio.sleep(0)


@pytest.mark.parametrize("whole", [True, False])
def test_what_refuses_a_request_whose_client_has_left_is_not_logged(caplog, whole):
    with fake_front(free_running=False) as (front, generator), open_stub(front.rpc) as stub:
        refuse_late(generator)
        asked = pb.GenerateRequest(input=pb.Input(text=SECRET))
        desk = front.rpc_desk
        if whole:
            call = stub.Generate.future(asked)
        else:
            call = stub.GenerateStream(pb.GenerateStreamRequest(request=asked))
        generator.wait_for(lambda g: g.submitted)
        call.cancel()
        front.on_loop(desk.wait_idle())
        generator.submit_gate.set()
        front.on_loop(_until(lambda: desk._threads._pending_bytes == 0))
        front.on_loop(_collected())
    assert [record.getMessage() for record in caplog.records] == []


async def _collected() -> None:
    await asyncio.sleep(0)  # the turn in which what has just ended is let go of
    gc.collect()


def test_what_ends_a_request_late_spares_a_later_one_of_its_id_over_another_front(monkeypatch):
    with fake_front(free_running=False) as (front, generator), open_stub(front.rpc) as stub:
        desk = front.rpc_desk
        monkeypatch.setattr(desk._calls, "_distribute", lambda: None)  # how its answer ended is not known yet
        asked = pb.GenerateRequest(
            request_id="r", input=pb.Input(text="a"), sampling=pb.Sampling(max_tokens=1)
        )
        first = stub.Generate.future(asked)
        generator.wait_for(lambda g: g.live_ids)
        generator.step()
        generator.wait_for(lambda g: not g.live_ids)
        answers: list[Answer] = []
        body = {"job_id": "r", "prompt": "b", "max_tokens": 2}
        later = threading.Thread(
            target=lambda: answers.append(send(front.port, "POST", "/v1/inference", body))
        )
        later.start()
        generator.wait_for(lambda g: g.live_ids)
        first.cancel()
        front.on_loop(desk.wait_idle())
        generator.run_freely()
        later.join(PATIENCE_S)
    assert generator.aborted == ["r"]  # the first one, which had ended
    assert answers[0].events[-1][1]["stop_reason"] == "MAX_TOKENS"
