"""A model that is asked many things at once: what evaluations need of it, and one in this process.

``terminal/eval_model.py`` opens the model; ``scores.py`` asks it. A worker elsewhere is in ``remote.py``.
"""

from __future__ import annotations

import contextlib
import queue
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Final, Protocol, TypeAlias

from llorch_serve.calls.interfaces import ClosableGenerator
from llorch_serve.engine.sequence import FinishReason
from llorch_serve.errors import CancelledError, InvalidRequestError
from llorch_serve.requests import (
    Abort,
    ContinuationScore,
    GenerationRequest,
    GenerationUpdate,
    ModelInfo,
    Prompt,
    ScoreRequest,
    TokenPrompt,
    UpdateSink,
)
from llorch_serve.sampling.params import SamplingParams

MOST_WAITING: Final = 512
"""Sequences that wait in the engine's queue at once. A request has at most 256."""

WAVE: Final = 512  # answers that are begun together

Scored: TypeAlias = Sequence[ContinuationScore] | InvalidRequestError
Said: TypeAlias = str | InvalidRequestError


class AskedModel(Protocol):
    """A model, wherever it runs. A request that is refused is a value, as the others go on.

    advance: called once for each request that is done. Other errors are raised, and end what still runs.
    """

    @property
    def info(self) -> ModelInfo:
        """What the model says of itself, as it was when it was opened."""

    def tokenize(self, prompt: Prompt) -> tuple[tuple[int, ...], str]:
        """Return the token ids of a prompt and the text they stand for. Raises InvalidRequestError."""

    def score(self, requests: Sequence[ScoreRequest], advance: Callable[[], None]) -> list[Scored]:
        """Return the scores of each request's continuations, in order."""

    def generate(self, requests: Sequence[GenerationRequest], advance: Callable[[], None]) -> list[Said]:
        """Return the text of each request's first answer, in order."""


class LocalModel:
    """A model in this process that nobody else asks.

    It is deterministic: everything is submitted in order by one thread, and answers begin together, so that
    no step depends on how quickly requests came.
    """

    def __init__(self, generator: ClosableGenerator) -> None:
        self._generator = generator
        self.info = generator.model_info()

    def tokenize(self, prompt: Prompt) -> tuple[tuple[int, ...], str]:
        """Return the token ids of a prompt and the text they stand for."""
        return self._generator.tokenize(prompt)

    def score(self, requests: Sequence[ScoreRequest], advance: Callable[[], None]) -> list[Scored]:
        """Return the scores of each request's continuations, in order."""
        with _ended_together() as live:
            found: list[Scored] = []
            waiting: deque[tuple[_Pending, int]] = deque()
            sequences = 0

            def take() -> int:
                pending, count = waiting.popleft()
                found.append(pending.scores())
                advance()
                return count

            for request in requests:
                count = len(request.continuations)
                while waiting and sequences + count > MOST_WAITING:
                    sequences -= take()
                pending = _Pending(partial(self._generator.submit_score, request))
                live.append(pending)
                waiting.append((pending, count))
                sequences += count
            while waiting:
                take()
        return found

    def generate(self, requests: Sequence[GenerationRequest], advance: Callable[[], None]) -> list[Said]:
        """Return the text of each request's first answer, in order."""
        found: list[Said] = []
        for start in range(0, len(requests), WAVE):
            with _ended_together() as live:
                with self._held():
                    for request in requests[start : start + WAVE]:
                        live.append(_Pending(partial(self._generator.submit, request)))
                for pending in live:
                    found.append(pending.text())
                    advance()
        return found

    @contextlib.contextmanager
    def _held(self) -> Iterator[None]:
        """Keep the engine from its next step until all that is submitted inside has been.

        Which sequences share a step decides the last bits of 4-bit weights, so it must not depend on time.
        """
        held = _HeldSink()
        sampling = SamplingParams(temperature=0, repetition_penalty=1, max_tokens=1, ignore_eos=True)
        self._generator.submit(GenerationRequest("evaluation-holds", TokenPrompt((0,)), sampling), held)
        try:
            yield
        finally:
            held.go.set()


class _HeldSink:
    """Keeps the engine's thread, which no sink of a worker that serves others may do."""

    def __init__(self) -> None:
        self.go = threading.Event()

    def deliver(self, updates: list[GenerationUpdate]) -> None:
        self.go.wait()


class _Pending:
    """A request that has been submitted, or was refused then."""

    def __init__(self, submit: Callable[[UpdateSink], Abort]) -> None:
        self._updates: queue.SimpleQueue[GenerationUpdate] = queue.SimpleQueue()
        self._refused: InvalidRequestError | None = None
        self._abort: Abort | None = None
        self._done = False
        try:
            self._abort = submit(self)
        except InvalidRequestError as error:
            self._refused = error

    def deliver(self, updates: list[GenerationUpdate]) -> None:
        """Take updates, on the engine's thread."""
        for update in updates:
            self._updates.put(update)

    def scores(self) -> Scored:
        """Wait for the end; return the scores in the order of the continuations."""
        if self._refused is not None:
            return self._refused
        found = {update.index: update.score for update in self._all()}
        return [score for _, score in sorted(found.items()) if score is not None]

    def text(self) -> Said:
        """Wait for the end; return the text."""
        if self._refused is not None:
            return self._refused
        return "".join(update.text for update in self._all())

    def end(self) -> None:
        """End the request if it still runs."""
        if self._abort is not None and not self._done:
            self._abort()

    def _all(self) -> Iterator[GenerationUpdate]:
        while not self._done:
            update = self._updates.get()
            self._done = update.is_last
            if update.error is not None:
                raise update.error
            if update.completion is not None and update.completion.reason is FinishReason.CANCELLED:
                raise CancelledError(f"request {update.request_id} was aborted")
            yield update


@contextlib.contextmanager
def _ended_together() -> Iterator[list[_Pending]]:
    """Give a list of requests; those that still run at its end, after an error or Ctrl-C, are ended."""
    live: list[_Pending] = []
    try:
        yield live
    finally:
        for pending in live:
            pending.end()
