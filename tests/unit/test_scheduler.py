"""The scheduler under random arrivals, aborts and ends: whatever it plans, every sequence gets exactly its
own answer.

Plans are carried out on the fake session, whose answers change with any wrong position, slot or move.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence as Seq

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llorch_serve.engine.plan import (
    DecodeBatch,
    PrefillChunk,
    Sampled,
    SharedStart,
    SlotRelease,
    StepPlan,
    VerifyChunk,
)
from llorch_serve.engine.runner import apply_edit, run
from llorch_serve.engine.scheduler import Scheduler, SchedulerConfig
from llorch_serve.engine.sequence import FinishReason, Ownership, Sequence, SequenceStatus, TokenEvent
from llorch_serve.engine.shared_prompt import SharedPrompt
from llorch_serve.errors import NonFiniteLogitsError, QueueFullError
from llorch_serve.sampling.prompt_scores import PromptScores
from support.fakes.session import FakeSession, continuation, next_logits, sequence_of

VOCAB = 24
CONTEXT = 64


@functools.cache
def answer(prompt: tuple[int, ...], count: int, stop_ids: frozenset[int]) -> list[int]:
    return continuation(prompt, count, VOCAB, stop_ids=sorted(stop_ids))


class Simulation:
    """Steps a scheduler on a fake session, greedily, and checks every plan and every event.

    lookup: most tokens in a draft. shortest_reuse is small, so that short prompts share prefixes too.
    """

    def __init__(
        self,
        *,
        slots: int,
        chunk: int,
        kv_cache: bool = True,
        max_waiting: int = 1000,
        budget: int | None = None,
        prefix_cache: bool = True,
        strict_reuse: bool = False,
        lookup: int = 0,
    ) -> None:
        self.slots = slots
        self.chunk = chunk
        self.budget = slots * CONTEXT if budget is None else budget
        self.lookup = lookup
        self.strict_reuse = strict_reuse
        self.prefix_cache = prefix_cache and kv_cache
        self.scheduler = Scheduler(
            SchedulerConfig(
                slots=slots,
                budget=self.budget,
                prefill_chunk=chunk,
                max_waiting=max_waiting,
                kv_cache=kv_cache,
                prefix_cache=prefix_cache,
                strict_reuse=strict_reuse,
                shortest_reuse=2,
            )
        )
        self.session = FakeSession(slots=slots, context=CONTEXT, vocab_size=VOCAB)
        self.kv_cache = kv_cache
        self.added: list[Sequence] = []
        self.started: list[Sequence] = []
        self.ended: dict[Sequence, TokenEvent] = {}
        self.removed: set[Sequence] = set()
        self.last_kind = ""
        self.steps = 0
        self.token_steps: dict[Sequence, list[int]] = {}

    def add(self, prompt: Seq[int], count: int, stop_ids: Seq[int] = (), client: str = "") -> Sequence:
        sequence = sequence_of(
            f"r{len(self.added)}",
            prompt,
            count,
            stop_ids=stop_ids,
            ownership=Ownership(client),
            lookup=self.lookup,
        )
        self.scheduler.add(sequence)
        self.added.append(sequence)
        return sequence

    def add_answers(self, prompt: Seq[int], counts: Seq[int]) -> list[Sequence]:
        """Add one sequence for each count, all of one prompt that they share."""
        shared = SharedPrompt()
        group = [
            sequence_of(f"r{len(self.added)}.{i}", prompt, count, shared=shared, lookup=self.lookup)
            for i, count in enumerate(counts)
        ]
        self.scheduler.add(*group)
        self.added += group
        return group

    def add_scored(self, prompt: Seq[int], first: int, count: int) -> Sequence:
        """Add a sequence whose prompt's tokens from ``first`` on are scored."""
        scores = PromptScores(tuple(prompt), first, top=1, rows=3)
        sequence = sequence_of(f"r{len(self.added)}", prompt, count, prompt_scores=scores)
        self.scheduler.add(sequence)
        self.added.append(sequence)
        return sequence

    def remove(self, sequence: Sequence) -> None:
        self.scheduler.remove(sequence)
        self.removed.add(sequence)
        assert sequence.cache.slot is None
        assert sequence.status is SequenceStatus.FINISHED

    @property
    def live(self) -> list[Sequence]:
        return [s for s in self.added if s not in self.ended and s not in self.removed]

    def step(self) -> bool:
        before = {s: s.status for s in self.live}
        plan = self.scheduler.schedule()
        if plan is None:
            assert not self.live, "nothing is due and sequences are waiting"
            return False
        self.steps += 1
        self._check(plan, before)
        for edit in plan.edits:
            apply_edit(self.session, edit)
        logits = run(self.session, plan.call)
        tokens = [int(row.argmax()) for row in logits]
        match plan.call:
            case PrefillChunk(sequence=sequence, slot=slot, scored=scored, samples=samples):
                if self.strict_reuse:
                    reused = self.session.kinds[slot][: sequence.cache.reused]
                    assert set(reused) <= {"prefill"}, "tokens that were decoded have been reused"
                assert len(tokens) == len(scored) + samples
                if scored:
                    sequence.prompt_scores.take(logits[: len(scored)])
                results = [Sampled(tuple(tokens[len(scored) :]))]
            case VerifyChunk(token_ids=token_ids, draft=draft):
                assert len(tokens) == len(token_ids)
                right = [token == guess for token, guess in zip(tokens, draft, strict=False)]
                results = [Sampled(tuple(tokens[: (*right, False).index(False) + 1]))]
            case _:
                assert len(tokens) == len(plan.sequences())
                results = [Sampled((token,)) for token in tokens]
        for event in self.scheduler.update(plan, results):
            self._take(event)
        self._check_counts()
        return True

    def drain(self) -> None:
        while self.step():
            pass
        assert self.scheduler.waiting == self.scheduler.running == 0

    def _check(self, plan: StepPlan, before: dict[Sequence, SequenceStatus]) -> None:
        running = [s for s in self.live if s.cache.slot is not None]
        assert len({s.cache.slot for s in running}) == len(running), "two sequences in one slot"
        assert all(0 <= s.cache.slot < self.slots for s in running if s.cache.slot is not None)
        decoding = [s for s in self.live if before[s] is SequenceStatus.DECODE]
        match plan.call:
            case PrefillChunk() as chunk:
                self._check_prefill(chunk)
                kind = "prefill"
            case SharedStart() as start:
                self._check_start(start)
                kind = "prefill"
            case VerifyChunk() as check:
                self._check_verify(check, decoding)
                kind = "verify"
            case DecodeBatch() as batch:
                self._check_decode(batch, decoding)
                kind = "decode"
        self._check_budget(plan)
        if self.last_kind == "prefill" and decoding:
            assert kind != "prefill", "a prompt took two turns in a row while streams were running"
        due = SequenceStatus.PREFILL in before.values() or (
            SequenceStatus.WAITING in before.values()
            and len(decoding) < self.slots
            and self.budget >= self.slots * CONTEXT
        )
        if self.last_kind == "decode" and due:
            assert kind == "prefill", "running streams took two turns in a row while a prompt was due"
        self.last_kind = kind

    def _check_decode(self, batch: DecodeBatch, decoding: list[Sequence]) -> None:
        rows = [row.sequence for row in batch.rows]
        assert len(rows) == len(decoding)
        assert set(rows) == set(decoding), "a running sequence got no row"
        for slot, row in enumerate(batch.rows):
            assert row.sequence.cache.slot == slot
            assert row.token_id == row.sequence.token_ids[-1]
            assert row.length == len(row.sequence.token_ids) == row.sequence.cache.computed + 1

    def _check_verify(self, check: VerifyChunk, decoding: list[Sequence]) -> None:
        sequence = check.sequence
        assert sequence in decoding
        assert check.slot == sequence.cache.slot
        assert check.start == sequence.cache.computed == len(sequence.token_ids) - 1
        assert check.token_ids[0] == sequence.token_ids[-1]
        assert 1 <= len(check.draft) <= self.lookup
        assert check.start + len(check.token_ids) < sequence.most_tokens

    def _check_budget(self, plan: StepPlan) -> None:
        running = [s for s in self.live if s.cache.slot is not None]
        load = self.scheduler.load()
        assert sum(s.most_tokens for s in running) + load.kv_tokens_idle <= self.budget, (
            "the cache may grow beyond its budget"
        )
        assert load.kv_tokens_running + load.kv_tokens_idle <= self.budget
        for edit in plan.edits:
            if isinstance(edit, SlotRelease):
                assert edit.keep >= max(
                    (s.cache.computed for s in running if s.cache.slot == edit.slot), default=0
                )

    def _check_prefill(self, chunk: PrefillChunk) -> None:
        sequence = chunk.sequence
        assert chunk.slot == sequence.cache.slot
        assert chunk.start == sequence.cache.computed
        end = chunk.start + len(chunk.token_ids)
        assert list(chunk.token_ids) == sequence.token_ids[chunk.start : end]
        assert 1 <= len(chunk.token_ids) <= self.chunk
        assert chunk.samples == (end == len(sequence.token_ids) and sequence.limits.max_new_tokens > 0)
        assert len(chunk.scored) <= 3 or sequence.prompt_scores is None
        if end == sequence.prompt_length >= 2 and self.chunk >= 3:
            assert len(chunk.token_ids) >= 2, "the prompt's last row runs alone"
        if sequence not in self.started:
            assert chunk.start == sequence.cache.reused
            assert chunk.start <= max(sequence.prompt_length - 2, 0)
            if not self.prefix_cache:
                assert chunk.start == 0
            self._start(sequence)

    def _check_start(self, start: SharedStart) -> None:
        sequence = start.sequence
        assert sequence not in self.started
        assert start.slot == sequence.cache.slot
        assert sequence.cache.computed == sequence.prompt_length == len(sequence.token_ids)
        assert self.kv_cache
        self._start(sequence)

    def _start(self, sequence: Sequence) -> None:
        self.started.append(sequence)
        earlier = self.added[: self.added.index(sequence)]
        assert all(s in self.started or s in self.removed for s in earlier), "overtaken"

    def _take(self, event: TokenEvent) -> None:
        sequence = event.sequence
        assert sequence not in self.ended, "an event after the last one"
        self.token_steps.setdefault(sequence, []).append(self.steps)
        if event.finish is not None:
            self.ended[sequence] = event
            assert sequence.cache.slot is None
            if sequence.prompt_scores is not None:
                self._check_scores(sequence.prompt_scores)
        prompt = tuple(sequence.token_ids[: sequence.prompt_length])
        wanted = answer(prompt, sequence.limits.max_new_tokens, sequence.limits.stop_ids)
        got = sequence.token_ids[sequence.prompt_length :]
        assert got == wanted[: len(got)]
        if event.finish is None:
            # A draft that was right gives several events in one step.
            told = len(self.token_steps[sequence])
            assert told < sequence.limits.max_new_tokens
            assert event.token_id == got[told - 1]
        elif event.finish is FinishReason.STOP:
            assert event.is_stop_token
            assert event.token_id in sequence.limits.stop_ids
            assert got == wanted
        else:
            assert event.finish is FinishReason.LENGTH
            assert len(got) == sequence.limits.max_new_tokens
            assert not event.is_stop_token

    def _check_scores(self, scores: PromptScores) -> None:
        assert len(scores.found) == len(scores.tokens) - scores.first
        for place, found in enumerate(scores.found, scores.first):
            logits = next_logits(scores.tokens[:place], VOCAB).astype(np.float64)
            assert found.token_id == scores.tokens[place]
            assert found.logprob == pytest.approx(logits[found.token_id] - np.log(np.exp(logits).sum()))
            assert found.top[0][0] == logits.argmax()

    def _check_counts(self) -> None:
        assert self.scheduler.running == sum(s.cache.slot is not None for s in self.live)
        assert self.scheduler.waiting == sum(s.status is SequenceStatus.WAITING for s in self.live)


prompts = st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=20)
adds = st.tuples(
    st.just("add"), prompts, st.integers(1, 12), st.frozensets(st.integers(0, VOCAB - 1), max_size=3)
)
removes = st.tuples(st.just("remove"), st.integers(0, 100))
steps = st.tuples(st.just("step"), st.integers(1, 8))
answers = st.tuples(st.just("answers"), prompts, st.lists(st.integers(1, 12), min_size=2, max_size=5))
scored = st.tuples(st.just("scored"), prompts, st.integers(1, 20), st.integers(0, 3))
scripts = st.lists(st.one_of(adds, answers, scored, steps, removes), max_size=25)


def play(simulation: Simulation, script: list[tuple[object, ...]]) -> None:
    for command in script:
        match command:
            case ("add", prompt, count, stop_ids):
                simulation.add(prompt, count, sorted(stop_ids))
            case ("answers", prompt, counts):
                simulation.add_answers(prompt, counts)
            case ("scored", prompt, first, count):
                simulation.add_scored(prompt, min(first, len(prompt)), count)
            case ("remove", pick) if simulation.live:
                simulation.remove(simulation.live[pick % len(simulation.live)])
            case ("step", count):
                for _ in range(count):
                    simulation.step()
    simulation.drain()


@settings(deadline=None, max_examples=200)
@given(script=scripts, slots=st.integers(1, 5), chunk=st.integers(1, 9))
def test_every_sequence_gets_its_own_answer_whatever_comes_and_goes(
    script: list[tuple[object, ...]], slots: int, chunk: int
) -> None:
    simulation = Simulation(slots=slots, chunk=chunk)
    play(simulation, script)
    assert set(simulation.ended) | simulation.removed == set(simulation.added)


# Few different tokens, so that prompts share prefixes and answers repeat themselves.
similar = st.lists(st.integers(0, 1), min_size=1, max_size=24)
similar_adds = st.tuples(st.just("add"), similar, st.integers(1, 12), st.just(frozenset()))
similar_scored = st.tuples(st.just("scored"), similar, st.integers(1, 24), st.integers(0, 3))
several = st.tuples(st.just("answers"), similar, st.lists(st.integers(1, 12), min_size=2, max_size=5))
similar_scripts = st.lists(st.one_of(similar_adds, several, similar_scored, steps, removes), max_size=25)


@settings(deadline=None, max_examples=200)
@given(
    script=similar_scripts,
    slots=st.integers(1, 5),
    chunk=st.integers(1, 9),
    budget=st.integers(CONTEXT, 3 * CONTEXT),
    strict_reuse=st.booleans(),
    lookup=st.integers(0, 5),
)
def test_reuse_guesses_and_a_small_budget_change_no_answer(
    script: list[tuple[object, ...]],
    slots: int,
    chunk: int,
    budget: int,
    strict_reuse: bool,
    lookup: int,
) -> None:
    simulation = Simulation(slots=slots, chunk=chunk, budget=budget, strict_reuse=strict_reuse, lookup=lookup)
    play(simulation, script)
    assert set(simulation.ended) | simulation.removed == set(simulation.added)


@settings(deadline=None, max_examples=40)
@given(script=scripts, slots=st.integers(1, 3), chunk=st.integers(1, 9))
def test_without_cache_every_token_is_the_same(
    script: list[tuple[object, ...]], slots: int, chunk: int
) -> None:
    # The oracle is the same, so equality with it is equality with the cached run.
    simulation = Simulation(slots=slots, chunk=chunk, kv_cache=False)
    play(simulation, script)
    assert {call.kind for call in simulation.session.calls} <= {"prefill"}
    assert set(simulation.ended) | simulation.removed == set(simulation.added)


def test_without_cache_every_token_recomputes_the_whole_sequence() -> None:
    simulation = Simulation(slots=1, chunk=8, kv_cache=False)
    sequence = simulation.add((1, 2, 3), 3)
    simulation.drain()
    first, second, _third = sequence.token_ids[3:]
    computed = [call.token_ids for call in simulation.session.calls]
    assert computed == [(1, 2, 3), (1, 2, 3), (first,), (1, 2, 3), (first,), (second,)]


@settings(deadline=None, max_examples=60)
@given(
    lengths=st.lists(st.tuples(st.integers(1, 20), st.integers(1, 12)), min_size=1, max_size=12),
    slots=st.integers(1, 5),
    chunk=st.integers(3, 9),
)
def test_nobody_starves(lengths: list[tuple[int, int]], slots: int, chunk: int) -> None:
    simulation = Simulation(slots=slots, chunk=chunk, prefix_cache=False)
    for index, (prompt, count) in enumerate(lengths):
        simulation.add([(index + i) % VOCAB for i in range(prompt)], count)
    simulation.drain()
    assert simulation.started == simulation.added, "not started in the order of arrival"
    # Each step either runs a chunk or brings every running sequence one token further.
    assert simulation.steps <= sum(prompt // chunk + 2 + count for prompt, count in lengths)
    for steps_of_one in simulation.token_steps.values():
        gaps = [later - earlier for earlier, later in itertools.pairwise(steps_of_one)]
        assert all(gap <= 2 for gap in gaps), "a stream waited for more than one chunk"


@pytest.mark.parametrize(
    ("prompt", "chunk", "expected"),
    [
        (1, 4, [1]),
        (2, 4, [2]),
        (4, 4, [4]),
        (5, 4, [3, 2]),
        (8, 4, [4, 4]),
        (9, 4, [4, 3, 2]),
        (513, 256, [256, 255, 2]),
        (257, 256, [255, 2]),
        (129, 256, [127, 2]),
        (33, 64, [31, 2]),
        (65, 33, [32, 31, 2]),
        (98, 97, [96, 2]),
    ],
)
def test_chunks_never_leave_one_row_for_the_end(prompt: int, chunk: int, expected: list[int]) -> None:
    scheduler = Scheduler(SchedulerConfig(slots=1, budget=prompt + 1, prefill_chunk=chunk, max_waiting=1))
    sequence = sequence_of("a", [0] * prompt, 1)
    scheduler.add(sequence)
    sizes = []
    while (plan := scheduler.schedule()) is not None:
        assert isinstance(plan.call, PrefillChunk)
        sizes.append(len(plan.call.token_ids))
        scheduler.update(plan, [Sampled((1,) if plan.call.samples else ())])
    assert sizes == expected


def test_a_long_prompt_and_a_running_stream_take_turns() -> None:
    simulation = Simulation(slots=2, chunk=4)
    simulation.add((1, 2), 12)
    simulation.step()
    simulation.add(tuple(range(16)), 2)
    for _ in range(9):
        simulation.step()
    kinds = [call.kind for call in simulation.session.calls]
    assert kinds == [
        "prefill",
        "decode",
        "prefill",
        "decode",
        "prefill",
        "decode",
        "prefill",
        "decode",
        "prefill",
        "decode",
    ]


def test_the_first_of_several_slots_ending_moves_the_last_one_down() -> None:
    simulation = Simulation(slots=4, chunk=8)
    first = simulation.add((1, 2), 30)
    second = simulation.add((3, 4, 5), 10)
    third = simulation.add((6, 7), 10)
    while third.generated < 2:
        simulation.step()
    simulation.remove(first)
    slot, held = third.cache.slot, third.cache.computed
    simulation.step()
    assert simulation.session.swaps == [(0, slot, max(held, first.cache.computed))]
    assert simulation.session.moves == []
    assert (third.cache.slot, second.cache.slot) == (0, 1)
    assert len(simulation.session.calls[-1].slots) == 2, "the call still spans the freed slot"
    simulation.drain()


def test_a_move_takes_the_lowest_slot_and_leaves_a_prompt_under_way_where_it_is() -> None:
    simulation = Simulation(slots=3, chunk=4)
    first = simulation.add((1, 2), 30)
    second = simulation.add((3, 4), 10)
    while second.generated < 1:
        simulation.step()
    long = simulation.add(tuple(range(16)), 2)
    while long.cache.computed < 4:
        simulation.step()
    simulation.remove(first)
    simulation.step()
    assert second.cache.slot == 0
    assert long.cache.slot == 2
    assert long.status is SequenceStatus.PREFILL
    simulation.drain()


def test_a_prompt_under_way_below_running_streams_survives_their_steps() -> None:
    simulation = Simulation(slots=2, chunk=4)
    first = simulation.add((1, 2), 1)
    second = simulation.add((3, 4), 20)
    while second.generated < 1:
        simulation.step()
    assert first in simulation.ended
    long = simulation.add(tuple(range(16)), 3)  # takes the free slot 0 unless second was moved there
    simulation.drain()
    assert long in simulation.ended


def test_the_queue_refuses_beyond_its_bound_and_takes_again_after() -> None:
    simulation = Simulation(slots=1, chunk=8, max_waiting=2)
    simulation.add((1,), 2)
    simulation.add((2,), 2)
    with pytest.raises(QueueFullError, match="2 requests are waiting") as caught:
        simulation.scheduler.add(sequence_of("late", (3,), 2))
    assert caught.value.retry_after_s > 0
    simulation.step()
    simulation.add((3,), 2)
    simulation.drain()
    assert len(simulation.ended) == 3


def test_no_queue_at_all_refuses_everything() -> None:
    with pytest.raises(QueueFullError):
        Simulation(slots=1, chunk=8, max_waiting=0).add((1,), 1)


@pytest.mark.parametrize("status", list(SequenceStatus))
def test_remove_frees_a_sequence_in_any_status(status: SequenceStatus) -> None:
    simulation = Simulation(slots=1, chunk=4)
    sequence = simulation.add(tuple(range(12)), 3)
    while sequence.status is not status:
        simulation.step()
    simulation.remove(sequence)
    assert simulation.scheduler.running == simulation.scheduler.waiting == 0
    assert simulation.scheduler.schedule() is None
    follower = simulation.add((5, 6), 3)
    simulation.drain()
    assert follower in simulation.ended


def test_an_error_ends_its_row_and_no_other() -> None:
    simulation = Simulation(slots=2, chunk=4)
    first, second = simulation.add((1, 2), 9), simulation.add((3, 4), 9)
    while not second.generated:
        simulation.step()
    plan = simulation.scheduler.schedule()
    assert plan is not None
    for edit in plan.edits:
        apply_edit(simulation.session, edit)
    run(simulation.session, plan.call)
    failure = NonFiniteLogitsError("nan")
    events = simulation.scheduler.update(plan, [failure, Sampled((3,))])
    assert [(event.sequence, event.error) for event in events] == [(first, failure), (second, None)]
    assert events[0].finish is None
    assert first.cache.slot is None
    assert simulation.scheduler.running == 1


def test_exactly_max_new_tokens_are_generated() -> None:
    for count in (1, 2, 7):
        simulation = Simulation(slots=1, chunk=4)
        sequence = simulation.add((1, 2, 3), count)
        simulation.drain()
        assert sequence.generated == count
        assert simulation.ended[sequence].finish is FinishReason.LENGTH


def test_a_stop_token_is_not_part_of_the_sequence() -> None:
    full = answer((1, 2, 3), 8, frozenset())
    stop = full[4]
    expected = full[: full.index(stop)]
    simulation = Simulation(slots=1, chunk=4)
    sequence = simulation.add((1, 2, 3), 8, [stop])
    simulation.drain()
    assert sequence.token_ids[3:] == expected
    assert simulation.ended[sequence].token_id == stop


def test_nothing_to_do_is_no_plan() -> None:
    assert Scheduler(SchedulerConfig(slots=2, budget=8, prefill_chunk=4, max_waiting=1)).schedule() is None


def test_answers_of_one_prompt_run_it_once_and_start_from_its_end() -> None:
    simulation = Simulation(slots=4, chunk=8, prefix_cache=False)
    group = simulation.add_answers(tuple(range(20)), (6, 6, 6))
    simulation.drain()
    prefilled = [len(call.token_ids) for call in simulation.session.calls if call.kind == "prefill"]
    assert sum(prefilled) == 20
    assert len({tuple(sequence.token_ids) for sequence in group}) == 1
    assert simulation.scheduler.load().prompt_tokens == 20
    assert simulation.scheduler.load().cached_tokens == 0
    assert [move[2] for move in simulation.session.moves[:2]] == [20, 20]


def test_answers_beyond_the_slots_start_from_one_that_has_ended() -> None:
    simulation = Simulation(slots=2, chunk=8)
    group = simulation.add_answers(tuple(range(20)), (3, 9, 4, 4, 5))
    simulation.drain()
    prefilled = [len(call.token_ids) for call in simulation.session.calls if call.kind == "prefill"]
    assert sum(prefilled) == 20, "an answer computed the prompt again"
    assert set(simulation.ended) == set(group)


def test_an_answer_whose_prompt_has_left_the_cache_computes_it_again() -> None:
    simulation = Simulation(slots=1, chunk=8, prefix_cache=False)
    simulation.add_answers(tuple(range(10)), (2, 2))
    simulation.drain()
    prefilled = [len(call.token_ids) for call in simulation.session.calls if call.kind == "prefill"]
    assert sum(prefilled) == 20


def test_starting_answers_and_running_ones_take_turns() -> None:
    simulation = Simulation(slots=4, chunk=8)
    first = simulation.add((1, 2), 20)
    simulation.step()
    simulation.add_answers((3, 4, 5), (9, 9, 9))
    steps = simulation.token_steps
    simulation.drain()
    assert all(later - earlier <= 2 for earlier, later in itertools.pairwise(steps[first]))


def test_the_answers_of_a_request_are_queued_all_or_none() -> None:
    simulation = Simulation(slots=1, chunk=8, max_waiting=3)
    simulation.add((1,), 2)
    with pytest.raises(QueueFullError, match="1 requests are waiting"):
        simulation.add_answers((2,), (1, 1, 1))
    assert simulation.scheduler.waiting == 1
    simulation.drain()
