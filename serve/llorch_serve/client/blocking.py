"""A typed client of one worker: plain requests in, plain updates out, and statuses turned back into our
errors.

Used by ``llorch generate --connect`` and ``llorch bench --connect``. Calls block; threads may share a client,
one call each. :meth:`WorkerClient.generate` reads its stream on the caller's own thread, without the thread
hop that gRPC otherwise adds to every message.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from types import TracebackType
from typing import Final, Self, TypeVar

import grpc
from google.protobuf.message import Message
from grpc.experimental import ChannelOptions
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

_OPTIONS: Final = ((ChannelOptions.SingleThreadedUnaryStream, 1), *OPTIONS)

R = TypeVar("R")


class WorkerClient:
    """A connection to the worker at ``address`` (HOST:PORT). Nothing is sent before the first call.

    Every method raises InvalidRequestError, ModelMismatchError, QueueFullError, UnavailableError,
    AuthenticationError, ResourceError or CancelledError as the worker would if it were called in this
    process, and WorkerError if it cannot be reached or fails.
    """

    def __init__(self, address: str, access: Access = PLAIN) -> None:
        self.address = address
        self._metadata = access.metadata()
        credentials = access.credentials()
        self._channel = (
            grpc.insecure_channel(address, options=_OPTIONS)
            if credentials is None
            else grpc.secure_channel(address, credentials, options=_OPTIONS)
        )
        self._service = worker_pb2_grpc.GenerationServiceStub(self._channel)  # type: ignore[no-untyped-call]  # generated
        self._health = health_pb2_grpc.HealthStub(self._channel)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the connection; calls that still run end with CancelledError."""
        self._channel.close()

    def wait_until_ready(self, timeout_s: float) -> None:
        """Wait until the worker serves.

        Raises WorkerError if nothing answers within ``timeout_s`` seconds, UnavailableError if the worker
        answers but has not finished loading by then.
        """
        deadline = time.monotonic() + timeout_s
        answered = False
        while (left := deadline - time.monotonic()) > 0:
            request = health_pb2.HealthCheckRequest(service=SERVICE_NAME)
            watch = self._health.Watch(request, timeout=left, wait_for_ready=True)
            try:
                for response in watch:
                    answered = True
                    if response.status == health_pb2.HealthCheckResponse.SERVING:
                        return
            except grpc.RpcError as error:
                if error.code() not in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED):
                    raise read_status(error, address=self.address) from error
            finally:
                watch.cancel()
        if answered:
            raise UnavailableError(
                f"the worker at {self.address} is not ready after {timeout_s:g} s; wait longer, or see its "
                f"log"
            )
        raise WorkerError(
            f"no worker answers at {self.address} after {timeout_s:g} s; start one with: llorch serve DIR, "
            f"or correct the address"
        )

    def generate(
        self, request: GenerationRequest, *, timeout_s: float | None = None
    ) -> Iterator[GenerationUpdate]:
        """Return the updates of a request as they come; the last has its completion.

        Nothing is sent before the first is asked for. An iterator that is closed early cancels the request.
        ``timeout_s`` bounds the whole answer, in seconds.
        """
        message = pb.GenerateStreamRequest(request=convert.write_generation_request(request))
        check_size(message.ByteSize())
        return self._updates(
            request, message, timeout_s, write_ids(request.correlation_id, request.traceparent)
        )

    def complete(
        self, request: GenerationRequest, *, timeout_s: float | None = None
    ) -> list[GenerationUpdate]:
        """Return the whole answers of a request in the order of their index, each as one update with its
        completion.

        ``timeout_s`` bounds all of them together, in seconds.
        """
        message = convert.write_generation_request(request)
        return convert_answers.read_answers(
            self._call(
                self._service.Generate,
                message,
                timeout_s,
                write_ids(request.correlation_id, request.traceparent),
            )
        )

    def _updates(
        self,
        request: GenerationRequest,
        message: pb.GenerateStreamRequest,
        timeout_s: float | None,
        ids: tuple[tuple[str, str], ...],
    ) -> Iterator[GenerationUpdate]:
        stream = self._service.GenerateStream(message, timeout=timeout_s, metadata=(*self._metadata, *ids))
        open_answers = request.sampling.n
        try:
            for response in stream:
                update = convert_answers.read_update(request.request_id, response, open_answers=open_answers)
                open_answers = update.open_answers
                yield update
        except grpc.RpcError as error:
            raise read_status(error, address=self.address) from error
        finally:
            stream.cancel()

    def score(self, request: ScoreRequest, *, timeout_s: float | None = None) -> Sequence[ContinuationScore]:
        """Return how likely each continuation of a context is, in their order.

        ``timeout_s`` bounds all of them together, in seconds. Raises UnsupportedError too, where the model's
        graph cannot score.
        """
        message = write_score_request(request)
        ids = write_ids(request.correlation_id, request.traceparent)
        return read_scores(self._call(self._service.Score, message, timeout_s, ids))

    def tokenize(self, prompt: Prompt) -> tuple[tuple[int, ...], str]:
        """Return the token ids of a prompt and the text they stand for."""
        message = pb.TokenizeRequest(input=convert_prompt.write_prompt(prompt))
        response: pb.TokenizeResponse = self._call(self._service.Tokenize, message)
        return tuple(response.token_ids), response.text

    def detokenize(self, token_ids: tuple[int, ...], *, keep_special_tokens: bool = False) -> str:
        """Return the text of token ids."""
        message = convert.write_detokenize_request(token_ids, keep_special_tokens=keep_special_tokens)
        response: pb.DetokenizeResponse = self._call(self._service.Detokenize, message)
        return response.text

    def model_info(self) -> ModelInfo:
        """Return what the worker serves."""
        return convert_info.read_model_info(self._call(self._service.GetModelInfo, pb.GetModelInfoRequest()))

    def load(self) -> Load:
        """Return the worker's state and how busy it is; while it loads and drains, too."""
        return convert_info.read_load(self._call(self._service.GetLoad, pb.GetLoadRequest()))

    def abort(self, *request_ids: str) -> tuple[str, ...]:
        """End live requests; return the ids of those that were live, and this caller's own where the worker
        knows it.
        """
        message = convert.write_abort_request(request_ids)
        response: pb.AbortResponse = self._call(self._service.Abort, message)
        return tuple(response.request_ids)

    def _call(
        self,
        method: Callable[..., R],
        message: Message,
        timeout_s: float | None = None,
        ids: tuple[tuple[str, str], ...] = (),
    ) -> R:
        check_size(message.ByteSize())
        try:
            return method(message, timeout=timeout_s, metadata=(*self._metadata, *ids))
        except grpc.RpcError as error:
            raise read_status(error, address=self.address) from error
