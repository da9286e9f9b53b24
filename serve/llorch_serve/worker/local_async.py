"""A worker in this process for an event loop: the counterpart of
:class:`llorch_serve.client.asynchronous.AsyncWorkerClient`.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing

from llorch_serve.calls.interfaces import ClosableGenerator
from llorch_serve.engine.sequence import FinishReason
from llorch_serve.errors import CancelledError
from llorch_serve.requests import (
    Abort,
    ContinuationScore,
    EmbedRequest,
    GenerationRequest,
    GenerationUpdate,
    ModelInfo,
    Prompt,
    ScoreRequest,
    TextEmbedding,
    UpdateSink,
)
from llorch_serve.worker.local import whole_answers


class AsyncLocalClient:
    """A generator with the methods of a client for asyncio. What takes long runs on threads of the loop's
    own executor. Raises what the generator raises.
    """

    def __init__(self, generator: ClosableGenerator) -> None:
        self._generator = generator

    async def close(self) -> None:
        """End what still runs, and free the model."""
        await asyncio.to_thread(self._generator.close)

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[GenerationUpdate, None]:
        """Yield the updates of a request as they come; closing the generator ends the request."""
        async with aclosing(_updates(lambda sink: self._generator.submit(request, sink))) as updates:
            async for update in updates:
                yield update

    async def complete(self, request: GenerationRequest) -> list[GenerationUpdate]:
        """Return the whole answers of a request in the order of their index."""
        async with aclosing(self.generate(request)) as updates:
            return whole_answers([update async for update in updates])

    async def score(self, request: ScoreRequest) -> list[ContinuationScore]:
        """Return the scores of a request in the order of its continuations."""
        async with aclosing(_updates(lambda sink: self._generator.submit_score(request, sink))) as updates:
            found = {update.index: update.score async for update in updates}
        return [score for _, score in sorted(found.items()) if score is not None]

    async def embed(self, request: EmbedRequest) -> list[TextEmbedding]:
        """Return the vectors of a request in the order of its texts."""
        async with aclosing(
            _updates(lambda sink: self._generator.submit_embedding(request, sink))
        ) as updates:
            found = {update.index: update.embedding async for update in updates}
        return [embedding for _, embedding in sorted(found.items()) if embedding is not None]

    async def tokenize(self, prompt: Prompt) -> tuple[tuple[int, ...], str]:
        """Return the token ids of a prompt and the text they stand for."""
        return await asyncio.to_thread(self._generator.tokenize, prompt)

    async def detokenize(self, token_ids: tuple[int, ...], *, keep_special_tokens: bool = False) -> str:
        """Return the text of token ids."""
        return await asyncio.to_thread(
            self._generator.detokenize, token_ids, keep_special_tokens=keep_special_tokens
        )

    async def model_info(self) -> ModelInfo:
        """Return what the model says of itself."""
        return self._generator.model_info()


class _LoopSink:
    """Takes updates on the engine's thread and hands them to an event loop."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self.updates: asyncio.Queue[GenerationUpdate] = asyncio.Queue()

    def deliver(self, updates: list[GenerationUpdate]) -> None:
        # The loop may close at any moment. Raised here, its error would end the engine for everybody.
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._put, updates)

    def _put(self, updates: list[GenerationUpdate]) -> None:
        for update in updates:
            self.updates.put_nowait(update)


class _Submission:
    """Hands a request over on a thread. Its caller may leave at any moment, and its loop end, before it has
    been taken; then it is aborted as soon as it is.
    """

    def __init__(self, submit: Callable[[UpdateSink], Abort], sink: UpdateSink) -> None:
        self._submit = submit
        self._sink = sink
        self._lock = threading.Lock()
        self._abort: Abort | None = None
        self._left = False

    def run(self) -> None:
        """Submit the request."""
        abort = self._submit(self._sink)
        with self._lock:
            self._abort, left = abort, self._left
        if left:
            abort()

    def leave(self) -> None:
        """End the request, whether or not it has been taken yet."""
        with self._lock:
            self._left, abort = True, self._abort
        if abort is not None:
            abort()


async def _updates(submit: Callable[[UpdateSink], Abort]) -> AsyncGenerator[GenerationUpdate, None]:
    sink = _LoopSink()
    submission = _Submission(submit, sink)
    done = False
    try:
        await asyncio.to_thread(submission.run)
        while not done:
            update = await sink.updates.get()
            done = update.is_last
            if update.error is not None:
                raise update.error
            if update.completion is not None and update.completion.reason is FinishReason.CANCELLED:
                raise CancelledError(f"request {update.request_id} was aborted")
            yield update
    finally:
        if not done:
            submission.leave()
