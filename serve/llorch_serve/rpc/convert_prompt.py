"""The bridge between protobuf messages and the plain types of ``llorch_serve.requests``: prompts, read and
written.

Used by the bridges of requests, for generation (``convert.py``) and for scores (``convert_score.py``).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from llorch_serve.errors import FieldViolation, InvalidRequestError
from llorch_serve.requests import (
    ChatMessage,
    ChatPrompt,
    Prompt,
    TextPrompt,
    TokenPrompt,
    ToolCall,
    ToolChoice,
    ToolMode,
)
from llorch_serve.rpc import worker_pb2 as pb
from llorch_serve.rpc.convert_fields import (
    MAX_ITEMS,
    check_count,
    copied_ids,
    extend_field,
    optional_text,
    set_field,
)

MAX_TOKEN_IDS: Final = (
    2**20
)  # beyond any context; keeps a hostile 16 MiB message from becoming a gigabyte of ints

_MODES_TO_WIRE: Final = {
    ToolMode.AUTO: pb.TOOL_MODE_AUTO,
    ToolMode.NONE: pb.TOOL_MODE_NONE,
    ToolMode.REQUIRED: pb.TOOL_MODE_REQUIRED,
}
_MODES: Final = {pb.TOOL_MODE_UNSPECIFIED: ToolMode.AUTO} | {
    wire: mode for mode, wire in _MODES_TO_WIRE.items()
}


def read_prompt(message: pb.Input) -> Prompt:
    """Return the prompt. Raises InvalidRequestError."""
    bad: list[FieldViolation] = []
    prompt = read_input(message, bad)
    if bad or prompt is None:
        raise InvalidRequestError(bad)
    return prompt


def read_token_ids(ids: Sequence[int], *, field: str) -> tuple[int, ...]:
    """Return token ids as a tuple. Raises InvalidRequestError if they are too many."""
    bad: list[FieldViolation] = []
    check_count(field, len(ids), MAX_TOKEN_IDS, bad)
    if bad:
        raise InvalidRequestError(bad)
    return copied_ids(ids)


def read_input(message: pb.Input, bad: list[FieldViolation], field: str = "input") -> Prompt | None:
    """Return the prompt, or None where there is none to return; add to ``bad`` what is wrong with
    ``field``.
    """
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
    fits = check_count(field, len(message.ids), MAX_TOKEN_IDS, bad)
    return TokenPrompt(copied_ids(message.ids)) if fits else None


def _read_chat(message: pb.ChatInput, field: str, bad: list[FieldViolation]) -> ChatPrompt | None:
    if not message.messages:
        bad.append(FieldViolation(f"{field}.chat.messages", "found none, expected at least one message"))
        return None
    if not check_count(f"{field}.chat.messages", len(message.messages), MAX_ITEMS, bad):
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
    tools_fit = check_count(f"{field}.chat.tools", len(message.tools), MAX_ITEMS, bad)
    documents_fit = check_count(f"{field}.chat.documents", len(message.documents), MAX_ITEMS, bad)
    if not (tools_fit and documents_fit):
        return None
    return ChatPrompt(
        tuple(_read_message(item) for item in message.messages),
        tools=tuple(message.tools),
        documents=tuple(message.documents),
        template_name=optional_text(message, "template_name"),
        template_arguments=optional_text(message, "template_arguments"),
        continue_final_message=message.continue_final_message,
        allow_control_tokens=message.allow_control_tokens,
        tool_choice=_read_choice(message.tool_choice, f"{field}.chat.tool_choice", bad),
        parallel_tool_calls=message.parallel_tool_calls or not message.HasField("parallel_tool_calls"),
    )


def _read_choice(message: pb.ToolChoice, field: str, bad: list[FieldViolation]) -> ToolChoice:
    mode = _MODES.get(message.mode)
    if mode is None:
        bad.append(FieldViolation(f"{field}.mode", f"found {message.mode}, expected 1 to {max(_MODES)}"))
        return ToolChoice()
    if not check_count(f"{field}.names", len(message.names), MAX_ITEMS, bad):
        return ToolChoice()
    return ToolChoice(mode, tuple(message.names))


def _read_message(item: pb.ChatMessage) -> ChatMessage:
    return ChatMessage(
        item.role,
        tuple(item.content_parts) or optional_text(item, "content"),
        name=optional_text(item, "name"),
        tool_calls=tuple(ToolCall(call.name, call.arguments, call.id) for call in item.tool_calls),
        tool_call_id=optional_text(item, "tool_call_id"),
        reasoning_content=optional_text(item, "reasoning_content"),
    )


def write_prompt(prompt: Prompt) -> pb.Input:
    """Return the message. Raises InvalidRequestError as :func:`write_generation_request` does."""
    bad: list[FieldViolation] = []
    message = pb.Input()
    fill_input(message, prompt, bad)
    if bad:
        raise InvalidRequestError(bad)
    return message


def fill_input(
    message: pb.Input | pb.Continuation, prompt: Prompt, bad: list[FieldViolation], field: str = "input"
) -> None:
    """Fill in a prompt; add to ``bad`` what no message can carry."""
    match prompt:
        case TextPrompt(text, added):
            set_field(message, "text", text, f"{field}.text", bad)
            if not added:
                found = "found false, which cannot be asked for over gRPC; send token ids"
                bad.append(FieldViolation(f"{field}.add_special_tokens", found))
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
    if prompt.tool_choice != ToolChoice():
        message.tool_choice.mode = _MODES_TO_WIRE[prompt.tool_choice.mode]
        extend_field(message.tool_choice.names, prompt.tool_choice.names, f"{path}.tool_choice.names", bad)
    if not prompt.parallel_tool_calls:
        message.parallel_tool_calls = False


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
