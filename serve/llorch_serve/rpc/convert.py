"""The only bridge between protobuf messages and the plain types of ``llorch_serve.requests``.

``read_*`` turn messages that came over the wire into plain types and raise InvalidRequestError with every bad
field; ``write_*`` do the reverse. Ranges of sampling values are not judged here: the generator does that, for
every caller. Here are refused only what has no plain form, and sizes no honest request has, before they are copied.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable, MutableSequence, Sequence
from typing import Final, TypeVar

from google.protobuf.message import Message

from llorch_serve.errors import FieldViolation, InvalidRequestError
from llorch_serve.load import Load
from llorch_serve.requests import (
    ChatMessage,
    ChatPrompt,
    Completion,
    GenerationRequest,
    GenerationUpdate,
    ModelInfo,
    Prompt,
    TextPrompt,
    Timings,
    TokenPrompt,
)
from llorch_serve.rpc import convert_structured
from llorch_serve.rpc import worker_pb2 as pb
from llorch_serve.sampling import SamplingParams
from llorch_serve.sequence import FinishReason

MAX_REQUEST_ID_BYTES: Final = 128
MAX_TOKEN_IDS: Final = (
    2**20
)  # beyond any context; keeps a hostile 16 MiB message from becoming a gigabyte of ints
MAX_ITEMS: Final = 2**14  # likewise for messages, stop strings and stop token ids

_SCALARS: Final = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "seed", "max_tokens")

_REASON_TO_WIRE: Final = {
    FinishReason.STOP: pb.FINISH_REASON_STOP,
    FinishReason.LENGTH: pb.FINISH_REASON_LENGTH,
}
_REASON_FROM_WIRE: Final = {wire: reason for reason, wire in _REASON_TO_WIRE.items()}

T = TypeVar("T")


# Requests, wire to plain.


def read_generation_request(message: pb.GenerateRequest, *, connection: str = "") -> GenerationRequest:
    """Return the request; one without a request_id gets a random one, one without a client_id is ``connection``'s.

    Raises InvalidRequestError.
    """
    bad: list[FieldViolation] = []
    prompt = _read_input(message.input, bad)
    sampling = _read_sampling(message.sampling, bad)
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
    if bad or prompt is None:
        raise InvalidRequestError(bad)
    return GenerationRequest(request_id, prompt, sampling, client_id=message.client_id or connection)


def read_prompt(message: pb.Input) -> Prompt:
    """Return the prompt. Raises InvalidRequestError."""
    bad: list[FieldViolation] = []
    prompt = _read_input(message, bad)
    if bad or prompt is None:
        raise InvalidRequestError(bad)
    return prompt


def read_token_ids(ids: Iterable[int], *, count: int, field: str) -> tuple[int, ...]:
    """Return ``count`` token ids as a tuple. Raises InvalidRequestError if they are too many."""
    bad: list[FieldViolation] = []
    _check_count(field, count, MAX_TOKEN_IDS, bad)
    if bad:
        raise InvalidRequestError(bad)
    return tuple(ids)


def _read_input(message: pb.Input, bad: list[FieldViolation]) -> Prompt | None:
    kind = message.WhichOneof("kind")
    if kind == "text":
        return TextPrompt(message.text)
    if kind == "tokens":
        ids = message.tokens.ids
        return (
            TokenPrompt(tuple(ids))
            if _check_count("input.tokens.ids", len(ids), MAX_TOKEN_IDS, bad)
            else None
        )
    if kind == "chat":
        return _read_chat(message.chat, bad)
    bad.append(FieldViolation("input", "not set, expected one of text, tokens and chat"))
    return None


def _read_chat(message: pb.ChatInput, bad: list[FieldViolation]) -> ChatPrompt | None:
    if not message.messages:
        bad.append(FieldViolation("input.chat.messages", "found none, expected at least one message"))
        return None
    if not _check_count("input.chat.messages", len(message.messages), MAX_ITEMS, bad):
        return None
    for index, item in enumerate(message.messages):
        if not item.role:
            bad.append(
                FieldViolation(
                    f"input.chat.messages[{index}].role", "found an empty role, expected one like user"
                )
            )
    return ChatPrompt(tuple(ChatMessage(item.role, item.content) for item in message.messages))


def _read_sampling(message: pb.Sampling, bad: list[FieldViolation]) -> SamplingParams:
    stop_fits = _check_count("sampling.stop", len(message.stop), MAX_ITEMS, bad)
    ids_fit = _check_count("sampling.stop_token_ids", len(message.stop_token_ids), MAX_ITEMS, bad)
    sent = {name: getattr(message, name) for name in _SCALARS if message.HasField(name)}
    return SamplingParams(
        **sent,
        min_tokens=message.min_tokens,
        stop=tuple(message.stop) if stop_fits else (),
        stop_token_ids=tuple(message.stop_token_ids) if ids_fit else (),
        ignore_eos=message.ignore_eos,
        structured=convert_structured.read_form(message),
    )


def _check_count(field: str, found: int, limit: int, bad: list[FieldViolation]) -> bool:
    if found > limit:
        bad.append(FieldViolation(field, f"found {found} items, expected at most {limit}"))
    return found <= limit


# Requests, plain to wire.


def write_generation_request(request: GenerationRequest) -> pb.GenerateRequest:
    """Return the message. Raises InvalidRequestError for values that no message can carry (ids below 0, lone surrogates)."""
    bad: list[FieldViolation] = []
    message = pb.GenerateRequest()
    sampling = request.sampling
    _set(message, "request_id", request.request_id, "request_id", bad)
    if request.client_id:
        _set(message, "client_id", request.client_id, "client_id", bad)
    _fill_input(message.input, request.prompt, bad)
    for name in (*_SCALARS, "min_tokens", "ignore_eos"):
        value = getattr(sampling, name)
        if value is not None:
            _set(message.sampling, name, value, f"sampling.{name}", bad)
    _extend(message.sampling.stop, sampling.stop, "sampling.stop", bad)
    _extend(message.sampling.stop_token_ids, sampling.stop_token_ids, "sampling.stop_token_ids", bad)
    if sampling.structured is not None:
        convert_structured.fill_form(message.sampling, sampling.structured, bad)
    if bad:
        raise InvalidRequestError(bad)
    return message


def write_prompt(prompt: Prompt) -> pb.Input:
    """Return the message. Raises InvalidRequestError as :func:`write_generation_request` does."""
    bad: list[FieldViolation] = []
    message = pb.Input()
    _fill_input(message, prompt, bad)
    if bad:
        raise InvalidRequestError(bad)
    return message


def write_detokenize_request(
    token_ids: tuple[int, ...], *, keep_special_tokens: bool
) -> pb.DetokenizeRequest:
    """Return the message. Raises InvalidRequestError for ids below 0 or of more than 32 bits."""
    bad: list[FieldViolation] = []
    message = pb.DetokenizeRequest(keep_special_tokens=keep_special_tokens)
    _extend(message.token_ids, token_ids, "token_ids", bad)
    if bad:
        raise InvalidRequestError(bad)
    return message


def _fill_input(message: pb.Input, prompt: Prompt, bad: list[FieldViolation]) -> None:
    match prompt:
        case TextPrompt(text):
            _set(message, "text", text, "input.text", bad)
        case TokenPrompt(ids):
            message.tokens.SetInParent()
            _extend(message.tokens.ids, ids, "input.tokens.ids", bad)
        case ChatPrompt(messages):
            message.chat.SetInParent()
            for index, item in enumerate(messages):
                wire = message.chat.messages.add()
                _set(wire, "role", item.role, f"input.chat.messages[{index}].role", bad)
                _set(wire, "content", item.content, f"input.chat.messages[{index}].content", bad)


def _set(message: Message, name: str, value: object, path: str, bad: list[FieldViolation]) -> None:
    try:
        setattr(message, name, value)
    except ValueError as error:  # out of the wire type's range, or text that UTF-8 cannot encode
        bad.append(FieldViolation(path, f"cannot be sent: {error}"))


def _extend(target: MutableSequence[T], values: Sequence[T], path: str, bad: list[FieldViolation]) -> None:
    try:
        target.extend(values)
    except ValueError as error:
        bad.append(FieldViolation(path, f"cannot be sent: {error}"))


# Answers.


def write_update(
    request_id: str, text: str, token_ids: list[int], completion: Completion | None
) -> pb.GenerateStreamResponse:
    """Return one message of a stream; ``request_id`` is empty on all but the first."""
    message = pb.GenerateStreamResponse(request_id=request_id, text=text, token_ids=token_ids)
    if completion is not None:
        message.completion.CopyFrom(_write_completion(completion))
    return message


def read_update(request_id: str, message: pb.GenerateStreamResponse) -> GenerationUpdate:
    """Return the update that one message of a stream stands for."""
    completion = _read_completion(message.completion) if message.HasField("completion") else None
    return GenerationUpdate(request_id, message.text, tuple(message.token_ids), completion)


def write_answer(
    request_id: str, text: str, token_ids: list[int], completion: Completion
) -> pb.GenerateResponse:
    """Return a whole answer."""
    return pb.GenerateResponse(
        request_id=request_id, text=text, token_ids=token_ids, completion=_write_completion(completion)
    )


_USAGE_FIELDS: Final = tuple(field.name for field in pb.Usage.DESCRIPTOR.fields)


def _write_completion(completion: Completion) -> pb.Completion:
    timings = completion.timings
    return pb.Completion(
        finish_reason=_REASON_TO_WIRE[completion.reason],
        stop_matched=completion.stop_matched,
        usage=pb.Usage(**{name: getattr(completion, name) for name in _USAGE_FIELDS}),
        timings=pb.Timings(queue_s=timings.queue_s, prefill_s=timings.prefill_s, decode_s=timings.decode_s),
        seed=completion.seed,
    )


def _read_completion(message: pb.Completion) -> Completion:
    return Completion(
        # A reason that this client does not know came from a newer worker; the answer has ended all the same.
        reason=_REASON_FROM_WIRE.get(message.finish_reason, FinishReason.STOP),
        stop_matched=message.stop_matched if message.HasField("stop_matched") else None,
        **{name: getattr(message.usage, name) for name in _USAGE_FIELDS},
        seed=message.seed,
        timings=Timings(message.timings.queue_s, message.timings.prefill_s, message.timings.decode_s),
    )


_LOAD_FIELDS: Final = tuple(Load.__dataclass_fields__)


def write_load(load: Load) -> pb.GetLoadResponse:
    """Return the message."""
    return pb.GetLoadResponse(**{name: getattr(load, name) for name in _LOAD_FIELDS})


def read_load(message: pb.GetLoadResponse) -> Load:
    """Return the figures."""
    return Load(**{name: getattr(message, name) for name in _LOAD_FIELDS})


_MODEL_INFO_FIELDS: Final = tuple(
    name for name in ModelInfo.__dataclass_fields__ if name not in ("stop_token_ids", "limits")
)


def write_model_info(info: ModelInfo) -> pb.GetModelInfoResponse:
    """Return the message."""
    plain = {name: getattr(info, name) for name in _MODEL_INFO_FIELDS}
    return pb.GetModelInfoResponse(stop_token_ids=info.stop_token_ids, limits=info.limits, **plain)


def read_model_info(message: pb.GetModelInfoResponse) -> ModelInfo:
    """Return what the message says."""
    plain = {name: getattr(message, name) for name in _MODEL_INFO_FIELDS}
    return ModelInfo(stop_token_ids=tuple(message.stop_token_ids), limits=tuple(message.limits), **plain)
