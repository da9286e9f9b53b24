"""The front desk, as every protocol's front uses it: admitting, refusing, aborting, draining, closing."""

from __future__ import annotations

import asyncio
import functools
import subprocess
import sys
import threading
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from llorch_serve.calls.front_desk import FrontDesk, MessageCalls
from llorch_serve.calls.live_call import LiveCall
from llorch_serve.errors import EngineStoppedError, QueueFullError, UnavailableError
from llorch_serve.requests import GenerationRequest, TextPrompt
from llorch_serve.sampling.params import SamplingParams
from support.fakes.generator import PATIENCE_S, FakeGenerator


def run(story: Callable[[FrontDesk, FakeGenerator], Awaitable[Any]], **how: Any) -> Any:
    """Run a story at a desk that is not open yet, with a generator that answers step by step."""
    generator = FakeGenerator(free_running=False, **how)

    async def main() -> Any:
        desk = FrontDesk("test", "still loading", max_pending_bytes=10, stream_interval=1)
        try:
            return await asyncio.wait_for(story(desk, generator), PATIENCE_S)
        finally:
            await asyncio.to_thread(generator.close)
            desk.close()

    return asyncio.run(main())


def reading(generator: FakeGenerator, *names: str) -> Callable[[MessageCalls], list[LiveCall]]:
    """Return what reads a message that asks for these requests."""

    def read(calls: MessageCalls) -> list[LiveCall]:
        requests = [GenerationRequest(name, TextPrompt("Hi"), SamplingParams(max_tokens=2)) for name in names]
        return [
            calls.submit(request.request_id, functools.partial(generator.submit, request), whole=True)
            for request in requests
        ]

    return read


async def answer(desk: FrontDesk, size: int, read: Callable[[MessageCalls], list[LiveCall]]) -> list[str]:
    """Return the texts of a message's calls."""
    async with desk.admit(size, "owner", read) as calls:
        return ["".join(update.text for update in await call.take()) for call in calls]


def answering(desk: FrontDesk, generator: FakeGenerator, *names: str) -> asyncio.Task[list[str]]:
    """Begin to answer a message of a known caller with one call for each name."""
    return asyncio.ensure_future(answer(desk, 1, reading(generator, *names)))


async def happened(generator: FakeGenerator, condition: Callable[[FakeGenerator], object]) -> None:
    await asyncio.to_thread(generator.wait_for, condition)


def test_a_desk_is_closed_with_a_reason_until_it_is_opened_and_once_it_drains() -> None:
    async def story(desk: FrontDesk, generator: FakeGenerator) -> None:
        with pytest.raises(UnavailableError, match="still loading"):
            desk.check_open()
        assert desk.info is None
        desk.open(generator)
        desk.check_open()
        assert (desk.refusal, desk.info) == (None, generator.model_info())
        await desk.drain(asyncio.Event(), PATIENCE_S)
        with pytest.raises(UnavailableError, match="shutting down"):
            desk.check_open()

    run(story)


def test_one_message_may_ask_for_several_calls() -> None:
    async def story(desk: FrontDesk, generator: FakeGenerator) -> list[str]:
        generator.run_freely()
        return await answering(desk, generator, "a", "b")

    assert run(story) == ["w0 w1 ", "w0 w1 "]


def test_whoever_leaves_before_the_answer_aborts_every_call_of_its_message() -> None:
    async def story(desk: FrontDesk, generator: FakeGenerator) -> None:
        answer = answering(desk, generator, "a", "b")
        await happened(generator, lambda g: len(g.live_ids) == 2)
        answer.cancel()
        await happened(generator, lambda g: sorted(g.aborted) == ["a", "b"])

    run(story)


def test_a_message_whose_caller_left_is_not_read() -> None:
    async def story(desk: FrontDesk, generator: FakeGenerator) -> None:
        gate = threading.Event()
        busy = [asyncio.ensure_future(desk.run(1, functools.partial(gate.wait, PATIENCE_S))) for _ in "12"]
        await asyncio.sleep(0)
        answer = answering(desk, generator, "a")
        await asyncio.sleep(0)
        answer.cancel()
        await asyncio.wait((answer,))
        gate.set()
        await asyncio.gather(*busy)
        assert await desk.run(1, lambda: generator.submitted) == []

    run(story)


def test_messages_that_wait_are_bounded_by_their_bytes() -> None:
    async def story(desk: FrontDesk, generator: FakeGenerator) -> None:
        with pytest.raises(QueueFullError, match="the most is 10"):
            await answer(desk, 11, reading(generator, "a"))

    run(story)


def test_only_its_owner_cancels_a_call() -> None:
    async def story(desk: FrontDesk, generator: FakeGenerator) -> None:
        answer = answering(desk, generator, "a")
        await happened(generator, lambda g: g.live_ids)
        assert desk.cancel(("a", "none"), "another") == ()
        assert desk.cancel(("a", "none", "a"), "owner") == ("a",)
        await happened(generator, lambda g: "a" in g.aborted)  # once or, if it came early, twice
        answer.cancel()

    run(story)


def test_draining_ends_what_outlasts_its_time_and_says_so_before() -> None:
    async def story(desk: FrontDesk, generator: FakeGenerator) -> list[str]:
        said: list[str] = []

        async def call() -> None:
            with desk.call():
                try:
                    await answering(desk, generator, "a")
                except UnavailableError as error:
                    said.append(str(error))

        running = asyncio.ensure_future(call())
        await happened(generator, lambda g: g.live_ids)
        await desk.drain(asyncio.Event(), 0.0, lambda: said.append("over"))
        await running
        return said

    over, told = run(story)
    assert over == "over"
    assert told.startswith("the worker shut down before the answer was complete")


def test_the_engines_end_is_told_to_calls_that_run_and_to_new_ones() -> None:
    async def story(desk: FrontDesk, generator: FakeGenerator) -> None:
        answer = answering(desk, generator, "a")
        await happened(generator, lambda g: g.live_ids)
        await desk.fail(EngineStoppedError("abc123"))
        with pytest.raises(EngineStoppedError, match="abc123"):
            await answer
        with pytest.raises(UnavailableError, match=r"the engine has stopped; .*abc123"):
            desk.check_open()

    run(story)


def test_http_needs_nothing_of_grpc() -> None:
    code = (
        "import sys, llorch_serve.http.server\n"
        "print([name for name in sys.modules if name.split('.')[0] == 'grpc' or '.rpc' in name])"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"
