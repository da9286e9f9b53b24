"""A worker in this process, used like one behind a network: :class:`LocalClient` is the counterpart of
:class:`llorch_serve.client.blocking.WorkerClient`.
"""

from __future__ import annotations

import queue
from collections.abc import Callable, Generator, Iterable, Sequence

from llorch_serve.calls.interfaces import ClosableGenerator
from llorch_serve.engine.sequence import FinishReason
from llorch_serve.errors import CancelledError
from llorch_serve.requests import (
    Abort,
    ContinuationScore,
    EmbedRequest,
    GenerationRequest,
    GenerationUpdate,
    JoinedUpdates,
    ModelInfo,
    Prompt,
    ScoreRequest,
    TextEmbedding,
    TextGenerator,
    UpdateSink,
)


class LocalClient:
    """A generator with the methods of a client. Threads may share it."""

    def __init__(self, generator: ClosableGenerator) -> None:
        self._generator = generator

    def close(self) -> None:
        """End what still runs, and free the model."""
        self._generator.close()

    def generate(self, request: GenerationRequest) -> Generator[GenerationUpdate, None, None]:
        """Return the updates of a request as they come; see :func:`stream`."""
        return stream(self._generator, request)

    def complete(self, request: GenerationRequest) -> list[GenerationUpdate]:
        """Return the whole answers of a request in the order of their index."""
        return whole_answers(stream(self._generator, request))

    def score(self, request: ScoreRequest) -> list[ContinuationScore]:
        """Return the scores of a request; see :func:`score`."""
        return score(self._generator, request)

    def embed(self, request: EmbedRequest) -> list[TextEmbedding]:
        """Return the vectors of a request; see :func:`embed`."""
        return embed(self._generator, request)

    def tokenize(self, prompt: Prompt) -> tuple[tuple[int, ...], str]:
        """Return the token ids of a prompt and the text they stand for."""
        return self._generator.tokenize(prompt)

    def detokenize(self, token_ids: tuple[int, ...], *, keep_special_tokens: bool = False) -> str:
        """Return the text of token ids."""
        return self._generator.detokenize(token_ids, keep_special_tokens=keep_special_tokens)

    def model_info(self) -> ModelInfo:
        """Return what the model says of itself."""
        return self._generator.model_info()


def whole_answers(updates: Iterable[GenerationUpdate]) -> list[GenerationUpdate]:
    """Return all updates of a request joined, one for each of its answers in the order of their index."""
    found: dict[int, JoinedUpdates] = {}
    for update in updates:
        if (parts := found.get(update.index)) is None:
            found[update.index] = JoinedUpdates(update)
        else:
            parts.add(update)
    return [found[index].joined() for index in sorted(found)]


class _QueueSink:
    def __init__(self) -> None:
        self.updates: queue.SimpleQueue[GenerationUpdate] = queue.SimpleQueue()

    def deliver(self, updates: list[GenerationUpdate]) -> None:
        for update in updates:
            self.updates.put(update)


def stream(generator: TextGenerator, request: GenerationRequest) -> Generator[GenerationUpdate, None, None]:
    """Submit a request and yield its updates; leaving the loop early aborts it.

    Raises what ``submit`` raises, the request's own error, or CancelledError.
    """
    return _updates(request.request_id, lambda sink: generator.submit(request, sink))


def run_together(generator: TextGenerator, requests: Sequence[GenerationRequest]) -> None:
    """Submit requests before any of them is waited for, and return when all have ended.

    Raises what ``submit`` raises, or the first error of a request.
    """
    sink = _QueueSink()
    for request in requests:
        generator.submit(request, sink)
    waiting = len(requests)
    while waiting:
        update = sink.updates.get()
        waiting -= update.is_last
        if update.error is not None:
            raise update.error


def score(generator: TextGenerator, request: ScoreRequest) -> list[ContinuationScore]:
    """Return the scores of a request in the order of its continuations.

    Raises what ``submit_score`` raises, the request's own error, or CancelledError.
    """
    updates = _updates(request.request_id, lambda sink: generator.submit_score(request, sink))
    found = {update.index: update.score for update in updates}
    return [score for _, score in sorted(found.items()) if score is not None]


def embed(generator: TextGenerator, request: EmbedRequest) -> list[TextEmbedding]:
    """Return the vectors of a request in the order of its texts.

    Raises what ``submit_embedding`` raises, the request's own error, or CancelledError.
    """
    updates = _updates(request.request_id, lambda sink: generator.submit_embedding(request, sink))
    found = {update.index: update.embedding for update in updates}
    return [embedding for _, embedding in sorted(found.items()) if embedding is not None]


def _updates(
    request_id: str, submit: Callable[[UpdateSink], Abort]
) -> Generator[GenerationUpdate, None, None]:
    sink = _QueueSink()
    abort = submit(sink)
    done = False
    try:
        while not done:
            update = sink.updates.get()
            done = update.is_last
            if update.error is not None:
                raise update.error
            if update.completion is not None and update.completion.reason is FinishReason.CANCELLED:
                raise CancelledError(f"request {request_id} was aborted")
            yield update
    finally:
        if not done:
            abort()
