"""The methods of GenerationService, between gRPC's event loop and a TextGenerator.

Input: raw messages of calls. The front desk has ``rpc/submission.py`` parse, check, tokenise and submit them
on a small thread pool, so that a long prompt never holds up another stream's tokens. Output: messages built
from what the live calls collect, or one status.

Requests arrive as bytes and are not parsed by gRPC, whose answer to a malformed message would be INTERNAL
where the caller is to blame. They are received by the methods themselves (``rpc/receiving.py``), once a call
is not refused; a message is let go of as soon as it has been read.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from typing import Any, Final

import grpc
from google.protobuf.message import Message

from llorch_serve.calls.callers import Caller
from llorch_serve.calls.correlation import echo, read_ids
from llorch_serve.calls.front_desk import FrontDesk, MessageCalls
from llorch_serve.calls.live_call import LiveCall, check_completed
from llorch_serve.calls.long_answers import places_of, written
from llorch_serve.engine.load import Load
from llorch_serve.rpc import convert, convert_answers, convert_fields, convert_info, convert_prompt
from llorch_serve.rpc import worker_pb2 as pb
from llorch_serve.rpc.call_limit import Context
from llorch_serve.rpc.callers import caller_of
from llorch_serve.rpc.convert_embed import write_embeddings
from llorch_serve.rpc.convert_score import write_scores
from llorch_serve.rpc.receiving import Receiving, SmallReceiving
from llorch_serve.rpc.status import write_status
from llorch_serve.rpc.submission import (
    parse,
    parse_stream_request,
    submit_embedding,
    submit_generation,
    submit_score,
)

_ALWAYS: Final = frozenset({"GetLoad", "Abort"})  # answered while loading and draining too
_WORK: Final = frozenset(
    {"Generate", "GenerateStream", "Score", "Embed", "Tokenize", "Detokenize"}
)  # what keeps a worker from being idle

_ABORT_S: Final = 0.1  # for ids to abort to arrive, while other calls' wait: there may be many

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
        self._messages, self._ids_to_abort = Receiving(max_message_bytes), SmallReceiving(_ABORT_S)

    def method_handlers(self) -> dict[str, grpc.RpcMethodHandler[Any, Any]]:
        """Return the service's methods by name, for registration with a server."""
        unary, stream = grpc.stream_unary_rpc_method_handler, grpc.stream_stream_rpc_method_handler
        bodies: dict[str, tuple[Any, Body, type[Message]]] = {
            "Generate": (unary, self._generate, pb.GenerateResponse),
            "GenerateStream": (stream, self._generate_stream, pb.GenerateStreamResponse),
            "Score": (unary, self._score, pb.ScoreResponse),
            "Embed": (unary, self._embed, pb.EmbedResponse),
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
            return submit_generation(self._desk, parse(pb.GenerateRequest, raw), caller, calls, whole=True)

        # No local holds the message, which would be kept for as long as the answer takes.
        async with self._admit(await self._messages.message(context), context, read) as call:
            answers = await call.take()
            for answer in answers:
                check_completed(answer)
            write = functools.partial(convert_answers.write_answers, call.request_id, answers)
            return await written(places_of(answers), write)

    async def _generate_stream(self, context: Context) -> None:
        def read(raw: bytes, caller: Caller, calls: MessageCalls) -> LiveCall:
            return submit_generation(self._desk, parse_stream_request(raw), caller, calls, whole=False)

        # No local holds the message, as above.
        async with self._admit(await self._messages.message(context), context, read) as call:
            first, ended = True, False
            while not ended:
                for update in await call.take():
                    if update.completion is not None:
                        check_completed(update)
                        ended = update.is_last
                    write = functools.partial(convert_answers.write_update, update, first=first)
                    await context.write(await written(places_of([update]), write))
                    first = False

    async def _score(self, context: Context) -> pb.ScoreResponse:
        read = functools.partial(submit_score, self._desk)
        # No local holds the message, as above.
        async with self._admit(await self._messages.message(context), context, read) as call:
            scores = await call.take()
            for score in scores:
                check_completed(score)
            write = functools.partial(write_scores, call.request_id, scores)
            return await written(places_of(scores), write)

    async def _embed(self, context: Context) -> pb.EmbedResponse:
        read = functools.partial(submit_embedding, self._desk)
        # No local holds the message, as above.
        async with self._admit(await self._messages.message(context), context, read) as call:
            vectors = await call.take()
            for vector in vectors:
                check_completed(vector)
            # Millions of numbers take as long to write as other calls would notice.
            return await asyncio.to_thread(write_embeddings, call.request_id, vectors)

    def _admit(self, raw: bytes, context: Context, read: _Reader) -> AbstractAsyncContextManager[LiveCall]:
        """Have a received message read; give its call, which is aborted if it has not ended by then."""
        caller = caller_of(context, by_token=self._by_token)
        return self._desk.admit(len(raw), caller.owner, functools.partial(read, raw, caller))

    async def _abort_requests(self, context: Context) -> pb.AbortResponse:
        raw = await self._ids_to_abort.message(context)
        request_ids = convert.read_abort_request(parse(pb.AbortRequest, raw))
        owner = caller_of(context, by_token=self._by_token).owner
        return pb.AbortResponse(request_ids=await self._desk.cancel_everywhere(request_ids, owner))

    async def _tokenize(self, context: Context) -> pb.TokenizeResponse:
        raw = await self._messages.message(context)

        def work() -> pb.TokenizeResponse:
            prompt = convert_prompt.read_prompt(parse(pb.TokenizeRequest, raw).input)
            token_ids, text = self._desk.generator.tokenize(prompt)
            response = pb.TokenizeResponse(text=text)
            convert_fields.extend_ids(response.token_ids, token_ids)
            return response

        return await self._desk.run(len(raw), work)

    async def _detokenize(self, context: Context) -> pb.DetokenizeResponse:
        raw = await self._messages.message(context)

        def work() -> pb.DetokenizeResponse:
            message = parse(pb.DetokenizeRequest, raw)
            token_ids = convert_prompt.read_token_ids(message.token_ids, field="token_ids")
            text = self._desk.generator.detokenize(token_ids, keep_special_tokens=message.keep_special_tokens)
            return pb.DetokenizeResponse(text=text)

        return await self._desk.run(len(raw), work)

    async def _get_model_info(self, _context: Context) -> pb.GetModelInfoResponse:
        assert self._desk.info is not None
        return convert_info.write_model_info(self._desk.info)

    async def _get_load(self, _context: Context) -> pb.GetLoadResponse:
        return convert_info.write_load(self._load())
