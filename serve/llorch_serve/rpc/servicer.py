"""The methods of GenerationService, between gRPC's event loop and a TextGenerator.

Input: raw messages of calls, parsed, checked, tokenised and submitted on a small thread pool so that a long
prompt never holds up another stream's tokens. Output: messages built from what :class:`LiveCalls` collects,
or one status. A call that ends early, whatever the reason, aborts its request at once.

Requests arrive as bytes and are parsed here rather than by gRPC, whose answer to a malformed message would be
INTERNAL where the caller is to blame. They are received by the methods themselves (``rpc/receiving.py``),
once a call is not refused; a message is let go of as soon as it has been read.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any, Final, TypeVar

import grpc
from google.protobuf.message import DecodeError, Message

from llorch_serve.calls.admission import Activity, ReadingThreads
from llorch_serve.calls.callers import caller_of
from llorch_serve.calls.correlation import echo, read_ids
from llorch_serve.calls.live import LiveCall, LiveCalls, check_completed
from llorch_serve.engine.load import NOTHING, Load, WorkerState
from llorch_serve.errors import FieldViolation, InvalidRequestError, ModelMismatchError, UnavailableError
from llorch_serve.loading.progress import LoadProgress
from llorch_serve.requests import Abort, ModelInfo, TextGenerator, UpdateSink
from llorch_serve.rpc import convert, convert_answers, convert_fields, convert_info, convert_prompt
from llorch_serve.rpc import worker_pb2 as pb
from llorch_serve.rpc.convert_score import read_score_request, write_scores
from llorch_serve.rpc.places import Context
from llorch_serve.rpc.receiving import Receiving, SmallReceiving
from llorch_serve.rpc.status import write_status
from llorch_serve.rpc.wire import check_fields

MAX_PENDING_BYTES: Final = 256 * 2**20  # of messages that wait for the pool
_ALWAYS: Final = frozenset({"GetLoad", "Abort"})  # answered while loading and draining too
_WORK: Final = frozenset(
    {"Generate", "GenerateStream", "Score", "Tokenize", "Detokenize"}
)  # what keeps a worker from being idle

M = TypeVar("M", bound=Message)
R = TypeVar("R")
Body = Callable[[Context], Awaitable[Any]]
_Submission = tuple[str, Callable[[UpdateSink], Abort]]
"""A request's id, and what submits it with the sink that it is given."""
_Reader = Callable[[bytes, str, str], _Submission]
"""Reads a message that came over a connection, from a caller. A pool thread."""


class GenerationServicer:
    """Serves one generator. All methods belong to the event loop that it is made on.

    progress: of the load that comes first. max_message_bytes: largest message. by_token: callers are known by
        their tokens.
    stream_interval: see :class:`LiveCalls`.

    Until :meth:`start`, and after :meth:`refuse`, every new call but GetLoad and Abort ends with UNAVAILABLE.
    """

    def __init__(
        self,
        progress: LoadProgress,
        *,
        max_message_bytes: int,
        by_token: bool = False,
        stream_interval: int | None = None,
    ) -> None:
        self._progress = progress
        self._by_token = by_token
        self._state = WorkerState.STARTING
        self._calls = LiveCalls(asyncio.get_running_loop(), stream_interval)
        self._messages, self._small_messages = Receiving(max_message_bytes), SmallReceiving()
        self._threads = ReadingThreads("llorch-request", MAX_PENDING_BYTES)
        self._activity = Activity()
        self._generator: TextGenerator | None = None
        self._info: ModelInfo | None = None
        self._refusal: str | None = (
            "the worker is loading its model; try again when its health service says SERVING"
        )

    def start(self, generator: TextGenerator, info: ModelInfo) -> None:
        """Take calls from now on."""
        self._generator, self._info, self._refusal = generator, info, None
        self._state = WorkerState.READY
        self._activity.begin()

    def refuse(self, reason: str, state: WorkerState) -> None:
        """Take no further calls, for a state that says why; those that run go on."""
        self._refusal, self._state = reason, state

    def load(self) -> Load:
        """Return the worker's state, how far it has loaded and how busy it is."""
        figures = NOTHING if self._generator is None else self._generator.load()
        state, progress = self._state, self._progress.now()
        if state is WorkerState.READY and figures.running >= figures.slots:
            state = WorkerState.BUSY
        return replace(
            figures,
            state=state,
            load_percent=progress.percent,
            loaded_bytes=progress.loaded_bytes,
            total_bytes=progress.total_bytes,
        )

    async def wait_unused(self, seconds: float) -> None:
        """Return once no call of a client has run for so long."""
        await self._activity.wait_unused(seconds)

    async def wait_idle(self) -> None:
        """Return once no call is running."""
        await self._activity.wait_idle()

    def end_all(self, error: Exception) -> None:
        """End every running generation with an error and abort its request."""
        self._calls.end_all(error)

    def close(self) -> None:
        """Drop what waits for the thread pool and end its threads, without waiting for them."""
        self._threads.close()

    def method_handlers(self) -> dict[str, grpc.RpcMethodHandler[Any, Any]]:
        """Return the service's methods by name, for registration with a server."""
        unary, stream = grpc.stream_unary_rpc_method_handler, grpc.stream_stream_rpc_method_handler
        bodies: dict[str, tuple[Any, Body, type[Message]]] = {
            "Generate": (unary, self._generate, pb.GenerateResponse),
            "GenerateStream": (stream, self._generate_stream, pb.GenerateStreamResponse),
            "Score": (unary, self._score, pb.ScoreResponse),
            "Tokenize": (unary, self._tokenize, pb.TokenizeResponse),
            "Detokenize": (unary, self._detokenize, pb.DetokenizeResponse),
            "GetModelInfo": (unary, self._get_model_info, pb.GetModelInfoResponse),
            "GetLoad": (unary, self._get_load, pb.GetLoadResponse),
            "Abort": (unary, self._abort_requests, pb.AbortResponse),
        }
        return {
            name: make(self._with_status(name, body), response_serializer=response.SerializeToString)
            for name, (make, body, response) in bodies.items()
        }

    def _with_status(self, name: str, body: Body) -> Callable[[object, Context], Awaitable[Any]]:
        """Wrap a method: counted while it runs, refused where the worker is not serving, errors made
        statuses.
        """

        async def handle(_requests: object, context: Context) -> Any:
            with self._activity.call(is_use=name in _WORK):
                try:
                    try:
                        if told := echo(read_ids(context.invocation_metadata())):
                            await context.send_initial_metadata(told)
                        if self._refusal is not None and name not in _ALWAYS:
                            raise UnavailableError(self._refusal)
                        return await body(context)
                    except grpc.aio.InternalError:
                        raise
                    except Exception as error:  # noqa: BLE001 - the boundary: every error becomes a status, bugs are logged there
                        status = write_status(error, method=name)
                    # Not while the error is handled: gRPC keeps what an abort raises, and that would keep the
                    # error, its frames and the message.
                    await context.abort(*status)
                except grpc.aio.InternalError:
                    # What was sent met a connection just closed. No status can reach the client, the
                    # cancellation is due.
                    raise asyncio.CancelledError from None

        return handle

    async def _generate(self, context: Context) -> pb.GenerateResponse:
        async def collect(call: LiveCall) -> pb.GenerateResponse:
            answers = await call.take()
            for answer in answers:
                check_completed(answer)
            return convert_answers.write_answers(call.request_id, answers)

        parse = functools.partial(_parse, pb.GenerateRequest)
        return await self._run(
            functools.partial(self._generation, parse, context), context, collect, whole=True
        )

    async def _score(self, context: Context) -> pb.ScoreResponse:
        async def collect(call: LiveCall) -> pb.ScoreResponse:
            scores = await call.take()
            for score in scores:
                check_completed(score)
            return write_scores(call.request_id, scores)

        def read(raw: bytes, connection: str, owner: str) -> _Submission:
            assert self._generator is not None
            message = _parse(pb.ScoreRequest, raw)
            self._check_model(message)
            ids = read_ids(context.invocation_metadata())
            request = replace(
                read_score_request(message, connection=connection),
                owner=owner,
                correlation_id=ids.correlation_id,
                traceparent=ids.traceparent,
            )
            return request.request_id, functools.partial(self._generator.submit_score, request)

        return await self._run(read, context, collect, whole=True)

    async def _generate_stream(self, context: Context) -> None:
        async def forward(call: LiveCall) -> None:
            first, ended = True, False
            while not ended:
                for update in await call.take():
                    check_completed(update)
                    await context.write(convert_answers.write_update(update, first=first))
                    first, ended = False, update.is_last

        def parse(raw: bytes) -> pb.GenerateRequest:
            message = _parse(pb.GenerateStreamRequest, raw)
            if not message.HasField("request"):
                raise InvalidRequestError([FieldViolation("request", "not set, expected a GenerateRequest")])
            if message.request.sampling.HasField("best_of"):
                found = (
                    "found with GenerateStream, which cannot know yet which answers are best; expected "
                    "none, or Generate"
                )
                raise InvalidRequestError([FieldViolation("sampling.best_of", found)])
            return message.request

        await self._run(functools.partial(self._generation, parse, context), context, forward, whole=False)

    def _generation(
        self,
        parse: Callable[[bytes], pb.GenerateRequest],
        context: Context,
        raw: bytes,
        connection: str,
        owner: str,
    ) -> _Submission:
        """Read a request for generated text. A pool thread."""
        assert self._generator is not None
        message = parse(raw)
        self._check_model(message)
        request = convert.read_generation_request(
            message, connection=connection, check=self._generator.violations
        )
        ids = read_ids(context.invocation_metadata())
        request = replace(
            request, owner=owner, correlation_id=ids.correlation_id, traceparent=ids.traceparent
        )
        return request.request_id, functools.partial(self._generator.submit, request)

    def _check_model(self, message: pb.GenerateRequest | pb.ScoreRequest) -> None:
        assert self._info is not None
        for field, served in (("model", self._info.model_id), ("fingerprint", self._info.fingerprint)):
            asked = getattr(message, field)
            if message.HasField(field) and asked != served:
                raise ModelMismatchError(
                    f"{field} {asked[:200]!r} was asked for, this worker serves {served!r}; "
                    f"ask for that, leave {field} out, or call another worker"
                )

    async def _run(
        self,
        read: _Reader,
        context: Context,
        consume: Callable[[LiveCall], Awaitable[R]],
        *,
        whole: bool,
    ) -> R:
        """Admit a request, let ``consume`` take its updates, and abort it if that ends before the request
        does.
        """
        raw = await self._messages.message(context)
        owner = caller_of(context, by_token=self._by_token)
        call = self._calls.call(whole=whole, owner=owner)
        admission = self._threads.admit(
            len(raw), functools.partial(self._admit, read, raw, context.peer(), call)
        )
        del raw  # which would else be kept for as long as the answer takes
        try:
            await admission.result()
            self._calls.admitted(call)
            return await consume(call)
        finally:
            call.abandoned = True
            admission.afterwards(call.leave)
            del (
                admission
            )  # holds the error that it ended with, which holds this frame: a circle around the message

    def _admit(self, read: _Reader, raw: bytes, connection: str, call: LiveCall) -> None:
        """Parse, check and submit a request. A pool thread."""
        if call.abandoned:
            return
        request_id, submit = read(raw, connection, call.owner)
        self._calls.submit(request_id, call, submit)

    async def _abort_requests(self, context: Context) -> pb.AbortResponse:
        raw = await self._small_messages.message(context)
        request_ids, owner = (
            convert.read_abort_request(_parse(pb.AbortRequest, raw)),
            caller_of(context, by_token=self._by_token),
        )
        found = [call for name in dict.fromkeys(request_ids) if (call := self._calls.find(name, owner))]
        for call in found:
            call.cancel()
        return pb.AbortResponse(request_ids=[call.request_id for call in found])

    async def _tokenize(self, context: Context) -> pb.TokenizeResponse:
        raw = await self._messages.message(context)

        def work() -> pb.TokenizeResponse:
            assert self._generator is not None
            prompt = convert_prompt.read_prompt(_parse(pb.TokenizeRequest, raw).input)
            token_ids, text = self._generator.tokenize(prompt)
            response = pb.TokenizeResponse(text=text)
            convert_fields.extend_ids(response.token_ids, token_ids)
            return response

        return await self._threads.admit(len(raw), work).result()

    async def _detokenize(self, context: Context) -> pb.DetokenizeResponse:
        raw = await self._messages.message(context)

        def work() -> pb.DetokenizeResponse:
            assert self._generator is not None
            message = _parse(pb.DetokenizeRequest, raw)
            token_ids = convert_prompt.read_token_ids(message.token_ids, field="token_ids")
            text = self._generator.detokenize(token_ids, keep_special_tokens=message.keep_special_tokens)
            return pb.DetokenizeResponse(text=text)

        return await self._threads.admit(len(raw), work).result()

    async def _get_model_info(self, _context: Context) -> pb.GetModelInfoResponse:
        assert self._info is not None
        return convert_info.write_model_info(self._info)

    async def _get_load(self, _context: Context) -> pb.GetLoadResponse:
        return convert_info.write_load(self.load())


def _parse(kind: type[M], raw: bytes) -> M:
    check_fields(raw, kind.DESCRIPTOR)
    try:
        return kind.FromString(raw)
    except DecodeError as error:
        found = (
            f"not a valid {kind.DESCRIPTOR.name} ({error}); check the client's worker.proto, and that all "
            f"text is UTF-8"
        )
        raise InvalidRequestError([FieldViolation("request", found)]) from error
