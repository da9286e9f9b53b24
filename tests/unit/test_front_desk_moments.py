"""Whatever happens to a call, at whatever turn of the event loop: it ends once, and nothing remains of it.

The loop's own turns are the only clock: work on threads and the engine's steps are played on the loop, so
that the same turn is the same moment in every run.
"""

from __future__ import annotations

import asyncio
import gc
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest

from llorch_serve.calls.front_desk import FrontDesk, MessageCalls
from llorch_serve.calls.live_call import LiveCall
from llorch_serve.engine.sequence import FinishReason
from llorch_serve.errors import EngineStoppedError, InvalidRequestError, UnavailableError
from llorch_serve.requests import Abort, Completion, GenerationUpdate, Timings, UpdateSink

TOKENS = 3
QUIET = 40  # turns after which nothing is under way any more
MOST_TURNS = 60  # more than a call takes that nothing happens to


class PlayedThreads(Executor):
    """Does each piece of work two turns after it was handed in."""

    def submit(self, work: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        loop, future = asyncio.get_running_loop(), Future[Any]()

        def begin() -> None:
            if future.set_running_or_notify_cancel():
                loop.call_soon(do)

        def do() -> None:
            try:
                future.set_result(work(*args, **kwargs))
            except BaseException as error:  # noqa: BLE001 - as a pool does
                future.set_exception(error)

        loop.call_soon(begin)
        return future


@dataclass
class _Played:
    sink: UpdateSink
    produced: int = 0
    aborted: bool = False


class PlayedEngine:
    """Gives every live request a token a turn. ends: how often each has been told its last update."""

    def __init__(self) -> None:
        self.live: dict[str, _Played] = {}
        self.begun: list[str] = []
        self.ends: Counter[str] = Counter()

    def submit(self, name: str, sink: UpdateSink) -> Abort:
        if name == "refused":
            raise InvalidRequestError([])
        played = self.live[name] = _Played(sink)
        self.begun.append(name)
        asyncio.get_running_loop().call_soon(self._step, name)
        return partial(setattr, played, "aborted", True)

    def _step(self, name: str) -> None:
        played, completion = self.live[name], None
        played.produced += 1
        if played.aborted or played.produced == TOKENS:
            reason = FinishReason.CANCELLED if played.aborted else FinishReason.LENGTH
            completion = Completion(reason, None, 1, played.produced, 0, Timings(0, 0, 0))
            del self.live[name]
            self.ends[name] += 1
        else:
            asyncio.get_running_loop().call_soon(self._step, name)
        played.sink.deliver([GenerationUpdate(name, "x", (played.produced,), completion)])


async def _turn(count: int) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


class Story:
    """One message at a desk, and all that can be seen of it afterwards."""

    def __init__(self, *names: str, whole: bool) -> None:
        self.names, self.whole = names, whole
        self.engine = PlayedEngine()
        self.desk = FrontDesk("test", "loading", max_pending_bytes=100, stream_interval=1)
        self.desk._threads._pool.shutdown()
        self.desk._threads._pool = PlayedThreads()  # type: ignore[assignment]  # it is only submitted to
        self.desk._refusal = None
        self.call = asyncio.ensure_future(self._answer())

    def _read(self, calls: MessageCalls) -> list[LiveCall]:
        return [
            calls.submit(name, partial(self.engine.submit, name), whole=self.whole) for name in self.names
        ]

    async def _answer(self) -> int:
        with self.desk.call():
            self.desk.check_open()
            async with self.desk.admit(7, "owner", self._read) as calls:
                tokens = 0
                for call in calls:
                    ended = False
                    while not ended:
                        for update in await call.take():
                            tokens += len(update.token_ids)
                            ended = ended or update.is_last
                return tokens

    def check_that_nothing_remains(self) -> None:
        assert self.call.done()
        assert self.desk._calls._calls == {}
        assert self.desk._calls._kept == []
        assert self.desk._threads._pending_bytes == 0
        assert self.desk._activity._active == 0
        assert self.engine.live == {}
        assert self.engine.ends == Counter(self.engine.begun)


def leave(story: Story) -> None:
    story.call.cancel()


def leave_twice(story: Story) -> None:
    story.call.cancel()
    asyncio.get_running_loop().call_soon(story.call.cancel)


def abort(story: Story) -> None:
    story.desk.cancel(story.names, "owner")


def drain(story: Story) -> None:
    story.desk._drained = asyncio.ensure_future(story.desk.drain(asyncio.Event(), 0.0))  # type: ignore[attr-defined]


def fail(story: Story) -> None:
    story.desk._drained = asyncio.ensure_future(story.desk.fail(EngineStoppedError("e")))  # type: ignore[attr-defined]


def fail_while_draining(story: Story) -> None:
    draining = asyncio.ensure_future(story.desk.drain(asyncio.Event(), 10.0))
    asyncio.get_running_loop().call_soon(draining.cancel)
    fail(story)


def moments(happen: Callable[[Story], None], *names: str, whole: bool) -> Iterator[tuple[int, Story]]:
    """Play the same story again and again, and have something happen one turn later each time; yield each
    turn with the story after its end.
    """

    said: list[Any] = []

    async def play(turn: int) -> tuple[Story, bool]:
        asyncio.get_running_loop().set_exception_handler(lambda _loop, context: said.append(context))
        story = Story(*names, whole=whole)
        await _turn(turn)
        over = story.call.done()
        happen(story)
        await _turn(QUIET)
        if story.call.done() and not story.call.cancelled():
            story.call.exception()
        # What a desk waits for ends with the wait.
        assert len(asyncio.all_tasks()) == 1
        return story, over

    for turn in range(MOST_TURNS):
        story, over = asyncio.run(play(turn))
        yield turn, story
        if over:
            gc.collect()  # an error that nobody has asked for is told when its task goes
            assert said == []
            return
    raise AssertionError("the call never ended by itself")


MESSAGES = [("a",), ("a", "b"), ("a", "refused"), ("a", "a")]


@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize("names", MESSAGES)
@pytest.mark.parametrize("happen", [leave, leave_twice, abort, drain, fail, fail_while_draining])
def test_nothing_remains_whenever_it_happens(
    happen: Callable[[Story], None], names: tuple[str, ...], whole: bool
) -> None:
    turns = 0
    for turn, story in moments(happen, *names, whole=whole):
        turns = turn
        story.check_that_nothing_remains()
        if not story.call.cancelled() and story.call.exception() is None:
            assert story.call.result() <= TOKENS * len(names)
    assert turns >= 3


def test_what_a_desk_runs_for_a_caller_that_has_left_is_not_begun() -> None:
    async def play(turn: int) -> tuple[bool, bool]:
        story, begun = Story(whole=True), list[int]()
        await _turn(QUIET)
        running = asyncio.ensure_future(story.desk.run(7, lambda: begun.append(1)))
        await _turn(turn)
        over = running.done()
        running.cancel()
        await _turn(QUIET)
        assert story.desk._threads._pending_bytes == 0
        return bool(begun), over

    played = [asyncio.run(play(turn)) for turn in range(12)]
    assert played[0] == (False, False)
    assert played[-1] == (True, True)
    begun = [one for one, _ in played]
    assert begun == sorted(begun)  # from the turn on in which a thread begins with it
    assert begun.count(False) >= 3


def test_a_drained_desk_tells_calls_why_they_ended() -> None:
    kinds = set()
    for _, story in moments(drain, "a", whole=True):
        error = story.call.exception()
        kinds.add(type(error))
        assert error is None or isinstance(error, UnavailableError)
    assert kinds == {UnavailableError, type(None)}
