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

from llorch_serve.calls.callers import Caller
from llorch_serve.calls.correlation import echo, read_ids
from llorch_serve.calls.front_desk import FrontDesk, MessageCalls
from llorch_serve.calls.live import LiveCall, check_completed
from llorch_serve.engine.load import Load
from llorch_serve.errors import FieldViolation, InvalidRequestError, ModelMismatchError
from llorch_serve.rpc import convert, convert_answers, convert_fields, convert_info, convert_prompt
from llorch_serve.rpc import worker_pb2 as pb
from llorch_serve.rpc.call_limit import Context
from llorch_serve.rpc.callers import caller_of
from llorch_serve.rpc.convert_score import read_score_request, write_scores
from llorch_serve.rpc.receiving import Receiving, SmallReceiving
from llorch_serve.rpc.status import write_status
from llorch_serve.rpc.wire import check_fields

_ALWAYS: Final = frozenset({"GetLoad", "Abort"})  # answered while loading and draining too
_WORK: Final = frozenset(
    {"Generate", "GenerateStream", "Score", "Tokenize", "Detokenize"}
)  # what keeps a worker from being idle

M = TypeVar("M", bound=Message)
R = TypeVar("R")
Body = Callable[[Context], Awaitable[Any]]
_Reader = Callable[[bytes, Caller, MessageCalls], LiveCall]
"""Reads a message of a caller and submits what it asks for. A pool thread."""


class GenerationServicer:
    """Serves what its front desk admits. All methods belong to the event loop that it is made on.

    load: returns the worker's state and how busy it is. max_message_bytes: largest message. by_token: callers
        are known by their tokens.

    While the desk is closed, every call but GetLoad and Abort ends with UNAVAILABLE.
    """

    def __init__(
        self, desk: FrontDesk, load: Callable[[], Load], *, max_message_bytes: int, by_token: bool = False
    ) -> None:
        self._desk = desk
        self._load = load
        self._by_token = by_token
        self._messages, self._small_messages = Receiving(max_message_bytes), SmallReceiving()

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
            with self._desk.call(is_use=name in _WORK):
                try:
                    try:
                        if told := echo(read_ids(context.invocation_metadata())):
                            await context.send_initial_metadata(told)
                        if name not in _ALWAYS:
                            self._desk.check_open()
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
        def read(raw: bytes, caller: Caller, calls: MessageCalls) -> LiveCall:
            return self._submit_generation(_parse(pb.GenerateRequest, raw), caller, calls, whole=True)

        async def collect(call: LiveCall) -> pb.GenerateResponse:
            answers = await call.take()
            for answer in answers:
                check_completed(answer)
            return convert_answers.write_answers(call.request_id, answers)

        return await self._answer(context, read, collect)

    async def _generate_stream(self, context: Context) -> None:
        def read(raw: bytes, caller: Caller, calls: MessageCalls) -> LiveCall:
            return self._submit_generation(_parse_stream_request(raw), caller, calls, whole=False)

        async def forward(call: LiveCall) -> None:
            first, ended = True, False
            while not ended:
                for update in await call.take():
                    check_completed(update)
                    await context.write(convert_answers.write_update(update, first=first))
                    first, ended = False, update.is_last

        await self._answer(context, read, forward)

    async def _score(self, context: Context) -> pb.ScoreResponse:
        async def collect(call: LiveCall) -> pb.ScoreResponse:
            scores = await call.take()
            for score in scores:
                check_completed(score)
            return write_scores(call.request_id, scores)

        return await self._answer(context, self._submit_score, collect)

    def _submit_generation(
        self, message: pb.GenerateRequest, caller: Caller, calls: MessageCalls, *, whole: bool
    ) -> LiveCall:
        """Read a request for generated text and submit it. A pool thread."""
        generator = self._desk.generator
        self._check_model(message)
        request = convert.read_generation_request(
            message, connection=caller.client, check=generator.violations
        )
        request = replace(
            request,
            owner=caller.owner,
            correlation_id=caller.correlation_id,
            traceparent=caller.traceparent,
        )
        submit = functools.partial(generator.submit, request)
        return calls.submit(request.request_id, submit, whole=whole)

    def _submit_score(self, raw: bytes, caller: Caller, calls: MessageCalls) -> LiveCall:
        """Read a request for scores and submit it. A pool thread."""
        message = _parse(pb.ScoreRequest, raw)
        self._check_model(message)
        request = replace(
            read_score_request(message, connection=caller.client),
            owner=caller.owner,
            correlation_id=caller.correlation_id,
            traceparent=caller.traceparent,
        )
        submit = functools.partial(self._desk.generator.submit_score, request)
        return calls.submit(request.request_id, submit, whole=True)

    def _check_model(self, message: pb.GenerateRequest | pb.ScoreRequest) -> None:
        info = self._desk.info
        assert info is not None
        for field, served in (("model", info.model_id), ("fingerprint", info.fingerprint)):
            asked = getattr(message, field)
            if message.HasField(field) and asked != served:
                raise ModelMismatchError(
                    f"{field} {asked[:200]!r} was asked for, this worker serves {served!r}; "
                    f"ask for that, leave {field} out, or call another worker"
                )

    async def _answer(
        self, context: Context, read: _Reader, consume: Callable[[LiveCall], Awaitable[R]]
    ) -> R:
        """Receive a message, have it read, and let ``consume`` write what its call gives."""
        # No local holds the message, which would be kept for as long as the answer takes.
        return await self._admit(await self._messages.message(context), context, read, consume)

    def _admit(
        self, raw: bytes, context: Context, read: _Reader, consume: Callable[[LiveCall], Awaitable[R]]
    ) -> Awaitable[R]:
        caller = caller_of(context, by_token=self._by_token)
        return self._desk.answer(len(raw), caller.owner, functools.partial(read, raw, caller), consume)

    async def _abort_requests(self, context: Context) -> pb.AbortResponse:
        raw = await self._small_messages.message(context)
        request_ids = convert.read_abort_request(_parse(pb.AbortRequest, raw))
        owner = caller_of(context, by_token=self._by_token).owner
        return pb.AbortResponse(request_ids=self._desk.cancel(request_ids, owner))

    async def _tokenize(self, context: Context) -> pb.TokenizeResponse:
        raw = await self._messages.message(context)

        def work() -> pb.TokenizeResponse:
            prompt = convert_prompt.read_prompt(_parse(pb.TokenizeRequest, raw).input)
            token_ids, text = self._desk.generator.tokenize(prompt)
            response = pb.TokenizeResponse(text=text)
            convert_fields.extend_ids(response.token_ids, token_ids)
            return response

        return await self._desk.run(len(raw), work)

    async def _detokenize(self, context: Context) -> pb.DetokenizeResponse:
        raw = await self._messages.message(context)

        def work() -> pb.DetokenizeResponse:
            message = _parse(pb.DetokenizeRequest, raw)
            token_ids = convert_prompt.read_token_ids(message.token_ids, field="token_ids")
            text = self._desk.generator.detokenize(token_ids, keep_special_tokens=message.keep_special_tokens)
            return pb.DetokenizeResponse(text=text)

        return await self._desk.run(len(raw), work)

    async def _get_model_info(self, _context: Context) -> pb.GetModelInfoResponse:
        assert self._desk.info is not None
        return convert_info.write_model_info(self._desk.info)

    async def _get_load(self, _context: Context) -> pb.GetLoadResponse:
        return convert_info.write_load(self._load())


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


def _parse_stream_request(raw: bytes) -> pb.GenerateRequest:
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
