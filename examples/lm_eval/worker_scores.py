"""What an evaluation asks of a worker: log-likelihoods of continuations and of whole texts, and generated
text.

``llorch_lm.py`` gives these methods to lm-eval; nothing here needs lm-eval. Pairs that follow each other with
the same context, as the choices of a question do, go in one call, so that the worker computes the context
once.
"""

from __future__ import annotations

import itertools
import os
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TypeVar

from llorch_serve.client.blocking import WorkerClient
from llorch_serve.client.channel import PLAIN, Access
from llorch_serve.requests import GenerationRequest, Prompt, ScoreRequest, TextPrompt, TokenPrompt
from llorch_serve.sampling.params import SamplingParams
from llorch_serve.terminal.access import TOKEN_VARIABLE, read_access
from llorch_serve.worker.scoring import MAX_CONTINUATIONS

CALLS_AT_ONCE: Final = 8

T = TypeVar("T")
R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class Window:
    """Part of a text: tokens to predict, and those that they are predicted from; none where the text
    begins.
    """

    context: tuple[int, ...]
    tokens: tuple[int, ...]


class WorkerScores:
    """Asks the worker at an address. Use it as a context manager, or call :meth:`close`."""

    def __init__(self, address: str, access: Access = PLAIN, *, wait_s: float = 60) -> None:
        self._client = WorkerClient(address, access)
        self._client.wait_until_ready(wait_s)
        self.info = self._client.model_info()

    def close(self) -> None:
        """End the connection."""
        self._client.close()

    def log_likelihoods(self, pairs: Sequence[tuple[str, str]]) -> list[tuple[float, bool]]:
        """Return for each context and continuation the log-likelihood, and whether greedy decoding says the
        same.
        """
        scored = self._each(self._score, list(grouped(pairs)))
        return [pair for group in scored for pair in group]

    def whole_text(self, text: str) -> float:
        """Return the log-likelihood of a text, in windows as long as the worker's context."""
        token_ids, _ = self._client.tokenize(TextPrompt(text))
        parts = windows(token_ids, self.info.context_length)
        # The worker puts BOS, or EOS, where a context has no tokens.
        return sum(self._ask(TokenPrompt(part.context), [TokenPrompt(part.tokens)])[0][0] for part in parts)

    def whole_texts(self, texts: Sequence[str]) -> list[float]:
        """Return the log-likelihood of each text."""
        return self._each(self.whole_text, texts)

    def continue_texts(self, requests: Sequence[tuple[str, SamplingParams]]) -> list[str]:
        """Return what the model says after each text."""
        return self._each(lambda request: self._generate(*request), requests)

    def _generate(self, text: str, sampling: SamplingParams) -> str:
        request = GenerationRequest(uuid.uuid4().hex, TextPrompt(text), sampling)
        [answer] = self._client.complete(request)
        return answer.text

    def _score(self, group: tuple[str, list[str]]) -> list[tuple[float, bool]]:
        context, continuations = group
        return self._ask(TextPrompt(context), [TextPrompt(text) for text in continuations])

    def _ask(
        self, context: Prompt, continuations: Sequence[TextPrompt | TokenPrompt]
    ) -> list[tuple[float, bool]]:
        request = ScoreRequest(uuid.uuid4().hex, context, tuple(continuations))
        return [(score.logprob, score.is_greedy) for score in self._client.score(request)]

    @staticmethod
    def _each(ask: Callable[[T], R], items: Sequence[T]) -> list[R]:
        with ThreadPoolExecutor(CALLS_AT_ONCE) as pool:
            return list(pool.map(ask, items))


def find_access(tls_ca: str | None = None, tls_cert: str | None = None, tls_key: str | None = None) -> Access:
    """Return how to reach the worker: with the token in LLORCH_API_TOKEN, if there is one, and with TLS if
    files are named.

    tls_ca, tls_cert, tls_key: PEM files, as of ``llorch score --connect``. Raises UsageError for files or a
        token that cannot be used.
    """
    files = (None if name is None else Path(name) for name in (tls_ca, tls_cert, tls_key))
    return read_access(os.environ.get(TOKEN_VARIABLE) or None, *files)


def grouped(pairs: Iterable[tuple[str, str]]) -> Iterator[tuple[str, list[str]]]:
    """Yield each context with the continuations that follow each other with it, as many as one call takes."""
    for context, group in itertools.groupby(pairs, key=lambda pair: pair[0]):
        texts = [text for _, text in group]
        for start in range(0, len(texts), MAX_CONTINUATIONS):
            yield context, texts[start : start + MAX_CONTINUATIONS]


def windows(token_ids: Sequence[int], length: int) -> Iterator[Window]:
    """Cut a text so that every token is predicted once, from as many tokens as ``length`` allows.

    The first window has no context; of each later one, at least one token is context, and the last one has
    more.
    """
    end = min(length, len(token_ids))
    if end:
        yield Window((), tuple(token_ids[:end]))
    while end < len(token_ids):
        begin, end = end, min(end + length, len(token_ids))
        yield Window(tuple(token_ids[end - length - 1 : begin]), tuple(token_ids[begin:end]))
