"""From a message's bytes to a submitted request: parsed, checked, converted. All of it on a pool thread.

Used by ``rpc/servicer.py``, whose methods hand it to the front desk.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import TypeVar

from google.protobuf.message import DecodeError, Message

from llorch_serve.calls.callers import Caller
from llorch_serve.calls.front_desk import FrontDesk, MessageCalls
from llorch_serve.calls.live_call import LiveCall
from llorch_serve.errors import FieldViolation, InvalidRequestError, ModelMismatchError
from llorch_serve.rpc import convert
from llorch_serve.rpc import worker_pb2 as pb
from llorch_serve.rpc.convert_embed import read_embed_request
from llorch_serve.rpc.convert_score import read_score_request
from llorch_serve.rpc.wire import check_fields

M = TypeVar("M", bound=Message)


def parse(kind: type[M], raw: bytes) -> M:
    """Return a message. Raises InvalidRequestError for bytes that are none, or that would take too much."""
    check_fields(raw, kind.DESCRIPTOR)
    try:
        return kind.FromString(raw)
    except DecodeError as error:
        found = (
            f"not a valid {kind.DESCRIPTOR.name} ({error}); check the client's worker.proto, and that all "
            f"text is UTF-8"
        )
        raise InvalidRequestError([FieldViolation("request", found)]) from error


def parse_stream_request(raw: bytes) -> pb.GenerateRequest:
    """Return the request inside a GenerateStreamRequest. Raises InvalidRequestError."""
    message = parse(pb.GenerateStreamRequest, raw)
    if not message.HasField("request"):
        raise InvalidRequestError([FieldViolation("request", "not set, expected a GenerateRequest")])
    if message.request.sampling.HasField("best_of"):
        found = (
            "found with GenerateStream, which cannot know yet which answers are best; expected "
            "none, or Generate"
        )
        raise InvalidRequestError([FieldViolation("sampling.best_of", found)])
    return message.request


def submit_generation(
    desk: FrontDesk, message: pb.GenerateRequest, caller: Caller, calls: MessageCalls, *, whole: bool
) -> LiveCall:
    """Read a request for generated text and submit it. A pool thread."""
    generator = desk.generator
    _check_model(desk, message)
    request = convert.read_generation_request(message, connection=caller.client, check=generator.violations)
    request = replace(
        request,
        owner=caller.owner,
        correlation_id=caller.correlation_id,
        traceparent=caller.traceparent,
    )
    submit = functools.partial(generator.submit, request)
    return calls.submit(request.request_id, submit, whole=whole)


def submit_score(desk: FrontDesk, raw: bytes, caller: Caller, calls: MessageCalls) -> LiveCall:
    """Read a request for scores and submit it. A pool thread."""
    message = parse(pb.ScoreRequest, raw)
    _check_model(desk, message)
    request = replace(
        read_score_request(message, connection=caller.client),
        owner=caller.owner,
        correlation_id=caller.correlation_id,
        traceparent=caller.traceparent,
    )
    submit = functools.partial(desk.generator.submit_score, request)
    return calls.submit(request.request_id, submit, whole=True)


def submit_embedding(desk: FrontDesk, raw: bytes, caller: Caller, calls: MessageCalls) -> LiveCall:
    """Read a request for the vectors of texts and submit it. A pool thread."""
    message = parse(pb.EmbedRequest, raw)
    _check_model(desk, message)
    request = replace(
        read_embed_request(message, connection=caller.client),
        owner=caller.owner,
        correlation_id=caller.correlation_id,
        traceparent=caller.traceparent,
    )
    submit = functools.partial(desk.generator.submit_embedding, request)
    return calls.submit(request.request_id, submit, whole=True)


def _check_model(desk: FrontDesk, message: pb.GenerateRequest | pb.ScoreRequest | pb.EmbedRequest) -> None:
    info = desk.info
    assert info is not None
    for field, served in (("model", info.names), ("fingerprint", (info.fingerprint,))):
        asked = getattr(message, field)
        if message.HasField(field) and asked not in served:
            raise ModelMismatchError(
                f"{field} {asked[:200]!r} was asked for, this worker serves {', '.join(map(repr, served))}; "
                f"ask for that, leave {field} out, or call another worker"
            )
