"""Prompts and messages of OpenAI's bodies, and the refusal of fields that cannot be honoured.

Used by ``openai_requests.py``, which reads everything else of a body.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Final

import msgspec

from llorch_serve.errors import FieldViolation
from llorch_serve.files.json_errors import NOT_JSON
from llorch_serve.http.fields import MAX_LISTED
from llorch_serve.http.openai_schema import ChatBody, ContentPart, Message
from llorch_serve.http.unknown_fields import is_null
from llorch_serve.requests import ChatMessage, TextPrompt, TokenPrompt, ToolCall

MAX_PROMPTS: Final = 32  # of one body
MAX_MESSAGES: Final = 2**14


def refuse(bad: list[FieldViolation], name: str, value: object, accepted: tuple[Any, ...]) -> None:
    """Add a violation unless a value of a field that cannot be honoured is one that asks for nothing."""
    if any(value is choice or (type(value) is type(choice) and value == choice) for choice in accepted):
        return
    shown = ["leaving it out" if choice is None else repr(choice) for choice in accepted]
    bad.append(FieldViolation(name, f"this worker cannot do what it asks for; accepted: {', '.join(shown)}"))


def read_prompts(
    prompt: str | list[str | int | list[int]],
    bad: list[FieldViolation],
    *,
    name: str = "prompt",
    most: int = MAX_PROMPTS,
) -> list[TextPrompt | TokenPrompt]:
    """Return the prompts of the field ``name``, at most so many; ``bad`` gets what is wrong with them."""
    if isinstance(prompt, str):
        return [TextPrompt(prompt)]
    ids = [item for item in prompt if isinstance(item, int)]
    if ids and len(ids) == len(prompt):
        return [TokenPrompt(tuple(ids))]
    if not prompt or ids or len({type(item) for item in prompt}) > 1:
        expected = "a text, token ids, a list of texts or a list of lists of token ids"
        bad.append(FieldViolation(name, f"found an empty list or one of several kinds, expected {expected}"))
    elif len(prompt) > most:
        bad.append(FieldViolation(name, f"found {len(prompt)} texts, expected at most {most}"))
    return [
        TextPrompt(item) if isinstance(item, str) else TokenPrompt(tuple(item))
        for item in prompt[:most]
        if not isinstance(item, int)
    ]


def read_messages(messages: list[Message], bad: list[FieldViolation]) -> tuple[ChatMessage, ...]:
    """Return the messages of a chat, at most MAX_MESSAGES; ``bad`` gets what is wrong with them."""
    if not 0 < len(messages) <= MAX_MESSAGES:
        bad.append(FieldViolation("messages", f"found {len(messages)}, expected 1 to {MAX_MESSAGES}"))
    read = []
    for index, message in enumerate(messages[:MAX_MESSAGES]):
        read.append(_read_message(message, index, bad))
        if _is_full(bad):
            break
    return tuple(read)


def _has_media(part: ContentPart) -> bool:
    kept = (part.image_url, part.input_audio, part.file)
    return any(len(memoryview(raw)) and not is_null(raw) for raw in kept)


def continues_last(body: ChatBody, bad: list[FieldViolation]) -> bool:
    """Tell whether the answer goes on with the last message; ``bad`` gets another message that asks for
    that.
    """
    for index, message in enumerate(body.messages[:-1]):
        if message.prefix and not _is_full(bad):
            found = "found true, expected it of the last message alone, which the answer goes on with"
            bad.append(FieldViolation(f"messages[{index}].prefix", found))
    return body.continue_final_message or bool(body.messages and body.messages[-1].prefix)


def template_arguments(body: ChatBody, bad: list[FieldViolation]) -> str | None:
    """Return the variables of the template as JSON text, with ``add_generation_prompt`` among them."""
    sent, opened = bytes(body.chat_template_kwargs).decode() or None, body.add_generation_prompt
    if opened is None:
        return sent
    name = "add_generation_prompt"
    if opened and continues_last(body, []):
        bad.append(FieldViolation(name, "found true, which continue_final_message excludes; send only one"))
    try:
        arguments = msgspec.json.decode(sent or "{}", type=dict[str, msgspec.Raw])
    except NOT_JSON:
        return sent  # no object: refused where it is read
    if name in arguments and bytes(arguments[name]) != msgspec.json.encode(opened):
        bad.append(FieldViolation(name, "differs from the one in chat_template_kwargs; send only one"))
    if opened:
        return sent
    return msgspec.json.encode(arguments | {name: opened}).decode()


def _is_full(bad: list[FieldViolation]) -> bool:
    """Tell whether there are more than will be listed: a body has room for hundreds of thousands."""
    return len(bad) > MAX_LISTED


def _read_message(message: Message, index: int, bad: list[FieldViolation]) -> ChatMessage:
    path = f"messages[{index}]"
    for name in ("refusal", "audio", "function_call", "annotations"):
        refuse(bad, f"{path}.{name}", getattr(message, name), (None, "", [], {}))
    reasoning = message.reasoning_content or message.reasoning
    if message.reasoning and message.reasoning != reasoning:
        found = "differs from reasoning_content, of which it is an older name; send only one"
        bad.append(FieldViolation(f"{path}.reasoning", found))
    calls = tuple(
        ToolCall(c.function.name, c.function.arguments or "{}", c.id or "") for c in message.tool_calls or ()
    )
    read = ChatMessage(
        message.role,
        None,
        name=message.name or None,
        tool_calls=calls,
        tool_call_id=message.tool_call_id or None,
        reasoning_content=reasoning or None,
    )
    if not isinstance(message.content, list):
        # An answer that says nothing is an empty one, which templates need not tell from none.
        says_nothing = message.role == "assistant" and not calls
        return replace(read, content=(message.content or "") if says_nothing else message.content)
    texts = []
    for place, part in enumerate(message.content):
        if _is_full(bad):
            break
        if part.type != "text" or part.text is None or _has_media(part):
            found = f"found a part of type {part.type[:32]!r}, expected type text with a text"
            bad.append(FieldViolation(f"{path}.content[{place}]", found))
        else:
            texts.append(part.text)
    return replace(read, content="".join(texts))
