"""Anthropic's turns of blocks as the messages of a chat.

A user's turn becomes a message of role ``tool`` for each result of a tool, and one of role ``user`` for texts
that follow each other; an assistant's turn becomes one message with its thoughts, text and calls.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

import msgspec

from llorch_serve.errors import FieldViolation
from llorch_serve.http.messages.schema import (
    ASSISTANT_BLOCKS,
    TEXT_BLOCKS,
    USER_BLOCKS,
    TextBlock,
    ThinkingBlock,
    ToolResultBlock,
    ToolUseBlock,
    Turn,
)
from llorch_serve.http.openai_schema import CalledFunction, ContentPart, Message, MessageCall
from llorch_serve.http.translated.blocks import is_full, read_block

BOOKKEEPING: Final = "x-anthropic-billing-header:"
"""What a block of the system prompt begins with that Claude Code writes for its vendor. It is another one in
every request, so that nothing behind it could be reused; it is no part of what the model is told.
"""


@dataclass(slots=True)
class Conversation:
    """Messages of a chat, and of each the name of what it was made from."""

    messages: list[Message] = field(default_factory=list)
    places: list[str] = field(default_factory=list)

    @property
    def origins(self) -> tuple[str, ...]:
        """The names, for errors."""
        return tuple(self.places)

    def add(self, message: Message, origin: str) -> None:
        """Take one more message."""
        self.messages.append(message)
        self.places.append(origin)


def read_turns(
    system: str | list[msgspec.Raw] | None,
    turns: list[Turn],
    bad: list[FieldViolation],
    ignored: list[str],
) -> Conversation:
    """Return the messages of a conversation. ``bad`` gets what is wrong with it, ``ignored`` what no chat can
    say.
    """
    found = Conversation()
    if (told := _read_texts(system or "", "system", bad, ignored)) not in ("", []):
        found.add(Message("system", told), "system")
    for index, turn in enumerate(turns):
        if is_full(bad):
            break
        path = f"messages[{index}]"
        if isinstance(turn.content, str) or turn.role == "system":
            found.add(Message(turn.role, _read_texts(turn.content, f"{path}.content", bad, ignored)), path)
        elif turn.role == "user":
            _add_user(turn.content, path, found, bad, ignored)
        else:
            found.add(_assistant(turn.content, path, bad), path)
    return found


def _read_texts(
    content: str | list[msgspec.Raw], path: str, bad: list[FieldViolation], ignored: list[str]
) -> str | list[ContentPart]:
    if isinstance(content, str):
        return content
    parts = []
    for index, raw in enumerate(content):
        if is_full(bad):
            break
        place = f"{path}[{index}]"
        block = read_block(raw, place, TEXT_BLOCKS, bad)
        if not isinstance(block, TextBlock):
            continue
        _check_citations(block, place, bad)
        if path == "system" and block.text.startswith(BOOKKEEPING):
            ignored.append(place)
        else:
            parts.append(ContentPart("text", block.text))
    return parts


def _check_citations(block: TextBlock, path: str, bad: list[FieldViolation]) -> None:
    if block.citations:
        found = f"found {len(block.citations)}, which the model cannot be shown; leave them out"
        bad.append(FieldViolation(f"{path}.citations", found))


def _add_user(
    blocks: list[msgspec.Raw],
    path: str,
    found: Conversation,
    bad: list[FieldViolation],
    ignored: list[str],
) -> None:
    texts: list[ContentPart] = []
    begin = len(found.messages)
    for index, raw in enumerate(blocks):
        if is_full(bad):
            return
        place = f"{path}.content[{index}]"
        block = read_block(raw, place, USER_BLOCKS, bad)
        if isinstance(block, TextBlock):
            _check_citations(block, place, bad)
            if not texts:
                found.add(Message("user", texts), path)
            texts.append(ContentPart("text", block.text))
        elif isinstance(block, ToolResultBlock):
            texts = []
            if block.is_error:
                ignored.append(f"{place}.is_error")
            content = _read_texts(block.content or "", f"{place}.content", bad, ignored)
            found.add(Message("tool", content, tool_call_id=block.tool_use_id), place)
    if len(found.messages) == begin and not bad:
        found.add(Message("user", ""), path)


def _assistant(blocks: list[msgspec.Raw], path: str, bad: list[FieldViolation]) -> Message:
    texts: list[ContentPart] = []
    thoughts: list[str] = []
    calls: list[MessageCall] = []
    for index, raw in enumerate(blocks):
        if is_full(bad):
            break
        place = f"{path}.content[{index}]"
        block = read_block(raw, place, ASSISTANT_BLOCKS, bad)
        if isinstance(block, TextBlock):
            _check_citations(block, place, bad)
            texts.append(ContentPart("text", block.text))
        elif isinstance(block, ThinkingBlock):
            thoughts.append(block.thinking)
        elif isinstance(block, ToolUseBlock):
            calls.append(MessageCall(CalledFunction(block.name, bytes(block.input).decode()), block.id))
    content = texts or (None if calls else "")
    return Message(
        "assistant", content, tool_calls=calls or None, reasoning_content="".join(thoughts) or None
    )
