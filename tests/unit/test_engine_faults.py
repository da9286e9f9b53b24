"""An engine whose every move of a slot and every call may fail half done: whoever is not told so gets exactly
its own answer, everyone ends once, and nothing is left behind.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest

from llorch_serve.engine.engine import Engine
from llorch_serve.engine.scheduler import Scheduler, SchedulerConfig
from llorch_serve.engine.sequence import FinishReason, Ownership, Sequence
from llorch_serve.engine.shared_prompt import SharedPrompt
from llorch_serve.errors import NonFiniteLogitsError, ProviderError, QueueFullError, ResourceError
from llorch_serve.sampling.logprobs import score_token
from llorch_serve.sampling.prompt_scores import PromptScores
from support.fakes.session import FakeSession, continuation, next_logits, sequence_of

VOCAB = 24
CONTEXT = 40
GARBAGE = b"garbage!"
FAULTS = (ProviderError("lost"), ResourceError("full"), MemoryError("none"), NonFiniteLogitsError("nan"))


class FaultySession(FakeSession):
    """Fails with a probability, and leaves garbage in what it was to change."""

    chance: Any = None
    share = 0.0

    def _fails(self) -> bool:
        return self.chance is not None and self.chance.random() < self.share

    def _spoil(self, slot: int, start: int, end: int) -> None:
        for position in range(start, self.chance.randint(start, end)):
            self._cache[slot][position] = GARBAGE

    def prefill(self, slot: int, token_ids: Any, start: int, wanted: Any = None) -> Any:
        return self._chunked(
            slot, token_ids, start, lambda: super(FaultySession, self).prefill(slot, token_ids, start, wanted)
        )

    def verify(self, slot: int, token_ids: Any, start: int) -> Any:
        return self._chunked(
            slot, token_ids, start, lambda: super(FaultySession, self).verify(slot, token_ids, start)
        )

    def _chunked(self, slot: int, token_ids: Any, start: int, run: Callable[[], Any]) -> Any:
        if self._fails():
            self._spoil(slot, start, start + len(token_ids))
            raise self.chance.choice(FAULTS)
        return run()

    def decode(self, token_ids: Any, lengths: Any) -> Any:
        if self._fails():
            for slot, length in enumerate(lengths):
                self._spoil(slot, length - 1, length)
            raise self.chance.choice(FAULTS)
        return super().decode(token_ids, lengths)

    def copy_slot(self, source: int, target: int, tokens: int) -> None:
        if self._fails():
            self._spoil(target, 0, tokens)
            raise self.chance.choice(FAULTS[:3])
        super().copy_slot(source, target, tokens)

    def swap_slots(self, first: int, second: int, tokens: int) -> None:
        if self._fails():
            self._spoil(first, 0, tokens)
            self._spoil(second, 0, tokens)
            raise self.chance.choice(FAULTS[:3])
        super().swap_slots(first, second, tokens)

    def release_slot(self, slot: int, keep: int) -> None:
        if self._fails():
            raise self.chance.choice(FAULTS[:3])
        super().release_slot(slot, keep)


@dataclass
class Play:
    """One run of an engine with random work. ended: how often each sequence was told its end."""

    seed: int
    options: dict[str, Any]
    session: FaultySession = field(init=False)
    ended: Counter[Sequence] = field(default_factory=Counter)
    whole: set[Sequence] = field(default_factory=set)
    added: list[Sequence] = field(default_factory=list)
    aborted: set[Sequence] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.chance = random.Random(self.seed)
        self.session = FaultySession(slots=4, context=CONTEXT, vocab_size=VOCAB)
        self.session.chance = self.chance
        self.scheduler = Scheduler(
            SchedulerConfig(
                slots=4, budget=100, prefill_chunk=5, max_waiting=12, shortest_reuse=2, **self.options
            )
        )
        self.engine = Engine(self.session, self.scheduler)

    def step(self) -> None:
        for event in self.engine.step():
            if event.finish is not None or event.error is not None:
                self.ended[event.sequence] += 1
            if event.finish in (FinishReason.LENGTH, FinishReason.STOP):
                self.whole.add(event.sequence)

    def add(self, name: str) -> None:
        start = [tuple(range(18)), tuple(range(20, 2, -1))][self.chance.randrange(2)]
        prompt = start[: self.chance.randint(1, 18)] + tuple(
            self.chance.randrange(VOCAB) for _ in range(self.chance.randint(0, 4))
        )
        who = self.chance.choice("ab")
        ownership = Ownership(who, who, self.chance.randint(-1, 1))
        made: dict[str, Any] = {"ownership": ownership}
        if len(prompt) > 1 and self.chance.random() < 0.2:
            scores = PromptScores(prompt, self.chance.randint(1, len(prompt) - 1), 1, None)
            sequences = [sequence_of(name, prompt[:-1], 0, prompt_scores=scores, **made)]
        else:
            count, lookup = self.chance.randint(1, 12), self.chance.choice((0, 0, 3))
            shared = SharedPrompt() if self.chance.random() < 0.3 else None
            sequences = [
                sequence_of(name, prompt, count, shared=shared, lookup=lookup, **made)
                for _ in range(1 if shared is None else 3)
            ]
        try:
            self.engine.add(*sequences)
        except QueueFullError:
            return
        self.added += sequences

    def run(self, steps: int) -> None:
        for number in range(steps):
            if self.chance.random() < 0.4:
                self.add(f"r{number}")
            if self.engine.live and self.chance.random() < 0.1:
                one = self.chance.choice([each for each in self.added if each in self.engine.live])
                assert self.engine.abort(one)
                self.aborted.add(one)
            self.step()
        self.session.share = 0.0
        for _ in range(2000):
            if not self.engine.live:
                return
            self.step()
        raise AssertionError("some never ended")

    def check(self) -> None:
        assert self.ended == Counter(each for each in self.added if each not in self.aborted)
        for sequence in self.whole:
            prompt = sequence.token_ids[: sequence.prompt_length]
            if sequence.prompt_scores is None:
                wanted = continuation(prompt, sequence.limits.max_new_tokens, VOCAB)
                assert sequence.token_ids[sequence.prompt_length :] == wanted
                continue
            scores = sequence.prompt_scores
            tokens = list(scores.tokens)
            assert scores.found == [
                score_token(next_logits(tokens[:place], VOCAB), tokens[place], top=1)
                for place in range(scores.first, len(tokens))
            ]
        assert (self.scheduler.running, self.scheduler.waiting) == (0, 0)
        assert self.scheduler._waiting._clients == {}
        assert all(each.cache.slot is None for each in self.added)


OPTIONS: list[dict[str, Any]] = [{}, {"strict_reuse": True}, {"prefix_cache": False}]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("seed", range(3))
def test_whatever_fails_half_done_others_get_their_own_answers(seed: int, options: dict[str, Any]) -> None:
    play = Play(seed, options)
    play.session.share = 0.08
    play.run(250)
    play.check()
    assert 0 < len(play.whole) < len(play.added) - len(play.aborted)
    failed = len(play.added) - len(play.aborted) - len(play.whole)
    play.run(100)  # no more faults: whatever is left of them in the cache is not used
    play.check()
    assert len(play.added) - len(play.aborted) - len(play.whole) == failed
