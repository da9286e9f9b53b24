"""Items of the Responses API as the messages of a chat.

Thoughts, text and calls that follow each other become one message of the assistant, as the model said them:
another begins where the same kind of part comes again, and where thoughts come after anything else.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Callable
from typing import Final

import msgspec

from llorch_serve.http.exchange import MAX_BODY_BYTES
from llorch_serve.http.openai_schema import CalledFunction, ContentPart, Message, MessageCall
from llorch_serve.http.responses.schema import (
    ITEMS,
    SUMMARY_PARTS,
    TEXT_PARTS,
    THOUGHT_PARTS,
    FunctionCall,
    FunctionCallOutput,
    ItemReference,
    MessageItem,
    Reasoning,
    ThoughtText,
)
from llorch_serve.http.translated.blocks import Findings, read_block
from llorch_serve.http.translated.conversation import Conversation

_WRAPPED: Final = "llorch:"  # what the thoughts of this worker begin with as ``encrypted_content``


def wrapped_thoughts(text: str) -> str:
    """Return thoughts as a client keeps them that sends back nothing but ``encrypted_content``."""
    return _WRAPPED + base64.b64encode(text.encode("utf-8", "replace")).decode()


def add_items(
    items: list[msgspec.Raw],
    conversation: Conversation,
    findings: Findings,
    find: Callable[[str], bytes | None],
) -> None:
    """Add the messages of ``input``'s items to a conversation.

    find: returns the JSON of an item that is kept here, by its id.
    """
    referred = 0
    for index, raw in enumerate(items):
        if findings.is_full:
            return
        path = f"input[{index}]"
        item = read_block(raw, path, ITEMS, findings, default="message")
        if isinstance(item, ItemReference):
            kept = find(item.id)
            if kept is None:
                found = f"found {item.id[:100]!r}, which is not kept here; send the item itself"
                findings.refuse(f"{path}.id", found)
                continue
            referred += len(kept)
            if referred > MAX_BODY_BYTES:
                found = f"found items of more than {MAX_BODY_BYTES} bytes together, expected fewer"
                findings.refuse(f"{path}.id", found)
                return
            item = read_block(msgspec.Raw(kept), path, ITEMS, findings)
        if item is not None:
            _add(item, path, conversation, findings)


def _add(item: msgspec.Struct, path: str, conversation: Conversation, findings: Findings) -> None:
    match item:
        case MessageItem(role="assistant"):
            message = _assistant(conversation, path, joins=lambda last: last.content is None)
            message.content = _read_texts(item.content, f"{path}.content", findings)
        case MessageItem():
            content = _read_texts(item.content, f"{path}.content", findings)
            conversation.add(Message(item.role, content), path)
        case Reasoning():
            thoughts = _read_thoughts(item, path, findings)
            if thoughts:
                message = _assistant(conversation, path, joins=lambda _: False)
                message.reasoning_content = thoughts
        case FunctionCall():
            message = _assistant(conversation, path, joins=lambda _: True)
            call = MessageCall(CalledFunction(item.name, item.arguments or "{}"), item.call_id)
            message.tool_calls = [*(message.tool_calls or ()), call]
        case FunctionCallOutput():
            content = _read_texts(item.output, f"{path}.output", findings)
            conversation.add(Message("tool", content, tool_call_id=item.call_id), path)


def _assistant(conversation: Conversation, path: str, *, joins: Callable[[Message], bool]) -> Message:
    """Return the message of the assistant that a part belongs to: the last one, or a new one."""
    if len(conversation.messages) > conversation.fixed:
        last = conversation.messages[-1]
        if last.role == "assistant" and joins(last):
            return last
    message = Message("assistant", None)
    conversation.add(message, path)
    return message


def _read_texts(content: str | list[msgspec.Raw], path: str, findings: Findings) -> str | list[ContentPart]:
    if isinstance(content, str):
        return content
    parts = (read_block(raw, f"{path}[{i}]", TEXT_PARTS, findings) for i, raw in enumerate(content))
    return [ContentPart("text", part.text) for part in parts if part is not None]


def _read_thoughts(item: Reasoning, path: str, findings: Findings) -> str:
    """Return what was thought: the text itself, else what this worker wrapped, else a summary."""
    content = _joined(item.content, f"{path}.content", THOUGHT_PARTS, findings)
    summary = _joined(item.summary, f"{path}.summary", SUMMARY_PARTS, findings)
    wrapped = item.encrypted_content or ""
    if not content and wrapped.startswith(_WRAPPED):
        try:
            return base64.b64decode(wrapped.removeprefix(_WRAPPED), validate=True).decode()
        except (binascii.Error, UnicodeError):
            findings.refuse(f"{path}.encrypted_content", "is not as this worker gave it; leave the item out")
    elif wrapped and not content and not summary:
        found = "found what another server encrypted, which cannot be read here; leave the item out"
        if findings.unknown is not None:
            findings.unknown.append(path)
        else:
            findings.refuse(f"{path}.encrypted_content", found)
    return content or summary


def _joined(
    parts: list[msgspec.Raw] | None, path: str, kinds: dict[str, type[ThoughtText]], findings: Findings
) -> str:
    read = (read_block(raw, f"{path}[{i}]", kinds, findings) for i, raw in enumerate(parts or ()))
    return "".join(part.text for part in read if part is not None)
