"""A model in this process on an event loop that ends before its requests do."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable

import pytest

import llorch
from llorch import opening
from llorch_serve.requests import Abort, GenerationRequest, GenerationUpdate, TextPrompt, UpdateSink
from llorch_serve.sampling.params import SamplingParams
from llorch_serve.worker.local_async import AsyncLocalClient

PATIENCE_S = 30.0
REQUEST = GenerationRequest("r", TextPrompt("a"), SamplingParams())


class Generator:
    """Takes requests as it is told to."""

    def __init__(self, take: Callable[[UpdateSink], Abort]) -> None:
        self._take = take

    def submit(self, request: GenerationRequest, sink: UpdateSink) -> Abort:
        return self._take(sink)


def test_a_request_that_is_taken_while_the_loop_ends_is_aborted() -> None:
    begun, left, aborted = threading.Event(), threading.Event(), threading.Event()

    def take(sink: UpdateSink) -> Abort:
        begun.set()
        assert left.wait(PATIENCE_S)
        return aborted.set

    async def main() -> None:
        client = AsyncLocalClient(Generator(take))  # type: ignore[arg-type]  # nothing else is asked of it
        task = asyncio.ensure_future(client.complete(REQUEST))
        task.add_done_callback(lambda _: left.set())
        await asyncio.to_thread(begun.wait, PATIENCE_S)  # asyncio.run cancels what still runs now

    asyncio.run(main())
    assert aborted.is_set()


def test_a_caller_that_leaves_a_running_request_aborts_it() -> None:
    aborted = threading.Event()

    async def main() -> None:
        taken = asyncio.Event()
        loop = asyncio.get_running_loop()

        def take(sink: UpdateSink) -> Abort:
            loop.call_soon_threadsafe(taken.set)
            return aborted.set

        client = AsyncLocalClient(Generator(take))  # type: ignore[arg-type]  # as above
        task = asyncio.ensure_future(client.complete(REQUEST))
        await taken.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(main())
    assert aborted.is_set()


def test_an_engine_outlives_a_loop_that_closes_while_it_delivers() -> None:
    """What a sink raises would stop the engine, and with it the requests of other loops."""

    class ClosesUnseen(asyncio.SelectorEventLoop):
        unseen = False

        def is_closed(self) -> bool:
            return not self.unseen and super().is_closed()

    sinks: list[UpdateSink] = []

    def take(sink: UpdateSink) -> Abort:
        sinks.append(sink)
        sink.deliver([GenerationUpdate("r", "a", (1,))])
        return lambda: None

    async def main() -> None:
        client = AsyncLocalClient(Generator(take))  # type: ignore[arg-type]  # as above
        async for update in client.generate(REQUEST):
            assert update.text == "a"
            break

    loop = ClosesUnseen()
    loop.run_until_complete(main())
    loop.run_until_complete(loop.shutdown_asyncgens())
    loop.run_until_complete(loop.shutdown_default_executor())
    loop.close()
    loop.unseen = True  # as if it had closed right behind the question
    try:
        sinks[0].deliver([GenerationUpdate("r", "b", (1,))])
    finally:
        loop.unseen = False


def test_a_model_that_is_loaded_while_the_loop_ends_is_freed(monkeypatch: pytest.MonkeyPatch) -> None:
    begun, left, closed = threading.Event(), threading.Event(), threading.Event()

    class Worker:
        close = staticmethod(closed.set)

    def opened(*_: object) -> Worker:
        begun.set()
        assert left.wait(PATIENCE_S)
        return Worker()

    async def main() -> None:
        task = asyncio.ensure_future(llorch.load_async("folder"))
        task.add_done_callback(lambda _: left.set())
        await asyncio.to_thread(begun.wait, PATIENCE_S)  # asyncio.run cancels what still runs now

    monkeypatch.setattr(opening, "_opened", opened)
    asyncio.run(main())
    assert closed.is_set()
