"""A typed client of one worker: plain requests in, plain updates out, and statuses turned back into our
errors.

Used by ``llorch generate --connect`` and ``llorch bench --connect``. Calls block; threads may share a client,
one call each. :meth:`WorkerClient.generate` reads its stream on the caller's own thread, without the thread
hop that gRPC otherwise adds to every message.
"""

from __future__ import annotations

import time
from collections.abc import Generator, Sequence
from types import TracebackType
from typing import Final, Self, TypeVar

import grpc
from grpc.experimental import ChannelOptions

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

_OPTIONS: Final = ((ChannelOptions.SingleThreadedUnaryStream, 1), *OPTIONS)

R = TypeVar("R")


class WorkerClient(BaseWorkerClient):
    """A connection to the worker at ``address`` (HOST:PORT). Nothing is sent before the first call.

    Every method raises InvalidRequestError, ModelMismatchError, QueueFullError, UnavailableError,
    AuthenticationError, ResourceError or CancelledError as the worker would if it were called in this
    process, and WorkerError if it cannot be reached or fails.
    """

    def __init__(self, address: str, access: Access = PLAIN) -> None:
        super().__init__(address, access, grpc, _OPTIONS)

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
            watch = self._watch_health(left)
            try:
                for response in watch:
                    answered = True
                    if is_serving(response):
                        return
            except grpc.RpcError as error:
                match error.code():
                    case grpc.StatusCode.UNAVAILABLE | grpc.StatusCode.DEADLINE_EXCEEDED:
                        pass
                    case grpc.StatusCode.RESOURCE_EXHAUSTED:
                        answered = True
                        time.sleep(min(AGAIN_S, left))
                    case _:
                        raise self._error(error) from error
            finally:
                watch.cancel()
        raise self._not_ready(timeout_s, answered=answered)

    def generate(
        self, request: GenerationRequest, *, timeout_s: float | None = None
    ) -> Generator[GenerationUpdate, None, None]:
        """Return the updates of a request as they come; the last has its completion.

        Nothing is sent before the first is asked for. An iterator that is closed early cancels the request.
        ``timeout_s`` bounds the whole answer, in seconds.
        """
        return self._stream(calls.stream_call(request, timeout_s))

    def complete(
        self, request: GenerationRequest, *, timeout_s: float | None = None
    ) -> list[GenerationUpdate]:
        """Return the whole answers of a request in the order of their index, each as one update with its
        completion.

        ``timeout_s`` bounds all of them together, in seconds.
        """
        return self._send(calls.complete_call(request, timeout_s))

    def score(self, request: ScoreRequest, *, timeout_s: float | None = None) -> Sequence[ContinuationScore]:
        """Return how likely each continuation of a context is, in their order.

        ``timeout_s`` bounds all of them together, in seconds. Raises UnsupportedError too, where the model's
        graph cannot score.
        """
        return self._send(calls.score_call(request, timeout_s))

    def embed(self, request: EmbedRequest, *, timeout_s: float | None = None) -> list[TextEmbedding]:
        """Return the vectors of texts in their order.

        ``timeout_s`` bounds all of them together, in seconds. Raises UnsupportedError too, where the model
        embeds no texts.
        """
        return self._send(calls.embed_call(request, timeout_s))

    def tokenize(self, prompt: Prompt) -> tuple[tuple[int, ...], str]:
        """Return the token ids of a prompt and the text they stand for."""
        return self._send(calls.tokenize_call(prompt))

    def detokenize(self, token_ids: tuple[int, ...], *, keep_special_tokens: bool = False) -> str:
        """Return the text of token ids."""
        return self._send(calls.detokenize_call(token_ids, keep_special_tokens=keep_special_tokens))

    def model_info(self) -> ModelInfo:
        """Return what the worker serves."""
        return self._send(calls.model_info_call())

    def load(self) -> Load:
        """Return the worker's state and how busy it is; while it loads and drains, too."""
        return self._send(calls.load_call())

    def abort(self, *request_ids: str) -> tuple[str, ...]:
        """End live requests; return the ids of those that were live, and this caller's own where the worker
        knows it.
        """
        return self._send(calls.abort_call(request_ids))

    def _send(self, call: calls.Call[R]) -> R:
        try:
            response = self._start(call)
        except grpc.RpcError as error:
            raise self._error(error) from error
        return call.read(response)

    def _stream(self, call: calls.Call[R]) -> Generator[R, None, None]:
        stream = self._start(call)
        try:
            for response in stream:
                yield call.read(response)
        except grpc.RpcError as error:
            raise self._error(error) from error
        finally:
            stream.cancel()
