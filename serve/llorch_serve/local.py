"""A worker in this process, used like one behind a network: the counterpart of :class:`llorch_serve.client.WorkerClient`."""

from __future__ import annotations

import queue
from collections.abc import Iterator

from llorch_serve.errors import CancelledError
from llorch_serve.requests import GenerationRequest, GenerationUpdate, TextGenerator
from llorch_serve.sequence import FinishReason


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
    sink = _QueueSink()
    generator.submit(request, sink)
    done = False
    try:
        while not done:
            update = sink.updates.get()
            done = update.is_last
            if update.error is not None:
                raise update.error
            if update.completion is not None and update.completion.reason is FinishReason.CANCELLED:
                raise CancelledError(f"request {request.request_id} was aborted")
            yield update
    finally:
        if not done:
            generator.abort(request.request_id)
