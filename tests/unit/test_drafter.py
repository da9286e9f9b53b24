"""Guesses by a draft model: they change no token, its slots follow the model's, and its failure is nobody's.

The model and its draft are fake sessions, whose answers change with any wrong position, slot or move.
"""

from __future__ import annotations

import functools
import itertools
import logging
import random
from collections.abc import Sequence as Seq

import numpy as np
import pytest

from llorch_serve.engine.drafter import FEW, Drafter, DraftLimits
from llorch_serve.engine.engine import Engine
from llorch_serve.engine.payoff import Payoff
from llorch_serve.engine.plan import DraftBatch, DraftRow, SlotCopy, SlotRelease, SlotSwap
from llorch_serve.engine.scheduler import Scheduler, SchedulerConfig
from llorch_serve.engine.sequence import Ownership, Sequence, SequenceStatus, TokenEvent
from llorch_serve.engine.shared_prompt import SharedPrompt
from llorch_serve.errors import ProviderError
from llorch_serve.sampling.forecast import fitted
from support.fakes.session import GREEDY, Call, FakeSession, Rule, continuation, sequence_of

VOCAB = 32
SAMPLED = {"temperature": 2.0, "top_k": 12, "seed": 4}


def wrong(tokens: tuple[int, ...]) -> int:
    """Another model, which is right by chance alone."""
    return (sum(tokens) * 7 + len(tokens)) % VOCAB


def often_right(tokens: tuple[int, ...]) -> int | None:
    """The model itself, but for every fifth position."""
    return wrong(tokens) if len(tokens) % 5 == 0 else None


class Pair:
    """An engine on a fake model with a fake draft, and what came of every sequence."""

    def __init__(
        self,
        draft: FakeSession,
        *,
        slots: int = 4,
        context: int = 64,
        most: int = 4,
        chunk: int = 16,
        prefix_cache: bool = True,
        budget: int | None = None,
        payoff: Payoff | None = None,
    ) -> None:
        self.model = FakeSession(slots=slots, context=context, vocab_size=VOCAB)
        self.draft = draft
        limits = DraftLimits(
            slots=draft.slots,
            context=draft.context,
            draft_vocab=draft.vocab_size,
            vocab=VOCAB,
            chunk=chunk,
            most=most,
        )
        self.drafter = Drafter(draft, limits, payoff)
        config = SchedulerConfig(
            slots=slots,
            budget=budget or slots * context,
            prefill_chunk=chunk,
            max_waiting=30,
            shortest_reuse=2,
            prefix_cache=prefix_cache,
        )
        self.scheduler = Scheduler(config)
        self.engine = Engine(self.model, self.scheduler, itertools.count().__next__, drafter=self.drafter)
        self.tokens: dict[Sequence, list[int]] = {}

    def add(self, name: str, prompt: Seq[int], count: int, **more: object) -> Sequence:
        sequence = sequence_of(name, prompt, count, **more)
        self.engine.add(sequence)
        self.tokens[sequence] = []
        return sequence

    def step(self) -> list[TokenEvent]:
        events = self.engine.step()
        for event in events:
            assert event.error is None
            if event.token_id is not None:
                self.tokens[event.sequence].append(event.token_id)
        return events

    def drain(self) -> None:
        for _ in range(2000):
            if not self.engine.live:
                return
            self.step()
        raise AssertionError("some never ended")

    def check_slots(self) -> None:
        """What the drafter says of its slots is what its cache holds."""
        for index, slot in enumerate(self.drafter._slots):
            assert self.draft._tokens[index][: len(slot.tokens)] == slot.tokens


def same(slots: int = 4, context: int = 64, rule: Rule | None = None, vocab: int = VOCAB) -> FakeSession:
    return FakeSession(slots=slots, context=context, vocab_size=vocab, rule=rule)


@functools.cache
def alone(prompt: tuple[int, ...], count: int, sampled: bool = False) -> list[int]:
    params = {n: getattr(GREEDY, n) for n in GREEDY.__slots__} | (SAMPLED if sampled else {})
    return continuation(prompt, count, VOCAB, params=type(GREEDY)(**params))


PROMPTS = [(1, 2, 3, 4, 5, 6, 7, 8, 9), (9,), tuple(range(20)), (3, 1, 4, 1, 5)]


@pytest.mark.parametrize("sampled", [False, True], ids=["greedy", "sampled"])
@pytest.mark.parametrize("streams", [1, 4])
def test_a_draft_that_is_the_model_is_right_every_time(streams: int, sampled: bool) -> None:
    pair = Pair(same())
    params = SAMPLED if sampled else {}
    made = [pair.add(f"r{i}", PROMPTS[i], 30 + i, **params) for i in range(streams)]
    pair.drain()
    for index, sequence in enumerate(made):
        assert pair.tokens[sequence] == alone(PROMPTS[index], 30 + index, sampled)
        assert sequence.drafts.drafted == sequence.drafts.accepted > 15
    calls = [call for call in pair.model.calls if call.kind != "prefill"]
    assert len(calls) < sum(map(len, pair.tokens.values())) / 3


@pytest.mark.parametrize("params", [{}, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("rule", [wrong, often_right])
def test_wrong_guesses_change_no_token(rule: Rule, params: dict[str, object]) -> None:
    pair = Pair(same(rule=rule))
    made = [pair.add(f"r{i}", prompt, 30, **params) for i, prompt in enumerate(PROMPTS)]
    while pair.engine.live:
        pair.step()
        pair.check_slots()
    for sequence, prompt in zip(made, PROMPTS, strict=True):
        assert pair.tokens[sequence] == alone(prompt, 30, bool(params))
    drafted = sum(s.drafts.drafted for s in made)
    accepted = sum(s.drafts.accepted for s in made)
    assert accepted < drafted / 4 if rule is wrong else drafted / 4 < accepted < drafted
    load = pair.engine.load()
    assert (load.drafted_tokens, load.accepted_tokens) == (drafted, accepted)


def test_penalties_are_those_of_the_row() -> None:
    pair = Pair(same())
    sequence = pair.add("a", PROMPTS[0], 30, repetition_penalty=1.3)
    pair.drain()
    # Within one guess they are those before it, so that some are wrong.
    assert sequence.drafts.accepted > sequence.drafts.drafted / 2


def test_streams_are_guessed_for_together() -> None:
    pair = Pair(same(), most=3)
    for index, prompt in enumerate(PROMPTS):
        pair.add(f"r{index}", prompt, 40)
    pair.drain()
    widths = [len(call.slots) for call in pair.draft.calls if call.kind == "decode"]
    assert max(widths) == 4
    assert sum(width == 4 for width in widths) >= 6


def test_a_slot_in_between_keeps_what_it_holds_as_it_was_computed() -> None:
    pair = Pair(same(context=200), context=200, chunk=16)
    long, short = tuple(i % VOCAB for i in range(70)), (9,)
    pair.add("a", long, 30)
    other = pair.add("b", short, 30)
    while not other.drafts.drafted:
        pair.step()
    read = len(pair.drafter._slots[0].tokens)
    assert 0 < read < len(long)
    assert pair.draft.kinds[0][:read] == ["prefill"] * read


def test_a_stop_token_ends_a_guess() -> None:
    prompt, answer = PROMPTS[0], alone(PROMPTS[0], 3)
    pair = Pair(same(), most=8)
    sequence = pair.add("a", prompt, 30, stop_ids=(answer[2],))
    pair.drain()
    assert pair.tokens[sequence] == answer
    assert all(len(call.token_ids) <= 3 for call in pair.model.calls if call.kind == "verify")


def test_a_draft_with_a_shorter_context_stops_at_its_end() -> None:
    pair = Pair(same(context=24))
    sequence = pair.add("a", PROMPTS[0], 50)
    pair.drain()
    assert pair.tokens[sequence] == alone(PROMPTS[0], 50)
    assert 0 < sequence.drafts.drafted == sequence.drafts.accepted < 16
    assert sequence.draft is not None
    assert sequence.draft.max_draft == 0
    longer = pair.add("b", tuple(range(30)), 5)
    before = len(pair.draft.calls)
    pair.drain()
    assert longer.drafts.drafted == 0
    assert len(pair.draft.calls) == before


def test_tables_of_other_sizes_are_fitted() -> None:
    wide = Pair(same(vocab=VOCAB + 8, rule=lambda tokens: VOCAB + 3 if len(tokens) % 2 else None))
    narrow = Pair(same(vocab=VOCAB - 8))
    for pair in (wide, narrow):
        sequence = pair.add("a", PROMPTS[0], 20)
        pair.drain()
        assert pair.tokens[sequence] == alone(PROMPTS[0], 20)
    unknown = narrow.add("b", (VOCAB - 1, 2, 3), 5)
    narrow.drain()
    assert unknown.drafts.drafted == 0
    assert fitted(np.zeros((2, 5), np.float32), 3).shape == (2, 3)
    assert np.isfinite(fitted(np.zeros((2, 3), np.float32), 5)).all()


def test_a_draft_whose_logits_are_not_finite_is_asked_once_for_a_sequence() -> None:
    pair = Pair(FakeSession(context=64, vocab_size=VOCAB, edit=lambda _call, logits: logits.fill(np.nan)))
    sequence = pair.add("a", PROMPTS[0], 20)
    pair.drain()
    assert pair.tokens[sequence] == alone(PROMPTS[0], 20)
    assert [call.kind for call in pair.draft.calls] == ["prefill", "decode"]


def test_a_long_prompt_is_read_in_parts_while_tokens_come() -> None:
    pair = Pair(same(context=200), context=200, chunk=16)
    prompt = tuple(i % VOCAB for i in range(70))
    sequence = pair.add("a", prompt, 30)
    pair.drain()
    assert pair.tokens[sequence] == alone(prompt, 30)
    parts = [call for call in pair.draft.calls if call.kind == "prefill"]
    assert [len(call.token_ids) for call in parts[:4]] == [16, 16, 16, 16]
    assert sequence.drafts.drafted > 0
    # Between two parts the stream got a token.
    order = [call.kind for call in pair.model.calls if call.kind != "prefill"]
    assert order[:4] == ["decode"] * 4


def held(pair: Pair, sequence: Sequence) -> list[int]:
    assert sequence.cache.slot is not None
    return pair.drafter._slots[sequence.cache.slot].tokens


def test_a_reused_prefix_is_reused_by_the_draft_too() -> None:
    pair = Pair(same())
    prompt = tuple(range(20))
    pair.add("a", prompt, 6)
    pair.drain()
    before = len(pair.draft.calls)
    other = pair.add("b", (*prompt, 30, 31), 12)
    pair.drain()
    assert other.cache.reused > 10
    assert not [call for call in pair.draft.calls[before:] if call.kind == "prefill"]
    assert pair.tokens[other] == alone((*prompt, 30, 31), 12)


@pytest.mark.parametrize("salt", ["x", "y"])
def test_what_another_salt_has_left_is_not_read(salt: str) -> None:
    pair = Pair(same(slots=1), slots=1)
    prompt = tuple(range(20))
    pair.add("a", prompt, 6, ownership=Ownership(cache_salt="x"))
    pair.drain()
    before = len(pair.draft.calls)
    pair.add("b", prompt, 6, ownership=Ownership(cache_salt=salt))
    pair.drain()
    read = sum(len(c.token_ids) for c in pair.draft.calls[before:] if c.kind == "prefill")
    assert read == (0 if salt == "x" else 16)  # a part; the rest is few enough to be read with a guess


@pytest.mark.parametrize("salt", ["x", "y"])
def test_what_another_salt_has_left_is_not_read_behind_a_sequence_that_was_not_guessed_for(salt: str) -> None:
    pair = Pair(same(slots=1), slots=1)
    prompt = tuple(range(20))
    pair.add("a", prompt, 6, ownership=Ownership(cache_salt="x"))
    pair.drain()
    pair.add("b", prompt, 1, ownership=Ownership(cache_salt=salt))
    pair.drain()
    before = len(pair.draft.calls)
    last = pair.add("c", prompt, 6, ownership=Ownership(cache_salt=salt))
    pair.drain()
    assert last.cache.reused > 16  # of the second one's
    read = sum(len(c.token_ids) for c in pair.draft.calls[before:] if c.kind == "prefill")
    assert read == (0 if salt == "x" else 16)


def test_answers_to_one_prompt_share_it_in_the_draft() -> None:
    pair = Pair(same())
    shared, prompt = SharedPrompt(), tuple(range(20))
    made = [pair.add(f"r{i}", prompt, 10, shared=shared, temperature=2.0, top_k=12, seed=i) for i in range(3)]
    pair.drain()
    assert all(s.drafts.drafted == s.drafts.accepted > 0 for s in made)


@pytest.mark.parametrize("options", [{}, {"prefix_cache": False}, {"budget": 100}], ids=str)
@pytest.mark.parametrize("seed", range(3))
def test_whatever_comes_and_goes_every_answer_is_its_own(seed: int, options: dict[str, object]) -> None:
    chance = random.Random(seed)
    pair = Pair(same(rule=often_right), **options)  # type: ignore[arg-type]
    added: list[tuple[Sequence, tuple[int, ...], int, bool]] = []
    aborted: set[Sequence] = set()
    for number in range(160):
        if chance.random() < 0.4 and len(pair.engine.live) < 8:
            start = (tuple(range(18)), tuple(range(20, 2, -1)))[chance.randrange(2)]
            prompt = (*start[: chance.randint(1, 18)], chance.randrange(VOCAB))
            count, sampled = chance.randint(1, 20), chance.random() < 0.5
            owner = Ownership(cache_salt=chance.choice("ab"))
            params = SAMPLED if sampled else {}
            sequence = pair.add(f"r{number}", prompt, count, ownership=owner, **params)
            added.append((sequence, prompt, count, sampled))
        if pair.engine.live and chance.random() < 0.08:
            one = chance.choice(sorted(pair.engine.live, key=lambda s: s.request_id))
            pair.engine.abort(one)
            aborted.add(one)
        pair.step()
        pair.check_slots()
    pair.drain()
    pair.check_slots()
    drafted = accepted = 0
    for sequence, prompt, count, sampled in added:
        drafted += sequence.drafts.drafted
        accepted += sequence.drafts.accepted
        if sequence not in aborted:
            assert pair.tokens[sequence] == alone(prompt, count, sampled)
    assert aborted
    assert accepted > drafted / 3 > 20
    assert pair.model.swaps or pair.model.moves


def fail(kind: str, number: int) -> FakeSession:
    seen = itertools.count(1)

    def before(call: Call) -> None:
        if call.kind == kind and next(seen) == number:
            raise ProviderError("out of luck")

    return FakeSession(context=64, vocab_size=VOCAB, before_call=before)


@pytest.mark.parametrize("draft", [fail("decode", 3), fail("prefill", 1)], ids=["guess", "read"])
def test_a_draft_that_fails_ends_no_answer_and_is_told(
    draft: FakeSession, caplog: pytest.LogCaptureFixture
) -> None:
    pair = Pair(draft)
    made = [pair.add(f"r{i}", prompt, 20) for i, prompt in enumerate(PROMPTS)]
    with caplog.at_level(logging.WARNING):
        pair.drain()
    for sequence, prompt in zip(made, PROMPTS, strict=True):
        assert pair.tokens[sequence] == alone(prompt, 20)
    assert [record.message for record in caplog.records] == [
        "the draft model has failed and guesses no more, answers go on: out of luck"
    ]
    later = pair.add("later", PROMPTS[0], 5)
    pair.drain()
    assert later.draft is None
    assert later.drafts.drafted == 0


def test_a_move_that_fails_in_the_draft_is_a_failure_of_it() -> None:
    class Stuck(FakeSession):
        def copy_slot(self, source: int, target: int, tokens: int) -> None:
            raise MemoryError

    pair = Pair(Stuck(context=64, vocab_size=VOCAB))
    first = pair.add("a", tuple(range(20)), 30)
    while len(pair.tokens[first]) < 12:
        pair.step()
    second = pair.add("b", (*range(20), 9), 10)  # starts from what the first one's slot holds
    pair.drain()
    assert pair.tokens[second] == alone((*range(20), 9), 10)
    assert second.draft is None


def test_slots_that_were_not_moved_as_planned_hold_nothing() -> None:
    class Stuck(FakeSession):
        def copy_slot(self, source: int, target: int, tokens: int) -> None:
            raise ProviderError("no copy")

    pair = Pair(same())
    pair.model = Stuck(context=64, vocab_size=VOCAB)
    pair.engine = Engine(pair.model, pair.scheduler, itertools.count().__next__, drafter=pair.drafter)
    first = pair.add("a", tuple(range(20)), 30)
    while len(pair.tokens[first]) < 12:
        pair.step()
    pair.add("b", (*range(20), 9), 10)
    events: list[TokenEvent] = []
    while not any(event.error for event in events):
        events = pair.engine.step()
        if not any(event.error for event in events):
            for event in events:
                pair.tokens[event.sequence] += [event.token_id] if event.token_id is not None else []
    assert all(not slot.tokens for slot in pair.drafter._slots)
    pair.drain()
    assert pair.tokens[first] == alone(tuple(range(20)), 30)


def test_edits_move_what_the_drafter_knows() -> None:
    pair = Pair(same())
    drafter = pair.drafter
    sequence = sequence_of("a", PROMPTS[0], 9)
    sequence.draft = drafter.begin(sequence)
    sequence.token_ids += [5]
    sequence.status = SequenceStatus.DECODE
    drafter.guess(DraftBatch((DraftRow(sequence, 0, 2),)))
    tokens = list(drafter._slots[0].tokens)
    drafter.follow([SlotCopy(0, 2, 5), SlotSwap(0, 1, 3), SlotRelease(1, 7), SlotCopy(3, 0, 4)])
    found = [slot.tokens for slot in drafter._slots]
    assert found == [[], tokens[:7], tokens[:5], []]
    pair.check_slots()


def test_after_a_guess_that_was_right_to_its_end_one_call_reads_and_guesses() -> None:
    pair = Pair(same(), most=3)
    pair.add("a", PROMPTS[0], 30)
    pair.drain()
    kinds = [(call.kind, len(call.token_ids)) for call in pair.draft.calls]
    assert ("verify", 2) in kinds
    assert ("verify", 1) not in kinds
    assert all(count <= FEW for kind, count in kinds if kind == "verify")


def test_warming_up_comes_with_the_next_sequence_and_leaves_nothing() -> None:
    pair = Pair(same())
    pair.drafter.warm_up()
    assert not pair.draft.calls  # the thread that asks is not the one that guesses
    sequence = pair.add("a", PROMPTS[0], 20)
    assert [call.kind for call in pair.draft.calls] == ["prefill", "verify", "decode"]
    pair.add("b", PROMPTS[1], 20)
    assert len(pair.draft.calls) == 3
    pair.drain()
    assert sequence.drafts.accepted == sequence.drafts.drafted > 0


def test_a_draft_that_cannot_be_warmed_up_is_a_failure_of_it() -> None:
    pair = Pair(fail("verify", 1))
    pair.drafter.warm_up()
    sequence = pair.add("a", PROMPTS[0], 20)
    pair.drain()
    assert pair.tokens[sequence] == alone(PROMPTS[0], 20)
    assert sequence.draft is None
    assert str(pair.engine.draft_failure) == "out of luck"


def test_a_context_without_room_for_a_guess_is_not_warmed_up() -> None:
    pair = Pair(same(context=2), context=2, chunk=2)
    pair.drafter.warm_up()
    sequence = pair.add("a", (9,), 1)
    pair.drain()
    assert pair.tokens[sequence] == alone((9,), 1)
    assert not pair.draft.calls


def unread(pair: Pair, sequence: Sequence) -> int:
    """Run to a sequence's first token; return how much of it the draft is taken not to have read."""
    while not pair.tokens[sequence]:
        pair.step()
    assert sequence.draft is not None
    return sequence.draft.behind


def test_what_the_draft_holds_of_a_prompt_already_does_not_count_as_unread() -> None:
    pair = Pair(same(slots=1, context=200), slots=1, context=200)
    prompt = tuple(i % VOCAB for i in range(60))
    assert unread(pair, pair.add("first", prompt, 12)) == 60 + 1
    pair.drain()
    going_on = pair.add("goes on", (*prompt, 30, 31), 12)
    assert unread(pair, going_on) == 62 + 1 - going_on.cache.reused < FEW
    pair.drain()
    assert unread(pair, pair.add("other", tuple(reversed(prompt)), 12)) == 60 + 1


def test_nor_does_a_prompt_that_another_answer_to_it_has_left() -> None:
    pair = Pair(same(slots=1), slots=1)
    shared, prompt = SharedPrompt(), tuple(range(20))
    first, second = (
        pair.add(f"r{i}", prompt, 10, shared=shared, temperature=2.0, top_k=12, seed=i) for i in range(2)
    )
    assert unread(pair, first) == 20 + 1
    assert unread(pair, second) == 1 + 1  # its last token is run anew
    pair.drain()
    assert all(each.drafts.accepted == each.drafts.drafted > 0 for each in (first, second))
