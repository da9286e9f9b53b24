"""The engine: one step's failure stays in that step, one row's stays in that row, and every stamp is taken
once.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import pytest

from llorch_serve.engine.engine import Engine
from llorch_serve.engine.guessing import Guessing
from llorch_serve.engine.payoff import Payoff
from llorch_serve.engine.scheduler import Scheduler, SchedulerConfig
from llorch_serve.engine.sequence import FinishReason, Sequence, SequenceStatus, TokenEvent
from llorch_serve.errors import NonFiniteLogitsError, ProviderError, QueueFullError, ResourceError
from llorch_serve.sampling.params import ResolvedSampling
from support.fakes.session import GREEDY, Call, FakeSession, continuation, sequence_of

VOCAB = 32


def ticking() -> Callable[[], float]:
    """A clock that shows 0, 1, 2, ..."""
    return itertools.count().__next__


class Bench:
    """An engine on a fake session, and what it said of every sequence."""

    def __init__(
        self, session: FakeSession, *, slots: int = 4, chunk: int = 4, max_waiting: int = 10
    ) -> None:
        self.session = session
        config = SchedulerConfig(
            slots=slots, budget=slots * session.context, prefill_chunk=chunk, max_waiting=max_waiting
        )
        self.engine = Engine(session, Scheduler(config), ticking())
        self.events: dict[Sequence, list[TokenEvent]] = {}

    def add(
        self, name: str, prompt: tuple[int, ...], count: int, lookup: int = 0, **params: object
    ) -> Sequence:
        sequence = sequence_of(name, prompt, count, lookup=lookup, **params)
        self.engine.add(sequence)
        self.events[sequence] = []
        return sequence

    def step(self) -> list[TokenEvent]:
        events = self.engine.step()
        for event in events:
            self.events[event.sequence].append(event)
        return events

    def drain(self) -> None:
        live = {s for s in self.events if s.status is not SequenceStatus.FINISHED}
        while live:
            live -= {event.sequence for event in self.step() if event.finish or event.error}
        assert self.step() == []

    def tokens(self, sequence: Sequence) -> list[int | None]:
        return [event.token_id for event in self.events[sequence] if event.token_id is not None]


def fail_once(kind: str, number: int = 1) -> Callable[[Call], None]:
    """Raise ProviderError at the ``number``-th call of a kind."""
    seen = itertools.count(1)

    def before(call: Call) -> None:
        if call.kind == kind and next(seen) == number:
            raise ProviderError("out of luck")

    return before


def test_answers_are_the_models_own() -> None:
    bench = Bench(FakeSession())
    prompts = [(1, 2, 3, 4, 5, 6, 7), (9,), (8, 8), (3, 1, 4, 1, 5), (2, 7, 1, 8)]
    sequences = [bench.add(f"r{i}", prompt, 5 + i) for i, prompt in enumerate(prompts)]
    bench.drain()
    for sequence, prompt in zip(sequences, prompts, strict=True):
        assert bench.tokens(sequence) == continuation(prompt, sequence.limits.max_new_tokens, VOCAB)
        assert bench.events[sequence][-1].finish is FinishReason.LENGTH


def test_seeded_answers_do_not_depend_on_neighbours() -> None:
    params = ResolvedSampling(
        temperature=1.5, top_k=9, top_p=0.9, min_p=0.01, repetition_penalty=1.2, min_tokens=0, seed=0
    )
    fields = {name: getattr(params, name) for name in ResolvedSampling.__dataclass_fields__}
    bench = Bench(FakeSession(), slots=3)
    pairs = []
    for seed in range(6):
        prompt = tuple(range(1 + 3 * seed))
        pairs.append((bench.add(f"r{seed}", prompt, 6, **{**fields, "seed": seed}), prompt, seed))
    bench.drain()
    for sequence, prompt, seed in pairs:
        alone = continuation(prompt, 6, VOCAB, params=ResolvedSampling(**{**fields, "seed": seed}))
        assert bench.tokens(sequence) == alone


@pytest.mark.parametrize("chunk", [1, 2, 3])
def test_a_failed_prefill_ends_that_prompt_and_no_other(chunk: int) -> None:
    bench = Bench(FakeSession(before_call=fail_once("prefill", 1 + chunk)))
    first = bench.add("first", (1, 2), 6)
    failing = bench.add("failing", tuple(range(12)), 6)  # three chunks
    third = bench.add("third", (5, 6), 6)
    bench.drain()
    (event,) = bench.events[failing]
    assert isinstance(event.error, ProviderError)
    assert event.token_id is event.finish is None
    assert failing.cache.slot is None
    assert bench.tokens(first) == continuation((1, 2), 6, VOCAB)
    assert bench.tokens(third) == continuation((5, 6), 6, VOCAB)


def test_a_failed_decode_ends_the_running_ones_and_what_waits_goes_on() -> None:
    bench = Bench(FakeSession(before_call=fail_once("decode", 3)), slots=2, chunk=4)
    running = bench.add("running", (1, 2), 9)
    while len(bench.tokens(running)) < 3:
        bench.step()
    prompt = tuple(range(12))
    prefilling = bench.add("prefilling", prompt, 5)
    bench.step()
    waiting = bench.add("waiting", (7, 7), 5)
    assert (prefilling.status, waiting.status) == (SequenceStatus.PREFILL, SequenceStatus.WAITING)
    bench.drain()
    assert isinstance(bench.events[running][-1].error, ProviderError)
    assert bench.tokens(running) == continuation((1, 2), 3, VOCAB)
    assert bench.tokens(prefilling) == continuation(prompt, 5, VOCAB)
    assert bench.tokens(waiting) == continuation((7, 7), 5, VOCAB)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("params", [{}, {"temperature": 1.0, "seed": 3}], ids=["greedy", "sampled"])
def test_logits_that_are_no_numbers_end_their_row_only(value: float, params: dict[str, object]) -> None:
    prompt = (9, 9, 9)

    def spoil(call: Call, logits: npt.NDArray[np.float32]) -> None:
        for row, tokens in zip(logits, call.tokens, strict=False):
            if tokens[:3] == prompt and len(tokens) == 5:
                row[17] = value

    bench = Bench(FakeSession(edit=spoil))
    before, bad, after = (
        bench.add("before", (1, 2), 8),
        bench.add("bad", prompt, 8, **params),
        bench.add("after", (3,), 8),
    )
    bench.drain()
    assert len(bench.tokens(bad)) == 2
    assert isinstance(bench.events[bad][-1].error, NonFiniteLogitsError)
    assert bench.tokens(before) == continuation((1, 2), 8, VOCAB)
    assert bench.tokens(after) == continuation((3,), 8, VOCAB)


class Cramped(FakeSession):
    """Has no memory for the ``failing``-th copy or exchange of slots; the fake's cache is left as it was."""

    def __init__(self, failing: int = 1, **options: int) -> None:
        super().__init__(**options)
        self.edits, self.failing = 0, failing

    def _refuse(self) -> None:
        self.edits += 1
        if self.edits == self.failing:
            raise ResourceError("no memory")

    def copy_slot(self, source: int, target: int, tokens: int) -> None:
        self._refuse()
        super().copy_slot(source, target, tokens)

    def swap_slots(self, first: int, second: int, tokens: int) -> None:
        self._refuse()
        super().swap_slots(first, second, tokens)


def test_a_prefix_that_cannot_be_copied_ends_the_request_that_needs_it_and_no_other() -> None:
    bench = Bench(Cramped(context=128), chunk=64)
    shared = tuple(range(20))
    first = bench.add("first", shared, 12)
    bench.step()
    second = bench.add("second", (*shared, 30, 31, 30), 3)
    bench.drain()
    assert [type(event.error) for event in bench.events[second]] == [ResourceError]
    assert bench.tokens(first) == continuation(shared, 12, VOCAB)
    third = bench.add("third", (*shared, 30, 31, 30), 3)
    bench.drain()
    assert bench.tokens(third) == continuation((*shared, 30, 31, 30), 3, VOCAB)


@pytest.mark.parametrize("waiting", [False, True])
def test_a_running_sequence_that_cannot_be_moved_ends_and_its_neighbours_and_who_waits_go_on(
    waiting: bool,
) -> None:
    bench = Bench(Cramped(), slots=3)
    prompts = {"short": tuple(range(20)), "long": (4, 5, 6), "longest": (7, 8, 9)}
    short = bench.add("short", prompts["short"], 4)
    while not short.generated:
        bench.step()
    long, longest = bench.add("long", prompts["long"], 12), bench.add("longest", prompts["longest"], 12)
    while short.status is not SequenceStatus.FINISHED:
        bench.step()
    late = bench.add("late", (9, 9, 9), 5) if waiting else None
    bench.drain()
    assert isinstance(bench.events[longest][-1].error, ResourceError), "it was to move to the free slot"
    assert bench.tokens(long) == continuation(prompts["long"], 12, VOCAB)
    if late is not None:
        assert bench.tokens(late) == continuation((9, 9, 9), 5, VOCAB)
    # Neither of the two slots is taken for what the exchange would have put there.
    again = bench.add("again", prompts["short"], 4)
    bench.drain()
    assert bench.tokens(again) == continuation(prompts["short"], 4, VOCAB)


def test_an_unexpected_error_is_not_hidden() -> None:
    def explode(_call: Call) -> None:
        raise ZeroDivisionError

    bench = Bench(FakeSession(before_call=explode))
    bench.add("a", (1,), 1)
    with pytest.raises(ZeroDivisionError):
        bench.step()


def test_time_stamps_are_those_of_start_first_and_last_token() -> None:
    bench = Bench(FakeSession(), chunk=4)
    sequence = bench.add("a", tuple(range(10)), 3)  # chunks of 4, 4 and 2 rows
    assert sequence.times.started_at is sequence.times.first_token_at is sequence.times.last_token_at is None
    bench.step()  # the clock is read at the start ...
    bench.step()
    assert (sequence.times.started_at, sequence.times.first_token_at) == (0, None)
    bench.drain()
    times = sequence.times
    assert (times.started_at, times.first_token_at, times.last_token_at) == (0, 3, 5)


def test_a_sequence_that_waits_has_not_started() -> None:
    bench = Bench(FakeSession(), slots=1)
    first, second = bench.add("a", (1,), 3), bench.add("b", (2,), 1)
    bench.step()
    assert first.times.started_at is not None
    assert second.times.started_at is None
    bench.drain()
    assert second.times.started_at is not None
    assert first.times.last_token_at is not None
    assert second.times.started_at > first.times.last_token_at


def test_an_aborted_sequence_says_nothing_more_and_frees_its_slot() -> None:
    bench = Bench(FakeSession(), slots=1)
    first, second = bench.add("a", (1, 2), 9), bench.add("b", (3, 4), 2)
    while len(bench.tokens(first)) < 2:
        bench.step()
    bench.engine.abort(first)
    bench.engine.abort(first)
    told = len(bench.events[first])
    bench.drain()
    assert len(bench.events[first]) == told
    assert bench.tokens(second) == continuation((3, 4), 2, VOCAB)
    bench.engine.abort(second)


def test_what_the_queue_refuses_leaves_nothing_behind() -> None:
    bench = Bench(FakeSession(), slots=1, max_waiting=1)
    first = bench.add("a", (1,), 2)
    refused = sequence_of("b", (2,), 2)
    with pytest.raises(QueueFullError):
        bench.engine.add(refused)
    bench.engine.abort(refused)
    bench.drain()
    assert bench.tokens(first) == continuation((1,), 2, VOCAB)


def test_a_step_with_nothing_to_do_runs_no_model() -> None:
    bench = Bench(FakeSession())
    assert bench.step() == []
    assert bench.session.calls == []


def repeat(tokens: tuple[int, ...]) -> int | None:
    """A model that likes to repeat what it said eight tokens ago, and every seventh time leaves it to
    chance.
    """
    return None if len(tokens) % 7 == 0 or len(tokens) < 8 else tokens[-8]


PROMPT = (5, 6, 7, 8, 9, 10, 11, 12, 5, 6, 7)


@pytest.mark.parametrize("neighbours", [0, 1, 3])
@pytest.mark.parametrize(
    "params",
    [{}, {"temperature": 9.0, "top_k": 20, "seed": 4}, {"repetition_penalty": 1.3}],
    ids=["greedy", "sampled", "penalised"],
)
def test_guesses_change_no_token(params: dict[str, object], neighbours: int) -> None:
    bench = Bench(FakeSession(rule=repeat))
    sequence = bench.add("a", PROMPT, 40, lookup=6, **params)
    for index in range(neighbours):
        bench.add(f"n{index}", (20 + index,), 30, lookup=2 * index)
    bench.drain()
    resolved = ResolvedSampling(**{**{n: getattr(GREEDY, n) for n in GREEDY.__slots__}, **params})
    assert bench.tokens(sequence) == continuation(PROMPT, 40, VOCAB, params=resolved, rule=repeat)
    checks = [call for call in bench.session.calls if call.kind == "verify"]
    assert checks, "nothing was guessed"
    assert sequence.drafts.drafted >= sequence.drafts.accepted > 0
    if not neighbours:
        assert sum(len(call.token_ids) - 1 for call in checks) == sequence.drafts.drafted
        assert len(bench.session.calls) < 40, "guesses saved no call"


def test_a_stop_token_inside_a_guess_ends_the_answer_there() -> None:
    sequence = sequence_of("a", (1, 2, 3, 4, 1, 2), 30, stop_ids=(4,), lookup=6)
    session = FakeSession(rule=lambda tokens: tokens[-4])
    config = SchedulerConfig(slots=1, budget=64, prefill_chunk=8, max_waiting=1)
    engine = Engine(session, Scheduler(config), ticking())
    engine.add(sequence)
    events: list[TokenEvent] = []
    while sequence.status is not SequenceStatus.FINISHED:
        events += engine.step()
    assert [event.token_id for event in events] == [3, 4]
    assert events[-1].finish is FinishReason.STOP
    assert sequence.token_ids == [1, 2, 3, 4, 1, 2, 3]
    assert engine.step() == []


def test_logits_that_are_no_numbers_after_a_wrong_guess_do_not_matter() -> None:
    def spoil(call: Call, logits: npt.NDArray[np.float32]) -> None:
        if call.kind == "verify":
            logits[-1] = np.nan

    bench = Bench(FakeSession(edit=spoil))  # a model that never repeats: no guess is right
    sequence = bench.add("a", PROMPT, 20, lookup=4)
    bench.drain()
    assert bench.tokens(sequence) == continuation(PROMPT, 20, VOCAB)
    assert sequence.drafts.drafted > sequence.drafts.accepted


class Costs:
    """A clock on which calls take time by their rows: ``base`` and ``row`` seconds."""

    def __init__(self, base: float, row: float) -> None:
        self.now = 0.0
        self._base, self._row = base, row

    def before(self, call: Call) -> None:
        self.now += self._base + self._row * len(call.token_ids)

    def __call__(self) -> float:
        return self.now


@pytest.mark.parametrize(("row", "pays"), [(0.01, True), (0.5, False)], ids=["dear calls", "dear rows"])
def test_guesses_of_many_streams_are_checked_where_that_is_faster(row: float, pays: bool) -> None:
    costs = Costs(1.0, row)

    def rule(tokens: tuple[int, ...]) -> int | None:
        return tokens[-8] if len(tokens) > 8 else None

    session = FakeSession(slots=6, context=256, rule=rule, before_call=costs.before)
    config = SchedulerConfig(slots=6, budget=6 * 256, prefill_chunk=16, max_waiting=10)
    engine = Engine(session, Scheduler(config, Guessing(Payoff())), costs)
    made = [sequence_of(f"r{index}", (*PROMPT, index), 150, lookup=16) for index in range(6)]
    engine.add(*made)
    while engine.live:
        engine.step()
    for index, sequence in enumerate(made):
        prompt = (*PROMPT, index)
        assert sequence.token_ids[len(prompt) :] == continuation(prompt, 150, VOCAB, rule=rule)
    plain = 150 * (1.0 + 6 * row)
    assert costs.now < 0.8 * plain if pays else costs.now < 1.06 * plain
