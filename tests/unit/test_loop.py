"""The engine's thread: every sequence ends exactly once, whatever is aborted, stopped or broken, and idling
is waiting.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator

import pytest

from llorch_serve.engine.engine import Engine
from llorch_serve.engine.loop import EngineLoop
from llorch_serve.engine.scheduler import Scheduler, SchedulerConfig
from llorch_serve.engine.sequence import FinishReason, Sequence, SequenceStatus, TokenEvent
from llorch_serve.errors import ProviderError, QueueFullError
from support.fakes.session import Call, FakeSession, continuation, sequence_of

VOCAB = 32
PATIENCE_S = 20.0
VICTIM = tuple(range(3, 15))


class Gate:
    """Stops the engine's thread in front of every model call until the test lets one through."""

    def __init__(self) -> None:
        self._arrived: queue.SimpleQueue[Call] = queue.SimpleQueue()
        self._passes = threading.Semaphore(0)
        self.open = False

    def __call__(self, call: Call) -> None:
        if not self.open:
            self._arrived.put(call)
            assert self._passes.acquire(timeout=PATIENCE_S)

    def wait(self) -> Call:
        """Return the call that the engine is about to make."""
        return self._arrived.get(timeout=PATIENCE_S)

    def let_pass(self) -> None:
        self._passes.release()

    def open_for_good(self) -> None:
        self.open = True
        self._passes.release()


class Running:
    """A loop with its fake session, and everything it has reported."""

    def __init__(self, *, slots: int = 2, max_waiting: int = 10, gated: bool = True) -> None:
        self.gate = Gate()
        self.gate.open = not gated
        self.session = FakeSession(before_call=self.gate)
        config = SchedulerConfig(
            slots=slots, budget=slots * self.session.context, prefill_chunk=4, max_waiting=max_waiting
        )
        self.engine = Engine(self.session, Scheduler(config))
        self.events: queue.SimpleQueue[list[TokenEvent]] = queue.SimpleQueue()
        self.deaths: list[BaseException] = []
        self.end_early: Callable[[TokenEvent], bool] = lambda _event: False
        self.seen: list[TokenEvent] = []
        self.loop = EngineLoop(self.engine, self._on_events, self.deaths.append)

    def _on_events(self, events: list[TokenEvent]) -> list[Sequence]:
        assert events
        self.events.put(list(events))
        return [event.sequence for event in events if self.end_early(event)]

    def add(self, name: str, prompt: tuple[int, ...], count: int) -> Sequence:
        sequence = sequence_of(name, prompt, count)
        self.loop.add(sequence)
        return sequence

    def next(self) -> list[TokenEvent]:
        events = self.events.get(timeout=PATIENCE_S)
        self.seen += events
        return events

    def until_ended(self, *sequences: Sequence) -> None:
        while not all(self.last(sequence) for sequence in sequences):
            self.next()

    def last(self, sequence: Sequence) -> list[TokenEvent]:
        return [e for e in self.seen if e.sequence is sequence and (e.finish or e.error)]

    def tokens(self, sequence: Sequence) -> list[int]:
        return [e.token_id for e in self.seen if e.sequence is sequence and e.token_id is not None]

    def finish(self) -> None:
        """Open the gate, stop the loop and collect what it still had to say."""
        self.gate.open_for_good()
        self.loop.stop()
        while not self.events.empty():
            self.next()


@pytest.fixture
def make() -> Iterator[Callable[..., Running]]:
    made: list[Running] = []

    def start(**options: object) -> Running:
        running = Running(**options)  # type: ignore[arg-type]
        running.loop.start()
        made.append(running)
        return running

    yield start
    for running in made:
        running.finish()


def test_answers_come_token_by_token_and_end_once(make: Callable[..., Running]) -> None:
    running = make(gated=False)
    sequences = [running.add(f"r{i}", (i, i + 1, i + 2), 5) for i in range(5)]
    running.until_ended(*sequences)
    for i, sequence in enumerate(sequences):
        assert running.tokens(sequence) == continuation((i, i + 1, i + 2), 5, VOCAB)
        assert [event.finish for event in running.last(sequence)] == [FinishReason.LENGTH]


@pytest.mark.parametrize("status", [SequenceStatus.WAITING, SequenceStatus.PREFILL, SequenceStatus.DECODE])
def test_an_abort_ends_a_sequence_once_before_the_next_step(
    make: Callable[..., Running], status: SequenceStatus
) -> None:
    running = make(slots=2)
    neighbour = running.add("neighbour", (1, 2), 8)
    running.gate.wait()
    occupied = status is SequenceStatus.WAITING
    occupant = running.add("occupant", (6, 6), 8) if occupied else None
    victim = running.add("victim", VICTIM, 8)
    running.gate.let_pass()
    while running.gate.wait() and (
        victim.status is not status or (occupant and occupant.status is not SequenceStatus.DECODE)
    ):
        running.gate.let_pass()
    # The engine stands before a call that was planned while the victim was live.
    running.loop.abort(victim)
    running.loop.abort(victim)
    running.gate.let_pass()
    running.until_ended(victim)
    assert victim.status is SequenceStatus.FINISHED
    following = running.gate.wait()
    assert all(tokens[: len(VICTIM)] != VICTIM[: len(tokens)] for tokens in following.tokens)
    running.gate.open_for_good()
    running.until_ended(neighbour)
    running.finish()
    assert [event.finish for event in running.last(victim)] == [FinishReason.CANCELLED]
    assert running.seen[-1].sequence is not victim
    assert running.tokens(neighbour) == continuation((1, 2), 8, VOCAB)


def test_an_abort_after_the_end_is_silent(make: Callable[..., Running]) -> None:
    running = make(gated=False)
    sequence = running.add("a", (1,), 2)
    running.until_ended(sequence)
    running.loop.abort(sequence)
    running.loop.abort(sequence_of("never added", (1,), 1))
    later = running.add("b", (2,), 2)
    running.until_ended(later)
    assert len(running.last(sequence)) == 1


def test_what_the_listener_ends_gets_no_further_token(make: Callable[..., Running]) -> None:
    running = make(gated=False, slots=2)
    running.end_early = lambda event: event.sequence.request_id == "cut" and event.sequence.generated == 3
    cut, other = running.add("cut", (1, 2), 30), running.add("other", (3, 4), 12)
    running.until_ended(other)
    assert running.tokens(cut) == continuation((1, 2), 3, VOCAB)
    assert running.last(cut) == []
    running.loop.abort(cut)
    running.finish()
    assert running.last(cut) == []


def test_stop_cancels_all_that_is_live_and_ends_the_thread(make: Callable[..., Running]) -> None:
    running = make(slots=1)
    sequences = [running.add(f"r{i}", (i, 5), 20) for i in range(3)]
    running.gate.wait()
    stopper = threading.Thread(target=running.loop.stop)
    stopper.start()
    running.gate.open_for_good()
    stopper.join(PATIENCE_S)
    assert not stopper.is_alive()
    running.until_ended(*sequences)
    for sequence in sequences:
        assert [event.finish for event in running.last(sequence)] == [FinishReason.CANCELLED]
    assert running.deaths == []


def test_a_full_queue_is_told_to_the_one_it_refused(make: Callable[..., Running]) -> None:
    running = make(slots=1, max_waiting=1)
    first = running.add("first", (1,), 3)
    running.gate.wait()  # first has the slot
    second = running.add("second", (2,), 2)
    third = running.add("third", (3,), 2)
    running.gate.open_for_good()
    running.until_ended(first, second, third)
    (refusal,) = running.last(third)
    assert isinstance(refusal.error, QueueFullError)
    assert refusal.token_id is None
    assert running.tokens(second) == continuation((2,), 2, VOCAB)


def test_a_failed_step_is_no_death(make: Callable[..., Running]) -> None:
    running = make(gated=False)
    failures = iter([ProviderError("once")])

    def before(_call: Call) -> None:
        for failure in failures:
            raise failure

    running.session.before_call = before
    first = running.add("first", (1,), 3)
    running.until_ended(first)
    second = running.add("second", (2,), 3)
    running.until_ended(second)
    assert isinstance(running.last(first)[0].error, ProviderError)
    assert running.tokens(second) == continuation((2,), 3, VOCAB)
    assert running.deaths == []


def test_the_engines_death_is_reported_once_and_stop_returns(make: Callable[..., Running]) -> None:
    running = make(gated=False)
    error = RuntimeError("gone")

    def before(_call: Call) -> None:
        raise error

    running.session.before_call = before
    running.add("a", (1,), 3)
    running.add("b", (2,), 3)
    running.loop._thread.join(PATIENCE_S)
    assert running.deaths == [error]
    running.loop.stop()
    assert running.deaths == [error]


class Watched:
    """Stands in for the command queue and notes how commands are asked for."""

    def __init__(self, inner: queue.SimpleQueue[object]) -> None:
        self.inner = inner
        self.asked: queue.SimpleQueue[bool] = queue.SimpleQueue()

    def put(self, item: object) -> None:
        self.inner.put(item)

    def get(self, block: bool) -> object:
        self.asked.put(block)
        return self.inner.get(block=block)


def test_an_idle_loop_waits_in_the_queue_and_a_busy_one_only_looks() -> None:
    running = Running(gated=False)
    watched = Watched(running.loop._commands)  # type: ignore[arg-type]
    running.loop._commands = watched  # type: ignore[assignment]
    running.loop.start()
    assert watched.asked.get(timeout=PATIENCE_S) is True
    assert watched.asked.empty(), "the thread came back from an empty queue"
    sequence = running.add("a", (1, 2, 3, 4, 5, 6), 4)  # two chunks, then three steps
    running.until_ended(sequence)
    asked = []
    while not asked or asked[-1] is False:
        asked.append(watched.asked.get(timeout=PATIENCE_S))
    assert asked == [False] * (len(asked) - 1) + [True]
    assert len(asked) <= len(running.session.calls) + 2
    # An abort of something long gone wakes it once.
    running.loop.abort(sequence)
    asked = [watched.asked.get(timeout=PATIENCE_S)]
    while asked[-1] is False:
        asked.append(watched.asked.get(timeout=PATIENCE_S))
    assert len(asked) == 2
    running.finish()
    assert running.deaths == []
