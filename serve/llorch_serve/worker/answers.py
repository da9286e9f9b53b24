"""The answers to one request: from token events to updates, their seeds, and with best_of which of them are
returned.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Final

from llorch_serve.engine.sequence import FinishReason, Sequence, TokenEvent
from llorch_serve.requests import Completion, GenerationUpdate, JoinedUpdates, UpdateSink
from llorch_serve.sampling.logprobs import TokenLogprobs, name_tokens
from llorch_serve.sampling.params import MAX_SEED
from llorch_serve.structured.spec import HeldForm
from llorch_serve.text.tokenizer import TextStream, Tokenizer
from llorch_serve.worker.jobs import ended

if TYPE_CHECKING:
    from llorch_serve.chat.parsing.answer import AnswerParser

_SEED_STEP: Final = 0x9E3779B97F4A7C15
"""Odd, so that the seeds of one request differ; 2**64 over the golden ratio, so that they are far from those
of seeds nearby.
"""


def answer_seed(seed: int, index: int) -> int:
    """Return the seed of a request's answer: the request's own for the first, (seed + index * step) mod 2**63
    for others.
    """
    return (seed + index * _SEED_STEP) % (MAX_SEED + 1)


@dataclass(slots=True, eq=False)
class Answer:
    """One answer on its way from token events to updates.

    stream: turns its tokens into text.
    seed: what sampling used.
    opening: text that comes before its own.
    tells_logprobs: whether its tokens' log-probabilities are told, where they are known.
    parser: tells calls and thoughts from its text; None: it is text and nothing else.
    generated: its tokens so far. told: of those, the ones of another process, which count to the prompt here.
    skipped: how many of its first tokens have been told in another process, though they are computed here.
    scored, logprob: tokens whose log-probabilities are known so far, a stop token included, and the sum of
        those.
    begun, ended: its first update has been told, and its last one.
    """

    sequence: Sequence
    stream: TextStream
    tokenizer: Tokenizer
    seed: int
    opening: str = ""
    tells_logprobs: bool = False
    parser: AnswerParser | None = None
    generated: int = field(default=0, init=False)
    told: int = field(default=0, init=False)
    skipped: int = field(default=0, init=False)
    scored: int = field(default=0, init=False)
    logprob: float = field(default=0.0, init=False)
    begun: bool = field(default=False, init=False)
    ended: bool = field(default=False, init=False)

    def go_on(self, told: tuple[int, ...]) -> None:
        """Begin behind tokens that have been told of it in another process."""
        for token_id in told:
            self.translate(TokenEvent(self.sequence, token_id), 1)
        self.told = len(told)

    def tells(self, update: GenerationUpdate) -> bool:
        """Return whether its newest update has not been told in another process."""
        return update.completion is not None or self.generated > self.skipped

    def translate(self, event: TokenEvent, open_answers: int) -> tuple[GenerationUpdate, bool]:
        """Return the update of one event, and whether the text ended the answer: a stop string, or the only
        call that is wanted.

        open_answers: answers of the request that go on, this one included.
        """
        text, matched = "", None
        ids: tuple[int, ...] = ()
        told: tuple[TokenLogprobs, ...] = ()
        stop_logprobs = None
        if event.scores is not None:
            self.scored += 1
            self.logprob += event.scores.logprob
            if self.tells_logprobs:
                place = name_tokens(event.scores, self.tokenizer)
                told, stop_logprobs = ((), place) if event.is_stop_token else ((place,), None)
        if event.token_id is not None and not event.is_stop_token:
            text, matched = self.stream.push(event.token_id)
            ids = (event.token_id,)
            self.generated += 1
        completion = None
        if matched is not None:
            completion = self._completion(FinishReason.STOP, matched)
        elif event.finish is not None:
            text += self.stream.finish()
            stopped_by = event.token_id if event.is_stop_token else None
            stop_text = None if stopped_by is None else self.tokenizer.token_text(stopped_by)
            completion = replace(self._completion(event.finish, stop_text), stop_logprobs=stop_logprobs)
        update = GenerationUpdate(
            event.sequence.request_id,
            text,
            ids,
            completion,
            logprobs=told,
            index=event.sequence.index,
            open_answers=open_answers - (completion is not None),
        )
        if self.parser is not None:
            update = self.parser.parsed(update)
            if self.parser.done and completion is None:
                completion = self._completion(FinishReason.TOOL_CALLS, None)
                update = replace(update, completion=completion, open_answers=open_answers - 1)
        if not self.begun:
            update = self._opened(update)
        self.ended = completion is not None
        return update, self.ended and event.finish is None

    def _completion(self, reason: FinishReason, stop_matched: str | None) -> Completion:
        found = ended(
            self.sequence, reason, stop_matched=stop_matched, generated=self.generated, seed=self.seed
        )
        if not self.told or self.sequence.index:
            return found
        prompt = found.prompt_tokens - self.told  # which the engine takes for a part of it
        return replace(found, prompt_tokens=prompt, cached_tokens=min(found.cached_tokens, prompt))

    def _opened(self, update: GenerationUpdate) -> GenerationUpdate:
        """Return the first update, with what is told once."""
        self.begun = True
        scores = self.sequence.prompt_scores
        told = scores.found if scores is not None and scores.complete else ()
        if not self.opening and not told:
            return update
        return replace(
            update,
            text=self.opening + update.text,
            prompt_logprobs=tuple(name_tokens(place, self.tokenizer) for place in told),
        )


@dataclass(slots=True, eq=False)
class Answers:
    """All answers to one request. Implements :class:`llorch_serve.worker.jobs.Job`.

    members: the answers in the order of their index.
    best: how many are returned where more are generated, by their mean log-probability; None: all, as they
        come.
    form: what each answer is held to.
    held: with ``best``, the updates so far.
    """

    request_id: str
    sink: UpdateSink
    members: tuple[Answer, ...]
    best: int | None = None
    form: HeldForm | None = None
    open: int = field(init=False)
    aborted: bool = field(default=False, init=False)
    _begun: tuple[Answer, ...] = field(init=False)
    _held: dict[int, JoinedUpdates] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        self._begun = tuple(answer for answer in self.members if not answer.ended)
        self.open = len(self._begun)

    @property
    def sequences(self) -> Seq[Sequence]:
        """The sequences of the answers that had not ended elsewhere."""
        return [answer.sequence for answer in self._begun]

    @property
    def needs_model(self) -> bool:
        """Whether there is anything to compute: a token, or the prompt's scores."""
        return any(s.limits.max_new_tokens > 0 or s.prompt_scores is not None for s in self.sequences)

    def take(self, event: TokenEvent) -> tuple[list[GenerationUpdate], bool]:
        """Take an event of one answer; return what is to be told now, and whether a stop string ended the
        answer. The request's last update comes last.
        """
        index = event.sequence.index
        if index >= len(self.members):
            return [], False
        answer = self.members[index]
        if answer.ended or answer.sequence is not event.sequence:
            return [], False
        if event.error is not None:
            return self._fail(event.error, index), False
        try:
            update, stopped = answer.translate(event, self.open)
            self.open = update.open_answers
            if self.best is not None:
                return self._hold(update, self.best), stopped
            return [update] if answer.tells(update) else [], stopped
        except Exception as error:  # noqa: BLE001 - tokenizer or memory: told to the caller, and logged there
            return self._fail(error, index), False

    def _fail(self, error: Exception, index: int) -> list[GenerationUpdate]:
        """End the request with the error of one answer."""
        update = GenerationUpdate(self.request_id, "", (), error=error, index=index, open_answers=self.open)
        self.open = 0
        return [update]

    def _hold(self, update: GenerationUpdate, best: int) -> list[GenerationUpdate]:
        """Keep an update until all answers have ended; then return the best of them."""
        if (held := self._held.get(update.index)) is None:
            self._held[update.index] = JoinedUpdates(update)
        else:
            held.add(update)
        return self._chosen(best) if self.open == 0 else []

    def _chosen(self, count: int) -> list[GenerationUpdate]:
        """Return the best answers, whole, best first. What is counted or told once for the request goes with
        the first.
        """
        whole = {index: updates.joined() for index, updates in self._held.items()}
        first = whole[0]
        assert first.completion is not None
        # Of equals the one with the lower index, since sorting keeps the order.
        ranked = sorted(whole, key=lambda index: (-self._mean(index), index))[:count]
        if any(not _ran_to_its_end(answer) for answer in whole.values()):
            ranked = ranked[:1]  # the request was aborted
        chosen = []
        for place, index in enumerate(ranked):
            answer = whole[index]
            assert answer.completion is not None
            completion = replace(
                answer.completion,
                prompt_tokens=first.completion.prompt_tokens if place == 0 else 0,
                cached_tokens=first.completion.cached_tokens if place == 0 else 0,
            )
            chosen.append(
                replace(
                    answer,
                    completion=completion,
                    index=place,
                    open_answers=len(ranked) - place - 1,
                    prompt_logprobs=first.prompt_logprobs if place == 0 else (),
                )
            )
        return chosen

    def _mean(self, index: int) -> float:
        answer = self.members[index]
        return answer.logprob / answer.scored if answer.scored else 0.0


def _ran_to_its_end(answer: GenerationUpdate) -> bool:
    return answer.completion is not None and answer.completion.reason is not FinishReason.CANCELLED
