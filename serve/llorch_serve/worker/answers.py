"""The answers to one request: from token events to updates, their seeds, and with best_of which of them are
returned.

The intake makes an :class:`Answers` for each request, with one :class:`Answer` for each of its sequences;
``live_requests.py`` puts every event of theirs through :meth:`Answers.take` on the engine's thread. What
comes back goes to the request's sink.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Final, Protocol

from llorch_serve.chat.parsing.answer import AnswerParser
from llorch_serve.engine.sequence import FinishReason, Sequence, TokenEvent
from llorch_serve.requests import Completion, GenerationUpdate, JoinedUpdates, Timings, UpdateSink
from llorch_serve.sampling.logprobs import TokenLogprobs, name_tokens
from llorch_serve.sampling.params import MAX_SEED
from llorch_serve.text.tokenizer import TextStream, Tokenizer

_SEED_STEP: Final = 0x9E3779B97F4A7C15
"""Odd, so that the seeds of one request differ; 2**64 over the golden ratio, so that they are far from those
of seeds nearby.
"""


def answer_seed(seed: int, index: int) -> int:
    """Return the seed of a request's answer: the request's own for the first, (seed + index * step) mod 2**63
    for others.
    """
    return (seed + index * _SEED_STEP) % (MAX_SEED + 1)


class PromptReport(Protocol):
    """What a prompt's own scores are for: the answer's :class:`llorch_serve.worker.scoring.PromptLogprobs`,
    or a score itself.
    """

    def told(self, update: GenerationUpdate, sequence: Sequence, tokenizer: Tokenizer) -> GenerationUpdate:
        """Return the first update of an answer with what the scores say; all of them have been found."""


@dataclass(slots=True, eq=False)
class Answer:
    """One answer on its way from token events to updates.

    stream: turns its tokens into text. opening: text that comes before its own.
    tells_logprobs: whether its tokens' log-probabilities are told, where they are known.
    report: what the prompt's scores are for; None: there are none.
    parser: tells calls and thoughts from its text; None: it is text and nothing else.
    generated: its tokens so far. A sequence may have more: guesses that were right go beyond a stop string.
    drawn, logprob: tokens whose log-probabilities are known so far, a stop token included, and the sum of
        those.
    """

    request_id: str
    index: int
    sequence: Sequence
    stream: TextStream
    seed: int = 0
    opening: str = ""
    tells_logprobs: bool = False
    report: PromptReport | None = None
    parser: AnswerParser | None = None
    generated: int = 0
    drawn: int = 0
    logprob: float = 0.0

    def translate(self, event: TokenEvent, tokenizer: Tokenizer) -> tuple[GenerationUpdate, bool]:
        """Return the update of one event, and whether a stop string ended the answer."""
        if event.error is not None:
            return GenerationUpdate(self.request_id, "", (), error=event.error, index=self.index), False
        text, matched = "", None
        ids: tuple[int, ...] = ()
        told: tuple[TokenLogprobs, ...] = ()
        if event.scores is not None:
            self.drawn += 1
            self.logprob += event.scores.logprob
        if event.token_id is not None and not event.is_stop_token:
            text, matched = self.stream.push(event.token_id)
            ids = (event.token_id,)
            self.generated += 1
            if event.scores is not None and self.tells_logprobs:
                told = (name_tokens(event.scores, tokenizer),)
        completion = None
        if matched is not None:
            completion = self.completion(FinishReason.STOP, matched)
        elif event.finish is not None:
            text += self.stream.finish()
            stop_text = None
            if event.is_stop_token and event.token_id is not None:
                stop_text = tokenizer.token_text(event.token_id)
            completion = self.completion(event.finish, stop_text)
        update = GenerationUpdate(self.request_id, text, ids, completion, logprobs=told, index=self.index)
        if self.parser is not None:
            update = self.parser.parsed(update)
        return self._opened(update, tokenizer), matched is not None

    def completion(self, reason: FinishReason, stop_matched: str | None) -> Completion:
        """Return how the answer ended, with the figures of its sequence."""
        s = self.sequence
        started = s.submitted_at if s.started_at is None else s.started_at
        first = started if s.first_token_at is None else s.first_token_at
        last = first if s.last_token_at is None else s.last_token_at
        return Completion(
            reason=reason,
            stop_matched=stop_matched,
            prompt_tokens=s.prompt_length if self.index == 0 else 0,
            generated_tokens=self.generated,
            cached_tokens=s.cached_tokens if self.index == 0 else 0,
            drafted_tokens=s.drafted,
            accepted_tokens=s.accepted,
            seed=self.seed,
            timings=Timings(
                queue_s=started - s.submitted_at, prefill_s=first - started, decode_s=last - first
            ),
        )

    def _opened(self, update: GenerationUpdate, tokenizer: Tokenizer) -> GenerationUpdate:
        """Return the update, with what is told once: by the first one."""
        if not self.opening and self.report is None:
            return update
        report, scores = self.report, self.sequence.prompt_scores
        update = replace(update, text=self.opening + update.text)
        self.opening, self.report = "", None
        if report is None or scores is None or not scores.complete:
            return update
        return report.told(update, self.sequence, tokenizer)


@dataclass(slots=True, eq=False)
class Answers:
    """All answers to one request, or the scores of one.

    members: the answers in the order of their index.
    best: how many are returned where more are generated, by their mean log-probability; None: all, as they
        come.
    aborted: it need not be waited for. open: how many go on. held: with ``best``, the updates so far.
    """

    request_id: str
    sink: UpdateSink
    members: list[Answer]
    best: int | None = None
    aborted: bool = False
    open: int = field(init=False)
    _held: dict[int, JoinedUpdates] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.open = len(self.members)

    @property
    def sequences(self) -> list[Sequence]:
        """The answers' sequences."""
        return [answer.sequence for answer in self.members]

    def take(self, update: GenerationUpdate) -> list[GenerationUpdate]:
        """Count an update of one answer; return what is to be told now. The request's last update comes
        last.
        """
        self.open -= update.completion is not None
        update = replace(update, open_answers=self.open)
        if self.best is None or update.error is not None:
            return [update]
        if (held := self._held.get(update.index)) is None:
            self._held[update.index] = JoinedUpdates(update)
        else:
            held.add(update)
        return self._chosen(self.best) if self.open == 0 else []

    def _chosen(self, count: int) -> list[GenerationUpdate]:
        """Return the best answers, whole, best first. What is counted or told once for the request goes with
        the first.
        """
        whole = {index: updates.joined() for index, updates in self._held.items()}
        first = whole[0]
        assert first.completion is not None
        # Of equals the one with the lower index, since sorting keeps the order.
        ranked = sorted(whole, key=lambda index: (-self._mean(index), index))[:count]
        if any(not self._ended(answer) for answer in whole.values()):
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
        return answer.logprob / answer.drawn if answer.drawn else 0.0

    @staticmethod
    def _ended(answer: GenerationUpdate) -> bool:
        return answer.completion is not None and answer.completion.reason is not FinishReason.CANCELLED
