"""The typed client for an event loop: what :class:`llorch_serve.client.blocking.WorkerClient` does, as
coroutines.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from types import TracebackType
from typing import Any, Self, TypeVar

import grpc
from google.protobuf.message import Message
from grpc_health.v1 import health_pb2, health_pb2_grpc

from llorch_serve.calls.correlation import write_ids
from llorch_serve.client.channel import OPTIONS, PLAIN, Access, check_size
from llorch_serve.engine.load import Load
from llorch_serve.errors import UnavailableError, WorkerError
from llorch_serve.requests import (
    ContinuationScore,
    GenerationRequest,
    GenerationUpdate,
    ModelInfo,
    Prompt,
    ScoreRequest,
)
from llorch_serve.rpc import (
    SERVICE_NAME,
    convert,
    convert_answers,
    convert_info,
    convert_prompt,
    worker_pb2_grpc,
)
from llorch_serve.rpc import worker_pb2 as pb
from llorch_serve.rpc.convert_score import read_scores, write_score_request
from llorch_serve.rpc.status import read_status

R = TypeVar("R")


class AsyncWorkerClient:
    """A connection to the worker at ``address`` (HOST:PORT), made on a running event loop and used on it.

    Raises as the other client does: InvalidRequestError, ModelMismatchError, QueueFullError,
    UnavailableError, AuthenticationError, ResourceError or CancelledError as the worker would in this
    process, and WorkerError if it fails or is not there.
    """

    def __init__(self, address: str, access: Access = PLAIN) -> None:
        self.address = address
        self._metadata = access.metadata()
        credentials = access.credentials()
        self._channel = (
            grpc.aio.insecure_channel(address, options=OPTIONS)
            if credentials is None
            else grpc.aio.secure_channel(address, credentials, options=OPTIONS)
        )
        stub: Any = worker_pb2_grpc.GenerationServiceStub
        self._service: Any = stub(self._channel)
        self._health: Any = health_pb2_grpc.HealthStub(self._channel)

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
                    watch = self._health.Watch(
                        health_pb2.HealthCheckRequest(service=SERVICE_NAME), wait_for_ready=True
                    )
                    try:
                        async for response in watch:
                            answered = True
                            if response.status == health_pb2.HealthCheckResponse.SERVING:
                                return
                    except grpc.aio.AioRpcError as error:
                        if error.code() is not grpc.StatusCode.UNAVAILABLE:
                            raise read_status(error, address=self.address) from error
                    finally:
                        watch.cancel()
        except TimeoutError:
            if answered:
                raise UnavailableError(
                    f"the worker at {self.address} is not ready after {timeout_s:g} s; wait longer, or see "
                    f"its log"
                ) from None
            raise WorkerError(
                f"no worker answers at {self.address} after {timeout_s:g} s; start one with: llorch serve "
                f"DIR, "
                "or correct the address"
            ) from None

    async def generate(
        self, request: GenerationRequest, *, timeout_s: float | None = None
    ) -> AsyncIterator[GenerationUpdate]:
        """Yield the updates of a request as they come; the last has its completion.

        A generator that is closed early cancels the request. ``timeout_s`` bounds the whole answer, in
        seconds.
        """
        message = pb.GenerateStreamRequest(request=convert.write_generation_request(request))
        check_size(message.ByteSize())
        ids = write_ids(request.correlation_id, request.traceparent)
        stream = self._service.GenerateStream(message, timeout=timeout_s, metadata=(*self._metadata, *ids))
        open_answers = request.sampling.n
        try:
            async for response in stream:
                update = convert_answers.read_update(request.request_id, response, open_answers=open_answers)
                open_answers = update.open_answers
                yield update
        except grpc.aio.AioRpcError as error:
            raise read_status(error, address=self.address) from error
        finally:
            stream.cancel()

    async def complete(
        self, request: GenerationRequest, *, timeout_s: float | None = None
    ) -> list[GenerationUpdate]:
        """Return the whole answers of a request in the order of their index, each as one update with its
        completion.

        ``timeout_s`` bounds all of them together, in seconds.
        """
        message = convert.write_generation_request(request)
        ids = write_ids(request.correlation_id, request.traceparent)
        return convert_answers.read_answers(await self._call(self._service.Generate, message, timeout_s, ids))

    async def score(
        self, request: ScoreRequest, *, timeout_s: float | None = None
    ) -> Sequence[ContinuationScore]:
        """Return how likely each continuation of a context is, in their order.

        ``timeout_s`` bounds all of them together, in seconds. Raises UnsupportedError too, where the model's
        graph cannot score.
        """
        message = write_score_request(request)
        ids = write_ids(request.correlation_id, request.traceparent)
        return read_scores(await self._call(self._service.Score, message, timeout_s, ids))

    async def tokenize(self, prompt: Prompt) -> tuple[tuple[int, ...], str]:
        """Return the token ids of a prompt and the text they stand for."""
        message = pb.TokenizeRequest(input=convert_prompt.write_prompt(prompt))
        response: pb.TokenizeResponse = await self._call(self._service.Tokenize, message)
        return tuple(response.token_ids), response.text

    async def detokenize(self, token_ids: tuple[int, ...], *, keep_special_tokens: bool = False) -> str:
        """Return the text of token ids."""
        message = convert.write_detokenize_request(token_ids, keep_special_tokens=keep_special_tokens)
        response: pb.DetokenizeResponse = await self._call(self._service.Detokenize, message)
        return response.text

    async def model_info(self) -> ModelInfo:
        """Return what the worker serves."""
        return convert_info.read_model_info(
            await self._call(self._service.GetModelInfo, pb.GetModelInfoRequest())
        )

    async def load(self) -> Load:
        """Return the worker's state and how busy it is; while it loads and drains, too."""
        return convert_info.read_load(await self._call(self._service.GetLoad, pb.GetLoadRequest()))

    async def abort(self, *request_ids: str) -> tuple[str, ...]:
        """End live requests; return the ids of those that were live, and this caller's own where the worker
        knows it.
        """
        message = convert.write_abort_request(request_ids)
        response: pb.AbortResponse = await self._call(self._service.Abort, message)
        return tuple(response.request_ids)

    async def _call(
        self,
        method: Callable[..., Awaitable[R]],
        message: Message,
        timeout_s: float | None = None,
        ids: tuple[tuple[str, str], ...] = (),
    ) -> R:
        check_size(message.ByteSize())
        try:
            return await method(message, timeout=timeout_s, metadata=(*self._metadata, *ids))
        except grpc.aio.AioRpcError as error:
            raise read_status(error, address=self.address) from error
