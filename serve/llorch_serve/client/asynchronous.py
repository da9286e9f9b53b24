"""The typed client for an event loop: what :class:`llorch_serve.client.blocking.WorkerClient` does, as
coroutines.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from types import TracebackType
from typing import Self, TypeVar

import grpc

from llorch_serve.client import calls
from llorch_serve.client.base import AGAIN_S, BaseWorkerClient, is_serving
from llorch_serve.client.channel import OPTIONS, PLAIN, Access
from llorch_serve.engine.load import Load
from llorch_serve.requests import (
    ContinuationScore,
    EmbedRequest,
    GenerationRequest,
    GenerationUpdate,
    ModelInfo,
    Prompt,
    ScoreRequest,
    TextEmbedding,
)

R = TypeVar("R")


class AsyncWorkerClient(BaseWorkerClient):
    """A connection to the worker at ``address`` (HOST:PORT), made on a running event loop and used on it.

    Raises as the other client does: InvalidRequestError, ModelMismatchError, QueueFullError,
    UnavailableError, AuthenticationError, ResourceError or CancelledError as the worker would in this
    process, and WorkerError if it fails or is not there.
    """

    def __init__(self, address: str, access: Access = PLAIN) -> None:
        super().__init__(address, access, grpc.aio, OPTIONS)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connection; calls that still run are cancelled."""
        await self._channel.close()

    async def wait_until_ready(self, timeout_s: float) -> None:
        """Wait until the worker serves.

        Raises WorkerError if nothing answers within ``timeout_s`` seconds, UnavailableError if the worker
        answers but has not finished loading by then.
        """
        answered = False
        try:
            async with asyncio.timeout(timeout_s):
                while True:
                    watch = self._watch_health()
                    try:
                        async for response in watch:
                            answered = True
                            if is_serving(response):
                                return
                    except grpc.aio.AioRpcError as error:
                        match error.code():
                            case grpc.StatusCode.UNAVAILABLE:
                                pass
                            case grpc.StatusCode.RESOURCE_EXHAUSTED:
                                answered = True
                                await asyncio.sleep(AGAIN_S)
                            case _:
                                raise self._error(error) from error
                    finally:
                        watch.cancel()
        except TimeoutError:
            raise self._not_ready(timeout_s, answered=answered) from None

    async def generate(
        self, request: GenerationRequest, *, timeout_s: float | None = None
    ) -> AsyncGenerator[GenerationUpdate, None]:
        """Yield the updates of a request as they come; the last has its completion.

        A generator that is closed early cancels the request. ``timeout_s`` bounds the whole answer, in
        seconds.
        """
        call = calls.stream_call(request, timeout_s)
        stream = self._start(call)
        try:
            async for response in stream:
                yield call.read(response)
        except grpc.aio.AioRpcError as error:
            raise self._error(error) from error
        finally:
            stream.cancel()

    async def complete(
        self, request: GenerationRequest, *, timeout_s: float | None = None
    ) -> list[GenerationUpdate]:
        """Return the whole answers of a request in the order of their index, each as one update with its
        completion.

        ``timeout_s`` bounds all of them together, in seconds.
        """
        return await self._send(calls.complete_call(request, timeout_s))

    async def score(
        self, request: ScoreRequest, *, timeout_s: float | None = None
    ) -> Sequence[ContinuationScore]:
        """Return how likely each continuation of a context is, in their order.

        ``timeout_s`` bounds all of them together, in seconds. Raises UnsupportedError too, where the model's
        graph cannot score.
        """
        return await self._send(calls.score_call(request, timeout_s))

    async def embed(self, request: EmbedRequest, *, timeout_s: float | None = None) -> list[TextEmbedding]:
        """Return the vectors of texts in their order.

        ``timeout_s`` bounds all of them together, in seconds. Raises UnsupportedError too, where the model
        embeds no texts.
        """
        return await self._send(calls.embed_call(request, timeout_s))

    async def tokenize(self, prompt: Prompt) -> tuple[tuple[int, ...], str]:
        """Return the token ids of a prompt and the text they stand for."""
        return await self._send(calls.tokenize_call(prompt))

    async def detokenize(self, token_ids: tuple[int, ...], *, keep_special_tokens: bool = False) -> str:
        """Return the text of token ids."""
        return await self._send(calls.detokenize_call(token_ids, keep_special_tokens=keep_special_tokens))

    async def model_info(self) -> ModelInfo:
        """Return what the worker serves."""
        return await self._send(calls.model_info_call())

    async def load(self) -> Load:
        """Return the worker's state and how busy it is; while it loads and drains, too."""
        return await self._send(calls.load_call())

    async def abort(self, *request_ids: str) -> tuple[str, ...]:
        """End live requests; return the ids of those that were live, and this caller's own where the worker
        knows it.
        """
        return await self._send(calls.abort_call(request_ids))

    async def _send(self, call: calls.Call[R]) -> R:
        try:
            response = await self._start(call)
        except grpc.aio.AioRpcError as error:
            raise self._error(error) from error
        return call.read(response)
