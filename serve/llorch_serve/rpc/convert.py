"""The bridge between protobuf messages and the plain types of ``llorch_serve.requests``: what is asked for.

``read_*`` turn messages that came over the wire into plain types and raise InvalidRequestError with every bad
field; ``write_*`` do the reverse. Ranges of sampling values are not judged here: the generator does that, for
every caller. Here are refused only what has no plain form, and sizes no honest request has, before they are
copied.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from dataclasses import fields
from typing import Final

from llorch_serve.errors import FieldViolation, InvalidRequestError
from llorch_serve.requests import (
    MAX_PRIORITY,
    MIN_PRIORITY,
    AnswerOptions,
    GenerationRequest,
    Prompt,
    TextPrompt,
)
from llorch_serve.rpc import convert_structured
from llorch_serve.rpc import worker_pb2 as pb
from llorch_serve.rpc.convert_fields import MAX_ITEMS, check_count, extend_field, optional_text, set_field
from llorch_serve.rpc.convert_prompt import fill_input, read_input
from llorch_serve.sampling.params import SamplingParams

MAX_REQUEST_ID_BYTES: Final = 128
MAX_ABORTS: Final = 1024  # as many as can be live
# Every number that may be absent: on the wire it has the name that it has here.
_SCALARS: Final = tuple(
    each.name for each in fields(SamplingParams) if each.default is None and each.name != "structured"
)
_ALWAYS_SET: Final = ("min_tokens", "ignore_eos", "keep_special_tokens")
_ANSWERS: Final = ("n", "best_of", "prompt_logprobs", "echo")

Check = Callable[[Prompt, SamplingParams, AnswerOptions], list[FieldViolation]]
"""Returns what is bad about a prompt and its options."""


# Requests, wire to plain.


def read_generation_request(
    message: pb.GenerateRequest, *, connection: str = "", check: Check | None = None
) -> GenerationRequest:
    """Return the request; one without a request_id gets a random one, one without a client_id is
    ``connection``'s.

    check: asked what is bad about prompt and sampling if anything else is, so that the caller learns
        everything at once.
    Raises InvalidRequestError.
    """
    bad: list[FieldViolation] = []
    prompt = read_input(message.input, bad)
    sampling = _read_sampling(message.sampling, bad)
    answers = _read_answers(message.sampling)
    request_id = read_ids(message, bad)
    if bad or prompt is None:
        if check is not None:
            own = check(prompt or TextPrompt("a"), sampling, answers)
            bad += [v for v in own if prompt is not None or v.field.startswith("sampling")]
        raise InvalidRequestError(bad)
    return GenerationRequest(
        request_id,
        prompt,
        sampling,
        client_id=message.client_id or connection,
        priority=message.priority,
        fingerprint=optional_text(message, "fingerprint"),
        answers=answers,
    )


def read_ids(
    message: pb.GenerateRequest | pb.ScoreRequest | pb.EmbedRequest, bad: list[FieldViolation]
) -> str:
    """Return a message's request_id, or a random one if it has none; add to ``bad`` what is wrong with ids
    and priority.
    """
    request_id = message.request_id if message.HasField("request_id") else secrets.token_hex(8)
    size = len(request_id.encode())
    if not 0 < size <= MAX_REQUEST_ID_BYTES:
        bad.append(
            FieldViolation(
                "request_id", f"found {size} bytes, expected 1 to {MAX_REQUEST_ID_BYTES}, or no request_id"
            )
        )
    size = len(message.client_id.encode())
    if message.HasField("client_id") and not 0 < size <= MAX_REQUEST_ID_BYTES:
        bad.append(
            FieldViolation(
                "client_id", f"found {size} bytes, expected 1 to {MAX_REQUEST_ID_BYTES}, or no client_id"
            )
        )
    if not MIN_PRIORITY <= message.priority <= MAX_PRIORITY:
        expected = f"expected {MIN_PRIORITY} to {MAX_PRIORITY}, or no priority"
        bad.append(FieldViolation("priority", f"found {message.priority}, {expected}"))
    return request_id


def read_abort_request(message: pb.AbortRequest) -> tuple[str, ...]:
    """Return the ids of the requests to end. Raises InvalidRequestError."""
    bad: list[FieldViolation] = []
    if check_count("request_ids", len(message.request_ids), MAX_ABORTS, bad):
        for index, request_id in enumerate(message.request_ids):
            size = len(request_id.encode())
            if not 0 < size <= MAX_REQUEST_ID_BYTES:
                found = f"found {size} bytes, expected 1 to {MAX_REQUEST_ID_BYTES}"
                bad.append(FieldViolation(f"request_ids[{index}]", found))
    if bad:
        raise InvalidRequestError(bad)
    return tuple(message.request_ids)


def _read_sampling(message: pb.Sampling, bad: list[FieldViolation]) -> SamplingParams:
    stop_fits = check_count("sampling.stop", len(message.stop), MAX_ITEMS, bad)
    ids_fit = check_count("sampling.stop_token_ids", len(message.stop_token_ids), MAX_ITEMS, bad)
    bias_fits = check_count("sampling.logit_bias", len(message.logit_bias), MAX_ITEMS, bad)
    sent = {each.name: value for each, value in message.ListFields() if each.name in _SCALARS}
    return SamplingParams(
        **sent,
        min_tokens=message.min_tokens,
        stop=tuple(message.stop) if stop_fits else (),
        stop_token_ids=tuple(message.stop_token_ids) if ids_fit else (),
        ignore_eos=message.ignore_eos,
        logit_bias=dict(message.logit_bias) if bias_fits else {},
        keep_special_tokens=message.keep_special_tokens,
        structured=convert_structured.read_form(message),
    )


def _read_answers(message: pb.Sampling) -> AnswerOptions:
    return AnswerOptions(
        n=message.n if message.HasField("n") else 1,
        best_of=message.best_of if message.HasField("best_of") else None,
        prompt_logprobs=message.prompt_logprobs if message.HasField("prompt_logprobs") else None,
        echo=message.echo,
    )


# Requests, plain to wire.


def write_generation_request(request: GenerationRequest) -> pb.GenerateRequest:
    """Return the message. Raises InvalidRequestError for values that no message can carry (ids below 0, lone
    surrogates).
    """
    bad: list[FieldViolation] = []
    message = pb.GenerateRequest()
    sampling = request.sampling
    set_field(message, "request_id", request.request_id, "request_id", bad)
    if request.client_id:
        set_field(message, "client_id", request.client_id, "client_id", bad)
    if request.priority:
        set_field(message, "priority", request.priority, "priority", bad)
    set_field(message, "fingerprint", request.fingerprint, "fingerprint", bad)
    fill_input(message.input, request.prompt, bad)
    if request.encoded is not None:
        found = "found a prompt that has been encoded, which travels inside of a cluster only; expected none"
        bad.append(FieldViolation("encoded", found))
    named = [(name, getattr(sampling, name)) for name in (*_SCALARS, *_ALWAYS_SET)]
    for name, value in (*named, *((name, getattr(request.answers, name)) for name in _ANSWERS)):
        if value is not None:
            set_field(message.sampling, name, value, f"sampling.{name}", bad)
    extend_field(message.sampling.stop, sampling.stop, "sampling.stop", bad)
    extend_field(message.sampling.stop_token_ids, sampling.stop_token_ids, "sampling.stop_token_ids", bad)
    try:
        message.sampling.logit_bias.update(sampling.logit_bias)
    except (ValueError, TypeError) as error:
        bad.append(FieldViolation("sampling.logit_bias", f"cannot be sent: {error}"))
    if sampling.structured is not None:
        convert_structured.fill_form(message.sampling, sampling.structured, bad)
    if bad:
        raise InvalidRequestError(bad)
    return message


def write_abort_request(request_ids: Sequence[str]) -> pb.AbortRequest:
    """Return the message. Raises InvalidRequestError for lone surrogates."""
    bad: list[FieldViolation] = []
    message = pb.AbortRequest()
    extend_field(message.request_ids, request_ids, "request_ids", bad)
    if bad:
        raise InvalidRequestError(bad)
    return message


def write_detokenize_request(
    token_ids: tuple[int, ...], *, keep_special_tokens: bool
) -> pb.DetokenizeRequest:
    """Return the message. Raises InvalidRequestError for ids below 0 or of more than 32 bits."""
    bad: list[FieldViolation] = []
    message = pb.DetokenizeRequest(keep_special_tokens=keep_special_tokens)
    extend_field(message.token_ids, token_ids, "token_ids", bad)
    if bad:
        raise InvalidRequestError(bad)
    return message
