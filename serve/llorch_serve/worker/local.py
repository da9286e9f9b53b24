"""A worker in this process, used like one behind a network: the counterpart of
:class:`llorch_serve.client.blocking.WorkerClient`.
"""

from __future__ import annotations

import queue
from collections.abc import Callable, Iterator

from llorch_serve.engine.sequence import FinishReason
from llorch_serve.errors import CancelledError
from llorch_serve.requests import (
    Abort,
    ContinuationScore,
    GenerationRequest,
    GenerationUpdate,
    ScoreRequest,
    TextGenerator,
    UpdateSink,
)


class _QueueSink:
    def __init__(self) -> None:
        self.updates: queue.SimpleQueue[GenerationUpdate] = queue.SimpleQueue()

    def deliver(self, updates: list[GenerationUpdate]) -> None:
        for update in updates:
            self.updates.put(update)


def stream(generator: TextGenerator, request: GenerationRequest) -> Iterator[GenerationUpdate]:
    """Submit a request and yield its updates; leaving the loop early aborts it.

    Raises what ``submit`` raises, the request's own error, or CancelledError.
    """
    return _updates(request.request_id, lambda sink: generator.submit(request, sink))


def score(generator: TextGenerator, request: ScoreRequest) -> list[ContinuationScore]:
    """Return the scores of a request in the order of its continuations.

    Raises what ``submit_score`` raises, the request's own error, or CancelledError.
    """
    updates = _updates(request.request_id, lambda sink: generator.submit_score(request, sink))
    found = {update.index: update.score for update in updates}
    return [score for _, score in sorted(found.items()) if score is not None]


def _updates(request_id: str, submit: Callable[[UpdateSink], Abort]) -> Iterator[GenerationUpdate]:
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
