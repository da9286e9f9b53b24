"""A worker elsewhere as a generator: fronts in this process answer with its model as they would with one of
their own.

Input: requests from any thread. Output: whole answers, each as one update, on the event loop of the client;
or errors that say whether it helps to ask again, as it does where a worker is restarted.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Final, TypeVar

from llorch_serve.client.asynchronous import AsyncWorkerClient
from llorch_serve.engine.load import Load
from llorch_serve.engine.sequence import FinishReason
from llorch_serve.errors import (
    CancelledError,
    FieldViolation,
    InvalidRequestError,
    LlorchError,
    ModelMismatchError,
    QueueFullError,
    ReplicaLostError,
    ResourceError,
    UnavailableError,
    UnreachableError,
    UnsupportedError,
    WorkerError,
)
from llorch_serve.requests import (
    Abort,
    AnswerOptions,
    Completion,
    EmbedRequest,
    GenerationRequest,
    GenerationUpdate,
    ModelInfo,
    Prompt,
    RankRequest,
    ScoreRequest,
    Timings,
    UpdateSink,
)
from llorch_serve.sampling.params import SamplingParams

R = TypeVar("R")

_AGAIN_S: Final = 1.0
_NOTHING: Final = Timings(0.0, 0.0, 0.0)


class RemoteGenerator:
    """Implements :class:`llorch_serve.requests.TextGenerator` on a client, of whose event loop it is made.

    Every request names the model that the worker serves now, so that no answer is another model's. What takes
    no sink blocks, so it is for threads other than the loop's.

    tell: is told when the worker goes away, and when it answers again.
    lost: why nothing is answered any more: the worker serves another model. None while that may change.
    """

    def __init__(
        self, client: AsyncWorkerClient, info: ModelInfo, tell: Callable[[str], None] = lambda _: None
    ) -> None:
        self.lost: LlorchError | None = None
        self._client = client
        self._info = info
        self._tell = tell
        self._is_away = False
        self._loop = asyncio.get_running_loop()
        self._running: set[asyncio.Task[list[GenerationUpdate]]] = set()

    async def close(self) -> None:
        """End what still runs."""
        for task in tuple(self._running):
            task.cancel()
        if self._running:
            await asyncio.wait(tuple(self._running))

    def submit(self, request: GenerationRequest, sink: UpdateSink) -> Abort:
        """Send a request; its answers come whole."""
        pinned = replace(request, fingerprint=self._info.fingerprint)
        return self._begin(request.request_id, sink, lambda: self._client.complete(pinned))

    def submit_score(self, request: ScoreRequest, sink: UpdateSink) -> Abort:
        """Send the continuations of a request."""
        pinned = replace(request, fingerprint=self._info.fingerprint)

        async def send() -> list[GenerationUpdate]:
            scores = await self._client.score(pinned)
            counts = [(each.context_tokens, each.token_count) for each in scores]
            updates = _ended(request.request_id, counts)
            return [replace(one, score=score) for one, score in zip(updates, scores, strict=True)]

        return self._begin(request.request_id, sink, send)

    def submit_rank(self, request: RankRequest, sink: UpdateSink) -> Abort:
        """Raise UnsupportedError: workers rank over HTTP alone."""
        raise UnsupportedError("a worker that is called over gRPC ranks nothing; call its /v1/rerank")

    def submit_embedding(self, request: EmbedRequest, sink: UpdateSink) -> Abort:
        """Send the texts of a request."""
        pinned = replace(request, fingerprint=self._info.fingerprint)

        async def send() -> list[GenerationUpdate]:
            vectors = await self._client.embed(pinned)
            updates = _ended(request.request_id, [(each.token_count, 0) for each in vectors])
            return [replace(one, embedding=vector) for one, vector in zip(updates, vectors, strict=True)]

        return self._begin(request.request_id, sink, send)

    def violations(
        self, prompt: Prompt, sampling: SamplingParams, answers: AnswerOptions
    ) -> list[FieldViolation]:
        """Return nothing: the worker names what is bad when it is asked."""
        return []

    def tokenize(self, prompt: Prompt) -> tuple[tuple[int, ...], str]:
        """Return the token ids of a prompt and the text they stand for. Blocks."""
        return self._wait_for(self._client.tokenize(prompt))

    def detokenize(self, token_ids: tuple[int, ...], *, keep_special_tokens: bool) -> str:
        """Return the text of token ids. Blocks."""
        return self._wait_for(self._client.detokenize(token_ids, keep_special_tokens=keep_special_tokens))

    def model_info(self) -> ModelInfo:
        """Return what the worker served when this was made."""
        return self._info

    def load(self) -> Load:
        """Return how busy the worker is. Blocks."""
        return self._wait_for(self._client.load())

    def _wait_for(self, call: Coroutine[Any, Any, R]) -> R:
        return asyncio.run_coroutine_threadsafe(call, self._loop).result()

    async def _answer(
        self, send: Callable[[], Coroutine[Any, Any, list[GenerationUpdate]]]
    ) -> list[GenerationUpdate]:
        """Return the answer of a call. Raises what it raises, in the words of a generator in this process."""
        try:
            updates = await send()
        except ReplicaLostError:
            raise
        except (UnavailableError, UnreachableError) as error:
            if not self._is_away:
                self._is_away = True
                self._tell(str(error))
            raise UnavailableError(str(error)) from error
        except ModelMismatchError as error:
            self.lost = ModelMismatchError(
                f"the worker at {self._client.address} serves another model by now: {error}"
            )
            raise self.lost from error
        except CancelledError as error:  # not by us: that is asyncio's
            ended = f"the worker at {self._client.address} ended a request before it was complete"
            raise WorkerError(ended) from error
        except InvalidRequestError as error:
            if [each.field for each in error.violations] == ["request_id"]:
                # The one before has left and has not ended yet, or another run asks for the same.
                raise QueueFullError(str(error), retry_after_s=_AGAIN_S) from error
            raise
        except ResourceError as error:
            raise QueueFullError(str(error), retry_after_s=_AGAIN_S) from error
        if self._is_away:
            self._is_away = False
            self._tell(f"the worker at {self._client.address} answers again")
        return updates

    def _begin(
        self,
        request_id: str,
        sink: UpdateSink,
        send: Callable[[], Coroutine[Any, Any, list[GenerationUpdate]]],
    ) -> Abort:
        """Send a request from the loop, and again when the worker was away; return what ends it."""
        tasks: list[asyncio.Task[list[GenerationUpdate]]] = []

        def start() -> None:
            task = self._loop.create_task(self._answer(send))
            tasks.append(task)
            self._running.add(task)
            task.add_done_callback(self._running.discard)
            task.add_done_callback(partial(_deliver, request_id, sink))

        def cancel() -> None:  # the loop does what it is told in order, so the task is there
            tasks[0].cancel()

        self._loop.call_soon_threadsafe(start)
        return partial(self._on_loop, cancel)

    def _on_loop(self, act: Callable[[], None]) -> None:
        with contextlib.suppress(RuntimeError):  # the loop has been closed, and everything ended with it
            self._loop.call_soon_threadsafe(act)


def _deliver(request_id: str, sink: UpdateSink, task: asyncio.Task[list[GenerationUpdate]]) -> None:
    """Give a sink what a request has come to."""
    if task.cancelled():
        completion = Completion(FinishReason.CANCELLED, None, 0, 0, 0, _NOTHING)
        sink.deliver([GenerationUpdate(request_id, "", (), completion)])
        return
    error = task.exception()
    if error is None:
        sink.deliver([replace(update, request_id=request_id) for update in task.result()])
    else:
        assert isinstance(error, Exception)
        sink.deliver([GenerationUpdate(request_id, "", (), error=error)])


def _ended(request_id: str, tokens: Sequence[tuple[int, int]]) -> list[GenerationUpdate]:
    """Return the last updates of a request's parts. tokens: of each part those of its prompt, and of what was
    scored.
    """
    return [
        GenerationUpdate(
            request_id,
            "",
            (),
            Completion(FinishReason.LENGTH, None, prompt, scored, 0, _NOTHING),
            index=index,
            open_answers=len(tokens) - index - 1,
        )
        for index, (prompt, scored) in enumerate(tokens)
    ]
