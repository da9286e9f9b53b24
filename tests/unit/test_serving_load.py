"""Load on a fake worker that sends at known moments of a virtual clock: when requests go out, and what is
noted of each.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import pytest

from llorch_serve.bench.serving.arrivals import Arrivals, ClosedLoop, OpenLoop
from llorch_serve.bench.serving.load import LoadGenerator
from llorch_serve.bench.serving.records import Arrival, CallError, LoadRun, Piece, Usage
from llorch_serve.bench.serving.work import Job
from llorch_serve.requests import TokenPrompt
from support.fakes.virtual_time import VirtualLoop, run_virtually

Message = tuple[float, int]  # seconds after the one before, tokens


@dataclass
class FakeWorker:
    """Answers each request with its script: waits, then sends so many tokens; ``(wait, -1)`` fails there.

    slots: requests that are answered at once; the others wait. stall: (from, until): nothing is sent or taken
        between these moments.
    """

    scripts: Sequence[Sequence[Message]]
    slots: int = 1000
    called: list[float] = field(default_factory=list)
    whole: bool = True  # whether the last message ends the answer

    def __post_init__(self) -> None:
        self._free = asyncio.Semaphore(self.slots)
        self._next = itertools.cycle(self.scripts)

    async def __call__(self, job: Job) -> AsyncGenerator[Piece]:
        script = next(self._next)
        self.called.append(asyncio.get_running_loop().time())
        async with self._free:
            sent = 0
            for place, (wait, tokens) in enumerate(script, 1):
                await asyncio.sleep(wait)
                if tokens < 0:
                    raise CallError("UNAVAILABLE", "the worker is shutting down")
                sent += tokens
                ends = self.whole and place == len(script)
                yield Piece(tokens, Usage(7, 3, sent) if ends else None)


def jobs() -> Iterator[Job]:
    return itertools.repeat(Job(TokenPrompt((1, 2, 3)), 4))


def run(
    worker: Callable[[Job], AsyncGenerator[Piece]],
    arrivals: Arrivals,
    *,
    requests: int | None = None,
    duration_s: float | None = None,
) -> LoadRun:
    def make(clock: Callable[[], float]):
        generator = LoadGenerator(worker, clock)
        return generator.run(arrivals, jobs(), requests=requests, duration_s=duration_s)

    return run_virtually(make)


ONE_SECOND = [(0.5, 1), (0.25, 1), (0.25, 2)]


def test_a_request_is_noted_message_by_message():
    (record,) = run(FakeWorker([ONE_SECOND]), ClosedLoop(1), requests=1).records
    assert (record.scheduled_s, record.sent_s) == (0, 0)
    assert record.arrivals == [Arrival(0.5, 1), Arrival(0.75, 1), Arrival(1.0, 2)]
    assert (record.tokens, record.ended_s, record.usage) == (4, 1.0, Usage(7, 3, 4))
    assert record.failure is None


def test_closed_loop_users_send_when_their_last_answer_has_ended():
    worker = FakeWorker([ONE_SECOND])
    found = run(worker, ClosedLoop(2), requests=6)
    assert worker.called == [0, 0, 1, 1, 2, 2]
    assert found.duration_s == 3
    assert [record.scheduled_s for record in found.records] == worker.called


def test_a_closed_loop_by_duration_lets_what_runs_finish():
    worker = FakeWorker([ONE_SECOND])
    found = run(worker, ClosedLoop(3), duration_s=1.5)
    assert worker.called == [0, 0, 0, 1, 1, 1]
    assert found.duration_s == 2


def test_an_open_loop_sends_whatever_has_become_of_earlier_requests():
    arrivals = OpenLoop(rate=10, burstiness=1, seed=3)
    planned = list(itertools.islice(arrivals.moments(), 20))
    worker = FakeWorker([[(30.0, 4)]])
    found = run(worker, arrivals, requests=20)
    assert worker.called == pytest.approx(planned)
    assert [record.scheduled_s for record in found.records] == planned
    assert found.duration_s == pytest.approx(planned[-1] + 30)


def test_an_open_loop_by_duration_sends_what_is_due_before():
    arrivals = OpenLoop(rate=10, burstiness=1, seed=3)
    planned = list(itertools.takewhile(lambda moment: moment < 4, arrivals.moments()))
    found = run(FakeWorker([[(0.5, 4)]]), arrivals, duration_s=4)
    assert [record.scheduled_s for record in found.records] == planned
    assert 20 < len(planned) < 60


def test_waiting_for_a_stalled_client_counts_in_an_open_loop():
    """What is due while the client cannot send is late by as much, and its wait counts from when it was
    due.
    """
    stalls = iter([5.0])

    async def call(job: Job) -> AsyncGenerator[Piece]:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualLoop)
        loop.stand_still(next(stalls, 0.0))  # during the first request
        await asyncio.sleep(0.1)
        yield Piece(1, Usage(1, 0, 1))

    # Every 0.5 s, as evenly as can be.
    records = run(call, OpenLoop(rate=2, burstiness=1e9, seed=0), requests=20).records
    late = [record.sent_s - record.scheduled_s for record in records]
    assert late[0] == pytest.approx(0, abs=1e-3)
    assert late[1:10] == pytest.approx([4.5, 4.0, 3.5, 3.0, 2.5, 2.0, 1.5, 1.0, 0.5], abs=1e-2)
    assert late[11:] == pytest.approx([0] * 9, abs=1e-3)
    waits = [record.arrivals[0].at_s - record.scheduled_s for record in records]
    assert waits[1] == pytest.approx(4.6, abs=1e-2)


def test_a_queue_in_the_worker_counts_from_the_schedule():
    found = run(FakeWorker([[(1.0, 1)]], slots=1), OpenLoop(rate=1e6, burstiness=1, seed=0), requests=5)
    waits = [record.ended_s - record.scheduled_s for record in found.records]
    assert sorted(waits) == pytest.approx([1, 2, 3, 4, 5], abs=1e-3)


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 4.0])
def test_gaps_have_the_rate_and_the_spread_asked_for(burstiness: float):
    moments = list(itertools.islice(OpenLoop(5, burstiness, 1).moments(), 40_000))
    gaps = np.diff(moments)
    # Of 40,000 draws the mean strays by 0.5 % and the spread by 1 % times 1 / sqrt(burstiness).
    assert gaps.mean() == pytest.approx(1 / 5, rel=0.04)
    assert gaps.std() / gaps.mean() == pytest.approx(1 / np.sqrt(burstiness), rel=0.04)


def test_a_poisson_process_is_memoryless():
    gaps = np.diff(list(itertools.islice(OpenLoop(5, 1, 2).moments(), 40_000)))
    for quantile in (0.1, 0.5, 0.9, 0.99):
        assert np.quantile(gaps, quantile) == pytest.approx(-np.log(1 - quantile) / 5, rel=0.05)


def test_the_seed_alone_decides_the_moments():
    first, again, other = (list(itertools.islice(OpenLoop(5, 1, s).moments(), 9)) for s in (1, 1, 2))
    assert first == again
    assert first != other


def test_failures_are_noted_with_what_had_come():
    found = run(FakeWorker([[(0.5, 3), (0.25, -1)], ONE_SECOND]), ClosedLoop(1), requests=2)
    broken, whole = found.records
    assert (broken.failure, broken.message) == ("UNAVAILABLE", "the worker is shutting down")
    assert (broken.arrivals, broken.ended_s) == ([Arrival(0.5, 3)], 0.75)
    assert (whole.failure, whole.sent_s) == (None, 0.75)
    assert found.duration_s == 1.75


def test_a_stream_without_an_end_is_a_failure():
    worker = FakeWorker([ONE_SECOND], whole=False)
    (record,) = run(worker, ClosedLoop(1), requests=1).records
    assert (record.failure, record.ended_s) == ("INCOMPLETE", 1.0)


def test_an_answer_without_a_token_is_a_failure():
    (record,) = run(FakeWorker([[(0.5, 0)]]), ClosedLoop(1), requests=1).records
    assert (record.failure, record.arrivals) == ("EMPTY", [])


def test_messages_without_tokens_are_no_arrivals():
    (record,) = run(FakeWorker([[(0.5, 0), (0.5, 2), (0.5, 0)]]), ClosedLoop(1), requests=1).records
    assert record.arrivals == [Arrival(1.0, 2)]
    assert record.ended_s == 1.5


def test_a_bug_is_not_a_failed_request():
    async def call(job: Job) -> AsyncGenerator[Piece]:
        yield Piece(1)
        raise ZeroDivisionError

    with pytest.raises(ExceptionGroup) as caught:
        run(call, ClosedLoop(1), requests=1)
    assert caught.group_contains(ZeroDivisionError)
