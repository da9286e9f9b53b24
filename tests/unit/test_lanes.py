"""Lanes of one model: where a request goes, and that each of them ends once whatever happens to one lane."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import pytest

from llorch_serve.engine.engine import Engine
from llorch_serve.engine.lanes import WORTH_TOKENS, Lanes
from llorch_serve.engine.load import Load, StageTimes, together
from llorch_serve.engine.scheduler import Scheduler, SchedulerConfig
from llorch_serve.engine.sequence import FinishReason, TokenEvent
from llorch_serve.engine.sequence import Sequence as TokenSequence
from llorch_serve.errors import StageEndedError
from support.fakes.session import Call, FakeSession, continuation, sequence_of
from support.harness.waiting import until

VOCAB = 32
CONTEXT = 1024
PATIENCE_S = 20.0


class Running:
    """Lanes on fake sessions, and everything that they have told. Each lane's calls wait for its gate."""

    def __init__(self, lanes: int, *, slots: Sequence[int] | None = None) -> None:
        self.gates = [threading.Event() for _ in range(lanes)]
        self.events: queue.SimpleQueue[list[TokenEvent]] = queue.SimpleQueue()
        self.deaths: list[BaseException] = []
        self.dead = threading.Event()
        self.seen: list[TokenEvent] = []
        self.telling = 0
        self.sessions = [
            FakeSession(slots=own, context=CONTEXT, vocab_size=VOCAB, before_call=self._gate(gate))
            for gate, own in zip(self.gates, slots or (4,) * lanes, strict=True)
        ]
        self.engines = [Engine(session, Scheduler(self._rules(session.slots))) for session in self.sessions]
        self.lanes = Lanes(self.engines, self._on_events, self._on_death)

    def _rules(self, slots: int) -> SchedulerConfig:
        return SchedulerConfig(slots, budget=slots * CONTEXT, prefill_chunk=CONTEXT, max_waiting=9)

    def _gate(self, gate: threading.Event) -> Callable[[Call], None]:
        def wait(_call: Call) -> None:
            assert gate.wait(PATIENCE_S)

        return wait

    def _on_events(self, events: list[TokenEvent]) -> list[TokenSequence]:
        self.telling += 1
        assert self.telling == 1, "told by two lanes at once"
        self.events.put(list(events))
        self.telling -= 1
        return []

    def _on_death(self, error: BaseException) -> None:
        self.deaths.append(error)
        self.dead.set()

    def open(self) -> None:
        for gate in self.gates:
            gate.set()

    def add(self, prompt: Sequence[int], count: int = 3) -> tuple[TokenSequence, int]:
        """Queue a sequence; return it and the lane that it went to. No lane may end one meanwhile."""
        before = [loop.live for loop in self.lanes._loops]
        sequence = sequence_of("a", prompt, count)
        self.lanes.add(sequence)
        after = [loop.live for loop in self.lanes._loops]
        (lane,) = [place for place, pair in enumerate(zip(before, after, strict=True)) if pair[0] != pair[1]]
        return sequence, lane

    def until_ended(self, *sequences: TokenSequence) -> None:
        while not all(self.ends(sequence) for sequence in sequences):
            self.seen += self.events.get(timeout=PATIENCE_S)

    def ends(self, sequence: TokenSequence) -> list[TokenEvent]:
        return [e for e in self.seen if e.sequence is sequence and (e.finish or e.error)]

    def tokens(self, sequence: TokenSequence) -> list[int]:
        return [e.token_id for e in self.seen if e.sequence is sequence and e.token_id is not None]


@contextmanager
def running(lanes: int, **options: Sequence[int]) -> Iterator[Running]:
    made = Running(lanes, **options)
    made.lanes.start()
    try:
        yield made
    finally:
        made.open()
        made.lanes.stop()


def prompt(seed: int, tokens: int = 6) -> tuple[int, ...]:
    return tuple((seed * 7 + place * place) % VOCAB for place in range(tokens))


def test_requests_go_to_the_emptiest_lane():
    with running(3) as made:
        assert [made.add(prompt(n))[1] for n in range(7)] == [0, 1, 2, 0, 1, 2, 0]


def test_answers_are_those_of_one_engine():
    with running(2) as made:
        found = [made.add(prompt(n), count=5)[0] for n in range(6)]
        made.open()
        made.until_ended(*found)
        for number, sequence in enumerate(found):
            assert made.tokens(sequence) == continuation(prompt(number), 5, VOCAB)
        assert all(session.calls for session in made.sessions)


def test_a_lane_that_holds_much_of_a_prompt_takes_it_although_it_has_one_more():
    with running(2) as made:
        long = prompt(1, WORTH_TOKENS + 40)
        first, lane = made.add(long)
        assert lane == 0
        made.gates[0].set()
        made.until_ended(first)
        made.gates[0].clear()
        assert made.add(prompt(2))[1] == 0  # all lanes are empty, and equal ones are taken in their order
        assert made.add((*long, 3))[1] == 0
        assert made.add((*long, 4))[1] == 1  # two more than the other lane are too many


def test_a_short_prefix_does_not_make_lanes_unequal():
    with running(2) as made:
        short = prompt(1, 40)
        first, _ = made.add(short)
        made.gates[0].set()
        made.until_ended(first)
        made.gates[0].clear()
        made.add(prompt(2))
        assert made.add((*short, 3))[1] == 1


def test_of_equally_empty_lanes_the_one_that_holds_more_is_taken():
    with running(2) as made:
        made.add(prompt(1))
        second, lane = made.add(prompt(2, 40))
        assert lane == 1
        made.open()
        made.until_ended(second)
        until(lambda: not any(loop.live for loop in made.lanes._loops))
        for gate in made.gates:
            gate.clear()
        assert made.add((*prompt(2, 40), 5))[1] == 1


def test_a_request_does_not_wait_for_what_a_full_lane_holds_while_another_has_a_free_slot():
    with running(2, slots=(1, 1)) as made:
        long = prompt(1, WORTH_TOKENS + 40)
        first, lane = made.add(long)
        assert lane == 0
        made.gates[0].set()
        made.until_ended(first)
        made.gates[0].clear()
        assert made.add((*long, 3))[1] == 0
        assert made.add((*long, 4))[1] == 1
        assert made.add((*long, 5))[1] == 0  # both are full


def test_a_larger_lane_is_filled_before_a_smaller_one_has_to_queue():
    with running(2, slots=(2, 1)) as made:
        made.add(prompt(2, 40))
        second, lane = made.add(prompt(1, 40))
        assert lane == 1
        made.gates[1].set()
        made.until_ended(second)
        made.gates[1].clear()
        assert made.add((*prompt(1, 40), 3))[1] == 1
        assert made.add((*prompt(1, 40), 4))[1] == 0
        assert [made.add(prompt(n))[1] for n in (5, 6)] == [0, 1]


def test_a_sequence_is_ended_in_whichever_lane_it_is():
    with running(2) as made:
        first, second = made.add(prompt(1), 500)[0], made.add(prompt(2), 500)[0]
        made.lanes.abort(second)
        made.lanes.abort(second)
        made.open()
        made.until_ended(second)
        made.lanes.abort(first)
        made.until_ended(first)
        assert [e.finish for e in made.ends(first) + made.ends(second)] == [FinishReason.CANCELLED] * 2


def test_the_error_of_one_lane_ends_all_and_is_told_once():
    with running(2) as made:
        made.add(prompt(1), 500)
        made.add(prompt(2), 500)
        gone = StageEndedError("stage 1 is gone")

        def fail(_call: Call) -> None:
            raise gone

        made.sessions[1].before_call = fail
        made.open()
        assert made.dead.wait(PATIENCE_S)
        for loop in made.lanes._loops:
            loop._thread.join(PATIENCE_S)
            assert not loop._thread.is_alive()
        made.lanes.die(StageEndedError("and is told of by its watcher too"))
        assert made.deaths == [gone]


def test_what_happens_elsewhere_ends_lanes_that_idle():
    with running(2) as made:
        gone = StageEndedError("stage 0 is gone")
        made.lanes.die(gone)
        for loop in made.lanes._loops:
            loop._thread.join(PATIENCE_S)
            assert not loop._thread.is_alive()
        assert made.deaths == [gone]


@pytest.mark.parametrize("stages", [(), (StageTimes(3, 1.5, 0.25), StageTimes(3, 2.5, 0.5))])
def test_the_load_of_lanes_is_their_sum(stages: tuple[StageTimes, ...]):
    one = Load(
        running=1, waiting=2, slots=4, kv_tokens_running=5, kv_tokens_idle=6, kv_tokens_total=64,
        prompt_tokens=7, cached_tokens=8, generated_tokens=9, drafted_tokens=10, accepted_tokens=11,
        tokens_per_second=1.5,
    )  # fmt: skip
    assert together([one]) == one
    found = together([one, one, one], stages)
    assert (found.running, found.waiting, found.slots, found.tokens_per_second) == (3, 6, 12, 4.5)
    assert (found.kv_tokens_total, found.generated_tokens, found.stages) == (192, 27, stages)
    assert found.state is one.state
