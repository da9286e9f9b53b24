"""The bridge between protobuf messages and the plain types of ``llorch_serve.requests``: what is asked for.

``read_*`` turn messages that came over the wire into plain types and raise InvalidRequestError with every bad
field; ``write_*`` do the reverse. Ranges of sampling values are not judged here: the generator does that, for
every caller. Here are refused only what has no plain form, and sizes no honest request has, before they are copied.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable, MutableSequence, Sequence
from typing import Final, TypeVar

from google.protobuf.message import Message

from llorch_serve.errors import FieldViolation, InvalidRequestError
from llorch_serve.requests import (
    MAX_PRIORITY,
    MIN_PRIORITY,
    ChatMessage,
    ChatPrompt,
    GenerationRequest,
    Prompt,
    TextPrompt,
    TokenPrompt,
    ToolCall,
)
from llorch_serve.rpc import convert_structured
from llorch_serve.rpc import worker_pb2 as pb
from llorch_serve.sampling import SamplingParams

MAX_REQUEST_ID_BYTES: Final = 128
MAX_TOKEN_IDS: Final = (
    2**20
)  # beyond any context; keeps a hostile 16 MiB message from becoming a gigabyte of ints
MAX_ABORTS: Final = 1024  # as many as can be live
MAX_ITEMS: Final = 2**14  # likewise for messages, stop strings and stop token ids

_SCALARS: Final = (
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "repetition_penalty",
    "seed",
    "max_tokens",
    "best_of",
    "prompt_logprobs",
    "typical_p",
    "repeat_last_n",
    "presence_penalty",
    "frequency_penalty",
    "logprobs",
)

T = TypeVar("T")


Check = Callable[[Prompt, SamplingParams], list[FieldViolation]]
"""Returns what is bad about a prompt and its sampling."""


# Requests, wire to plain.


def read_generation_request(
    message: pb.GenerateRequest, *, connection: str = "", check: Check | None = None
) -> GenerationRequest:
    """Return the request; one without a request_id gets a random one, one without a client_id is ``connection``'s.

    check: asked what is bad about prompt and sampling if anything else is, so that the caller learns everything at once.
    Raises InvalidRequestError.
    """
    bad: list[FieldViolation] = []
    prompt = read_input(message.input, bad)
    sampling = _read_sampling(message.sampling, bad)
    request_id = read_ids(message, bad)
    if bad or prompt is None:
        if check is not None:
            own = check(prompt or TextPrompt("a"), sampling)
            bad += [v for v in own if prompt is not None or v.field.startswith("sampling")]
        raise InvalidRequestError(bad)
    return GenerationRequest(
        request_id,
        prompt,
        sampling,
        client_id=message.client_id or connection,
        priority=message.priority,
        fingerprint=_optional(message, "fingerprint"),
    )


def read_ids(message: pb.GenerateRequest | pb.ScoreRequest, bad: list[FieldViolation]) -> str:
    """Return a message's request_id, or a random one if it has none; add to ``bad`` what is wrong with ids and priority."""
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
    if _check_count("request_ids", len(message.request_ids), MAX_ABORTS, bad):
        for index, request_id in enumerate(message.request_ids):
            size = len(request_id.encode())
            if not 0 < size <= MAX_REQUEST_ID_BYTES:
                found = f"found {size} bytes, expected 1 to {MAX_REQUEST_ID_BYTES}"
                bad.append(FieldViolation(f"request_ids[{index}]", found))
    if bad:
        raise InvalidRequestError(bad)
    return tuple(message.request_ids)


def read_prompt(message: pb.Input) -> Prompt:
    """Return the prompt. Raises InvalidRequestError."""
    bad: list[FieldViolation] = []
    prompt = read_input(message, bad)
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


def read_input(message: pb.Input, bad: list[FieldViolation], field: str = "input") -> Prompt | None:
    """Return the prompt, or None where there is none to return; add to ``bad`` what is wrong with ``field``."""
    kind = message.WhichOneof("kind")
    if kind == "text":
        return TextPrompt(message.text)
    if kind == "tokens":
        return read_tokens(message.tokens, f"{field}.tokens.ids", bad)
    if kind == "chat":
        return _read_chat(message.chat, field, bad)
    bad.append(FieldViolation(field, "not set, expected one of text, tokens and chat"))
    return None


def read_tokens(message: pb.TokenInput, field: str, bad: list[FieldViolation]) -> TokenPrompt | None:
    """Return token ids, or None where they are too many."""
    fits = _check_count(field, len(message.ids), MAX_TOKEN_IDS, bad)
    return TokenPrompt(tuple(message.ids)) if fits else None


def _read_chat(message: pb.ChatInput, field: str, bad: list[FieldViolation]) -> ChatPrompt | None:
    if not message.messages:
        bad.append(FieldViolation(f"{field}.chat.messages", "found none, expected at least one message"))
        return None
    if not _check_count(f"{field}.chat.messages", len(message.messages), MAX_ITEMS, bad):
        return None
    for index, item in enumerate(message.messages):
        if not item.role:
            bad.append(
                FieldViolation(
                    f"{field}.chat.messages[{index}].role", "found an empty role, expected one like user"
                )
            )
        if item.HasField("content") and item.content_parts:
            bad.append(
                FieldViolation(
                    f"{field}.chat.messages[{index}].content_parts",
                    "found beside content, expected one of the two",
                )
            )
    tools_fit = _check_count(f"{field}.chat.tools", len(message.tools), MAX_ITEMS, bad)
    documents_fit = _check_count(f"{field}.chat.documents", len(message.documents), MAX_ITEMS, bad)
    if not (tools_fit and documents_fit):
        return None
    return ChatPrompt(
        tuple(_read_message(item) for item in message.messages),
        tools=tuple(message.tools),
        documents=tuple(message.documents),
        template_name=_optional(message, "template_name"),
        template_arguments=_optional(message, "template_arguments"),
        continue_final_message=message.continue_final_message,
        allow_control_tokens=message.allow_control_tokens,
    )


def _read_message(item: pb.ChatMessage) -> ChatMessage:
    return ChatMessage(
        item.role,
        tuple(item.content_parts) or _optional(item, "content"),
        name=_optional(item, "name"),
        tool_calls=tuple(ToolCall(call.name, call.arguments, call.id) for call in item.tool_calls),
        tool_call_id=_optional(item, "tool_call_id"),
        reasoning_content=_optional(item, "reasoning_content"),
    )


def _optional(message: Message, name: str) -> str | None:
    value: str | None = getattr(message, name) if message.HasField(name) else None
    return value


def _read_sampling(message: pb.Sampling, bad: list[FieldViolation]) -> SamplingParams:
    stop_fits = _check_count("sampling.stop", len(message.stop), MAX_ITEMS, bad)
    ids_fit = _check_count("sampling.stop_token_ids", len(message.stop_token_ids), MAX_ITEMS, bad)
    bias_fits = _check_count("sampling.logit_bias", len(message.logit_bias), MAX_ITEMS, bad)
    sent = {name: getattr(message, name) for name in _SCALARS if message.HasField(name)}
    return SamplingParams(
        **sent,
        min_tokens=message.min_tokens,
        stop=tuple(message.stop) if stop_fits else (),
        stop_token_ids=tuple(message.stop_token_ids) if ids_fit else (),
        ignore_eos=message.ignore_eos,
        n=message.n if message.HasField("n") else 1,
        echo=message.echo,
        logit_bias=dict(message.logit_bias) if bias_fits else {},
        keep_special_tokens=message.keep_special_tokens,
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
    set_field(message, "request_id", request.request_id, "request_id", bad)
    if request.client_id:
        set_field(message, "client_id", request.client_id, "client_id", bad)
    if request.priority:
        set_field(message, "priority", request.priority, "priority", bad)
    set_field(message, "fingerprint", request.fingerprint, "fingerprint", bad)
    fill_input(message.input, request.prompt, bad)
    for name in (*_SCALARS, "min_tokens", "ignore_eos", "keep_special_tokens", "n", "echo"):
        value = getattr(sampling, name)
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


def write_prompt(prompt: Prompt) -> pb.Input:
    """Return the message. Raises InvalidRequestError as :func:`write_generation_request` does."""
    bad: list[FieldViolation] = []
    message = pb.Input()
    fill_input(message, prompt, bad)
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


def fill_input(
    message: pb.Input | pb.Continuation, prompt: Prompt, bad: list[FieldViolation], field: str = "input"
) -> None:
    """Fill in a prompt; add to ``bad`` what no message can carry."""
    match prompt:
        case TextPrompt(text):
            set_field(message, "text", text, f"{field}.text", bad)
        case TokenPrompt(ids):
            message.tokens.SetInParent()
            extend_field(message.tokens.ids, ids, f"{field}.tokens.ids", bad)
        case ChatPrompt():
            assert isinstance(message, pb.Input)
            _fill_chat(message.chat, prompt, f"{field}.chat", bad)


def _fill_chat(message: pb.ChatInput, prompt: ChatPrompt, path: str, bad: list[FieldViolation]) -> None:
    message.SetInParent()
    for index, item in enumerate(prompt.messages):
        _fill_message(message.messages.add(), item, f"{path}.messages[{index}]", bad)
    extend_field(message.tools, prompt.tools, f"{path}.tools", bad)
    extend_field(message.documents, prompt.documents, f"{path}.documents", bad)
    for name in ("template_name", "template_arguments", "continue_final_message", "allow_control_tokens"):
        set_field(message, name, getattr(prompt, name), f"{path}.{name}", bad)


def _fill_message(wire: pb.ChatMessage, item: ChatMessage, path: str, bad: list[FieldViolation]) -> None:
    if isinstance(item.content, tuple):
        extend_field(wire.content_parts, item.content, f"{path}.content_parts", bad)
    else:
        set_field(wire, "content", item.content, f"{path}.content", bad)
    for name in ("role", "name", "tool_call_id", "reasoning_content"):
        set_field(wire, name, getattr(item, name), f"{path}.{name}", bad)
    for index, call in enumerate(item.tool_calls):
        made = wire.tool_calls.add()
        for name in ("id", "name", "arguments"):
            set_field(made, name, getattr(call, name), f"{path}.tool_calls[{index}].{name}", bad)


def set_field(message: Message, name: str, value: object, path: str, bad: list[FieldViolation]) -> None:
    """Set a field, None leaves it absent; add to ``bad`` a value that it cannot carry."""
    if value is None:
        return
    try:
        setattr(message, name, value)
    except ValueError as error:  # out of the wire type's range, or text that UTF-8 cannot encode
        bad.append(FieldViolation(path, f"cannot be sent: {error}"))


def extend_field(
    target: MutableSequence[T], values: Sequence[T], path: str, bad: list[FieldViolation]
) -> None:
    """Extend a repeated field; add to ``bad`` values that it cannot carry."""
    try:
        target.extend(values)
    except ValueError as error:
        bad.append(FieldViolation(path, f"cannot be sent: {error}"))
