"""The methods of GenerationService, between gRPC's event loop and a TextGenerator.

Input: raw messages of calls, parsed, checked, tokenised and submitted on a small thread pool so that a long prompt
never holds up another stream's tokens. Output: messages built from what :class:`LiveCalls` collects, or one status.
A call that ends early, whatever the reason, aborts its request at once.

Requests arrive as bytes and are parsed here rather than by gRPC, whose answer to a malformed message would be
INTERNAL where the caller is to blame.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final, TypeVar

import grpc
from google.protobuf.message import DecodeError, Message

from llorch_serve.errors import (
    CancelledError,
    FieldViolation,
    InvalidRequestError,
    ModelMismatchError,
    QueueFullError,
    UnavailableError,
)
from llorch_serve.requests import GenerationUpdate, ModelInfo, TextGenerator, UpdateSink
from llorch_serve.rpc import convert
from llorch_serve.rpc import worker_pb2 as pb
from llorch_serve.rpc.calls import LiveCall, LiveCalls
from llorch_serve.rpc.convert_score import read_score_request, write_scores
from llorch_serve.rpc.status import write_status
from llorch_serve.sequence import FinishReason

POOL_THREADS: Final = 2  # tokenising is the work; more threads would only take cores from the model
MAX_PENDING_BYTES: Final = 256 * 2**20  # of messages that wait for the pool

M = TypeVar("M", bound=Message)
R = TypeVar("R")
Context = grpc.aio.ServicerContext[Any, Any]
Body = Callable[[bytes, Context], Awaitable[Any]]
_Submission = tuple[str, Callable[[UpdateSink], None]]
"""A request's id, and what submits it with the sink that it is given."""


class GenerationServicer:
    """Serves one generator. All methods belong to the event loop that it is made on.

    Until :meth:`start`, and after :meth:`refuse`, every new call ends with UNAVAILABLE.
    """

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._calls = LiveCalls(self._loop)
        self._pool = ThreadPoolExecutor(POOL_THREADS, thread_name_prefix="llorch-request")
        self._pending_bytes = 0
        self._generator: TextGenerator | None = None
        self._info: ModelInfo | None = None
        self._refusal: str | None = (
            "the worker is loading its model; try again when its health service says SERVING"
        )
        self._active = 0
        self._idle = asyncio.Event()
        self._idle.set()

    def start(self, generator: TextGenerator, info: ModelInfo) -> None:
        """Take calls from now on."""
        self._generator, self._info, self._refusal = generator, info, None

    def refuse(self, reason: str) -> None:
        """Take no further calls; those that run go on."""
        self._refusal = reason

    async def wait_idle(self) -> None:
        """Return once no call is running."""
        await self._idle.wait()

    def end_all(self, reason: str) -> None:
        """End every running generation with UNAVAILABLE and abort its request."""
        for call in self._calls:
            call.fail(UnavailableError(reason))

    def close(self) -> None:
        """Drop what waits for the thread pool and end its threads, without waiting for them."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def method_handlers(self) -> dict[str, grpc.RpcMethodHandler[Any, Any]]:
        """Return the service's methods by name, for registration with a server."""
        unary, stream = grpc.unary_unary_rpc_method_handler, grpc.unary_stream_rpc_method_handler
        bodies: dict[str, tuple[Any, Body, type[Message]]] = {
            "Generate": (unary, self._generate, pb.GenerateResponse),
            "GenerateStream": (stream, self._generate_stream, pb.GenerateStreamResponse),
            "Score": (unary, self._score, pb.ScoreResponse),
            "Tokenize": (unary, self._tokenize, pb.TokenizeResponse),
            "Detokenize": (unary, self._detokenize, pb.DetokenizeResponse),
            "GetModelInfo": (unary, self._get_model_info, pb.GetModelInfoResponse),
            "GetLoad": (unary, self._get_load, pb.GetLoadResponse),
        }
        return {
            name: make(self._with_status(name, body), response_serializer=response.SerializeToString)
            for name, (make, body, response) in bodies.items()
        }

    def _with_status(self, name: str, body: Body) -> Body:
        """Wrap a method: counted while it runs, refused where the worker is not serving, errors made statuses."""

        async def handle(raw: bytes, context: Context) -> Any:
            self._active += 1
            self._idle.clear()
            try:
                if self._refusal is not None:
                    raise UnavailableError(self._refusal)
                return await body(raw, context)
            except grpc.aio.InternalError:
                # A write that met a connection just closed. No status can reach the client, the cancellation is due.
                raise asyncio.CancelledError from None
            except Exception as error:  # noqa: BLE001 - the boundary: every error becomes a status, bugs are logged there
                code, text, trailers = write_status(error, method=name)
                await context.abort(code, text, trailers)
            finally:
                self._active -= 1
                if self._active == 0:
                    self._idle.set()

        return handle

    async def _generate(self, raw: bytes, context: Context) -> pb.GenerateResponse:
        async def collect(call: LiveCall) -> pb.GenerateResponse:
            answers = await call.take()
            for answer in answers:
                _check_completed(answer)
            return convert.write_answers(call.request_id, answers)

        parse = functools.partial(_parse, pb.GenerateRequest, raw)
        return await self._run(functools.partial(self._generation, parse), raw, context, collect, whole=True)

    async def _score(self, raw: bytes, context: Context) -> pb.ScoreResponse:
        async def collect(call: LiveCall) -> pb.ScoreResponse:
            scores = await call.take()
            for score in scores:
                _check_completed(score)
            return write_scores(call.request_id, scores)

        def read(connection: str) -> _Submission:
            assert self._generator is not None
            message = _parse(pb.ScoreRequest, raw)
            self._check_model(message)
            request = read_score_request(message, connection=connection)
            return request.request_id, functools.partial(self._generator.submit_score, request)

        return await self._run(read, raw, context, collect, whole=True)

    async def _generate_stream(self, raw: bytes, context: Context) -> None:
        async def forward(call: LiveCall) -> None:
            first, ended = True, False
            while not ended:
                for update in await call.take():
                    _check_completed(update)
                    await context.write(convert.write_update(update, first=first))
                    first, ended = False, update.is_last

        def parse() -> pb.GenerateRequest:
            message = _parse(pb.GenerateStreamRequest, raw)
            if not message.HasField("request"):
                raise InvalidRequestError([FieldViolation("request", "not set, expected a GenerateRequest")])
            if message.request.sampling.HasField("best_of"):
                found = "found with GenerateStream, which cannot know yet which answers are best; expected none, or Generate"
                raise InvalidRequestError([FieldViolation("sampling.best_of", found)])
            return message.request

        await self._run(functools.partial(self._generation, parse), raw, context, forward, whole=False)

    def _generation(self, parse: Callable[[], pb.GenerateRequest], connection: str) -> _Submission:
        """Read a request for generated text. A pool thread."""
        assert self._generator is not None
        message = parse()
        self._check_model(message)
        request = convert.read_generation_request(message, connection=connection)
        return request.request_id, functools.partial(self._generator.submit, request)

    def _check_model(self, message: pb.GenerateRequest | pb.ScoreRequest) -> None:
        assert self._info is not None
        if message.HasField("model") and message.model != self._info.model_id:
            raise ModelMismatchError(
                f"model {message.model[:200]!r} was asked for, this worker serves {self._info.model_id!r}; "
                "ask for that, leave model out, or call another worker"
            )

    async def _run(
        self,
        read: Callable[[str], _Submission],
        raw: bytes,
        context: Context,
        consume: Callable[[LiveCall], Awaitable[R]],
        *,
        whole: bool,
    ) -> R:
        """Admit a request, let ``consume`` take its updates, and abort it if that ends before the request does."""
        call = LiveCall(whole=whole)
        # Shielded, since a thread cannot be interrupted: what it admits after the caller left is aborted then.
        admission = asyncio.ensure_future(
            self._in_pool(len(raw), functools.partial(self._admit, read, context.peer(), call))
        )
        try:
            await asyncio.shield(admission)
            return await consume(call)
        finally:
            call.abandoned = True
            if admission.done():
                self._abort(call)
            else:
                admission.add_done_callback(lambda _: self._abort(call))

    def _admit(self, read: Callable[[str], _Submission], connection: str, call: LiveCall) -> None:
        """Parse, check and submit a request. A pool thread."""
        if call.abandoned:
            return
        request_id, submit = read(connection)
        self._calls.add(request_id, call)
        try:
            submit(self._calls)
            call.submitted = True
        finally:
            if not call.submitted:
                self._calls.discard(call)

    def _abort(self, call: LiveCall) -> None:
        if call.submitted and not call.ended:
            assert self._generator is not None
            self._generator.abort(call.request_id)

    async def _tokenize(self, raw: bytes, _context: Context) -> pb.TokenizeResponse:
        def work() -> pb.TokenizeResponse:
            assert self._generator is not None
            prompt = convert.read_prompt(_parse(pb.TokenizeRequest, raw).input)
            token_ids, text = self._generator.tokenize(prompt)
            return pb.TokenizeResponse(token_ids=token_ids, text=text)

        return await self._in_pool(len(raw), work)

    async def _detokenize(self, raw: bytes, _context: Context) -> pb.DetokenizeResponse:
        def work() -> pb.DetokenizeResponse:
            assert self._generator is not None
            message = _parse(pb.DetokenizeRequest, raw)
            token_ids = convert.read_token_ids(
                message.token_ids, count=len(message.token_ids), field="token_ids"
            )
            text = self._generator.detokenize(token_ids, keep_special_tokens=message.keep_special_tokens)
            return pb.DetokenizeResponse(text=text)

        return await self._in_pool(len(raw), work)

    async def _get_model_info(self, _raw: bytes, _context: Context) -> pb.GetModelInfoResponse:
        assert self._info is not None
        return convert.write_model_info(self._info)

    async def _get_load(self, _raw: bytes, _context: Context) -> pb.GetLoadResponse:
        assert self._generator is not None
        return convert.write_load(self._generator.load())

    async def _in_pool(self, size: int, work: Callable[[], R]) -> R:
        """Run ``work``, which holds a message of ``size`` bytes, on the pool."""
        if self._pending_bytes + size > MAX_PENDING_BYTES:
            raise QueueFullError(
                f"{self._pending_bytes} bytes of requests wait to be read, the most is {MAX_PENDING_BYTES}; try again",
                retry_after_s=1.0,
            )
        self._pending_bytes += size
        try:
            return await self._loop.run_in_executor(self._pool, work)
        finally:
            self._pending_bytes -= size


def _parse(kind: type[M], raw: bytes) -> M:
    try:
        return kind.FromString(raw)
    except DecodeError as error:
        found = f"not a valid {kind.DESCRIPTOR.name} ({error}); check the client's worker.proto, and that all text is UTF-8"
        raise InvalidRequestError([FieldViolation("request", found)]) from error


def _check_completed(update: GenerationUpdate) -> None:
    """Raise CancelledError where an answer ends with this update without having run to its end."""
    completion = update.completion
    if completion is not None and completion.reason is FinishReason.CANCELLED:
        raise CancelledError(f"the request was aborted after {completion.generated_tokens} tokens")
