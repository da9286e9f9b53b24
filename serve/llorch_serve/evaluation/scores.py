"""What an evaluation asks of a model: log-likelihoods of continuations and of whole texts, and answers.

lm-eval's tasks ask by ``lm.py``, texts by ``perplexity.py``; nothing here needs lm-eval. The choices of a
question go in one request, so that the model computes what they share once.
"""

from __future__ import annotations

import hashlib
import itertools
import secrets
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Final, TypeAlias

from llorch_serve.errors import InvalidRequestError, LlorchError
from llorch_serve.evaluation.asking import AskedModel
from llorch_serve.evaluation.windows import own_tokens, pieces, windows
from llorch_serve.requests import ContinuationScore, GenerationRequest, ScoreRequest, TextPrompt, TokenPrompt
from llorch_serve.sampling.params import SamplingParams
from llorch_serve.worker.scoring import MAX_CONTINUATIONS

MAX_STOPS: Final = 16  # that a request may have

Progress: TypeAlias = Callable[[str, int], AbstractContextManager[Callable[[], None]]]
"""From a phase and its number of steps to what counts one of them, as ``console.step_progress``."""


@dataclass(slots=True)
class Cut:
    """How many requests were longer than the model's context, and lost their beginning."""

    scored: int = 0
    generated: int = 0


class ModelScores:
    """Asks a model. Raises the model's own errors for what it refuses.

    cut: counts what was shortened so far.
    """

    def __init__(self, model: AskedModel, progress: Progress) -> None:
        self.model = model
        self.info = model.info
        self.cut = Cut()
        self._progress = progress
        # Others may ask the same worker.
        self._ids = (f"eval-{run}-{number}" for run in [secrets.token_hex(4)] for number in itertools.count())

    def log_likelihoods(self, pairs: Sequence[tuple[str, str]]) -> list[tuple[float, bool]]:
        """Return for each context and continuation the log-likelihood, and whether greedy decoding says the
        same.

        A pair that is longer than the model's context loses the beginning of its context, as in lm-eval.
        """
        groups = list(grouped(pairs))
        requests = [
            self._score_request(TextPrompt(context), tuple(map(TextPrompt, texts)))
            for context, texts in groups
        ]
        with self._progress("scoring", len(requests)) as advance:
            found = self.model.score(requests, advance)
        scores: list[ContinuationScore] = []
        for (context, texts), answer in zip(groups, found, strict=True):
            scores += self._shortened(context, texts) if isinstance(answer, InvalidRequestError) else answer
        return [(score.logprob, score.is_greedy) for score in scores]

    def token_logprobs(self, token_ids: Sequence[int], window: int, stride: int) -> list[float]:
        """Return the log-probability of each token of a text: see
        :func:`llorch_serve.evaluation.windows.windows`.
        """
        parts = list(windows(token_ids, window, stride))
        requests = [
            # Where a context has no tokens, the worker puts BOS, or EOS.
            replace(self._score_request(TokenPrompt(part.context), (TokenPrompt(part.tokens),)), logprobs=0)
            for part in parts
        ]
        with self._progress("reading", len(requests)) as advance:
            found = self.model.score(requests, advance)
        return [place.chosen.logprob for [score] in map(_accepted, found) for place in score.logprobs]

    def whole_texts(self, texts: Sequence[str]) -> list[float]:
        """Return the log-likelihood of each text, in windows as long as the model's context, as lm-eval does
        it: with what the tokenizer itself puts before a text.
        """
        requests: list[ScoreRequest] = []
        owners: list[int] = []
        for index, text in enumerate(texts):
            ids = self.tokens(text, whole=True)
            for part in windows(ids, self.info.context_length, self.info.context_length):
                requests.append(self._score_request(TokenPrompt(part.context), (TokenPrompt(part.tokens),)))
                owners.append(index)
        with self._progress("reading", len(requests)) as advance:
            found = self.model.score(requests, advance)
        sums = [0.0] * len(texts)
        for owner, [score] in zip(owners, map(_accepted, found), strict=True):
            sums[owner] += score.logprob
        return sums

    def continue_texts(self, requests: Sequence[tuple[str, SamplingParams]]) -> list[str]:
        """Return what the model says after each text, up to the first of its stop strings.

        What is drawn is drawn with a seed of the request's place and text. A text that leaves no room for
        the answer loses its beginning, as in lm-eval.
        """
        asked = [
            self._generation(self._with_room(text, sampling), _seeded(sampling, place, text))
            for place, (text, sampling) in enumerate(requests)
        ]
        with self._progress("generating", len(asked)) as advance:
            found = self.model.generate(asked, advance)
        texts = []
        for (_, sampling), said in zip(requests, found, strict=True):
            if isinstance(said, InvalidRequestError):
                raise said
            texts.append(cut_at(said, sampling.stop))
        return texts

    def tokens(self, text: str, *, whole: bool = False) -> tuple[int, ...]:
        """Return a text's tokens; long ones are encoded in pieces that end with lines.

        whole: with what the tokenizer puts around a text; else only those that stand for it.
        """
        found: list[int] = []
        around = self.model.tokenize(TextPrompt(""))[0]
        for place, piece in enumerate(pieces(text)):
            ids, _ = self.model.tokenize(TextPrompt(piece))
            found += ids if whole and place == 0 else own_tokens(ids, around)
        return tuple(found)

    def _shortened(self, context: str, texts: Sequence[str]) -> Iterator[ContinuationScore]:
        """Score continuations whose context is too long, each behind as much of its end as there is room."""
        stripped = context.rstrip()
        most = self.info.context_length + 1
        before = self.model.tokenize(TextPrompt(stripped))[0]
        requests = []
        for text in texts:
            both = self.model.tokenize(TextPrompt(context + text))[0]
            after = both[len(before) :][-(most - 1) :]
            if len(before) + len(after) > most:
                self.cut.scored += 1
            kept = (before + after)[-most:]
            split = len(kept) - len(after)
            requests.append(self._score_request(TokenPrompt(kept[:split]), (TokenPrompt(kept[split:]),)))
        for [score] in map(_accepted, self.model.score(requests, _uncounted)):
            yield score

    def _with_room(self, text: str, sampling: SamplingParams) -> TextPrompt | TokenPrompt:
        """Return a text, or the end of its tokens, so that the longest answer fits behind it."""
        context = self.info.context_length
        room = max(1, context - (sampling.max_tokens or 0))
        if len(text.encode("utf-8", "surrogatepass")) < room:  # a token has at least one byte
            return TextPrompt(text)
        ids = self.model.tokenize(TextPrompt(text))[0]
        if len(ids) <= room:
            return TextPrompt(text)
        self.cut.generated += 1
        return TokenPrompt(ids[-room:])

    def _score_request(
        self, context: TextPrompt | TokenPrompt, continuations: tuple[TextPrompt | TokenPrompt, ...]
    ) -> ScoreRequest:
        return ScoreRequest(self._id(), context, continuations, fingerprint=self.info.fingerprint)

    def _generation(self, prompt: TextPrompt | TokenPrompt, sampling: SamplingParams) -> GenerationRequest:
        return GenerationRequest(self._id(), prompt, sampling, fingerprint=self.info.fingerprint)

    def _id(self) -> str:
        return next(self._ids)


def grouped(pairs: Iterable[tuple[str, str]]) -> Iterator[tuple[str, list[str]]]:
    """Yield each context with the continuations that follow each other with it, as many as one call takes."""
    for context, group in itertools.groupby(pairs, key=lambda pair: pair[0]):
        texts = [text for _, text in group]
        for start in range(0, len(texts), MAX_CONTINUATIONS):
            yield context, texts[start : start + MAX_CONTINUATIONS]


def cut_at(text: str, stops: Iterable[str]) -> str:
    """Return a text up to the first place of any stop string."""
    places = [place for stop in stops if (place := text.find(stop)) >= 0]
    return text[: min(places)] if places else text


def _seeded(sampling: SamplingParams, place: int, text: str) -> SamplingParams:
    """Return what a request asks for: no more stop strings than it may have, and a seed if it draws."""
    asked = replace(sampling, stop=sampling.stop[:MAX_STOPS])
    if sampling.temperature == 0 or sampling.seed is not None:
        return asked
    digest = hashlib.sha256(f"{place}:{text}".encode("utf-8", "surrogatepass")).digest()
    return replace(asked, seed=int.from_bytes(digest[:7], "little"))


def _accepted(
    answer: Sequence[ContinuationScore] | InvalidRequestError,
) -> Sequence[ContinuationScore]:
    if isinstance(answer, LlorchError):
        raise answer
    return answer


def _uncounted() -> None:
    """Count nothing: the requests have been counted when they were refused."""
