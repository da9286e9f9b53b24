"""Anthropic's turns of blocks as the messages of a chat.

A user's turn becomes a message of role ``tool`` for each result of a tool, and one of role ``user`` for texts
that follow each other; an assistant's turn becomes one message with its thoughts, text and calls.
"""

from __future__ import annotations

from typing import Final

import msgspec

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
from llorch_serve.http.translated.blocks import Findings, read_block
from llorch_serve.http.translated.conversation import Conversation

BOOKKEEPING: Final = "x-anthropic-billing-header:"
"""What a block of the system prompt begins with that Claude Code writes for its vendor. It is another one in
every request, so that nothing behind it could be reused; it is no part of what the model is told.
"""


def read_turns(
    system: str | list[msgspec.Raw] | None,
    turns: list[Turn],
    findings: Findings,
) -> Conversation:
    """Return the messages of a conversation. ``findings`` gets what is wrong with it, and what no chat
    can say.
    """
    found = Conversation()
    if (told := _read_texts(system or "", "system", findings)) not in ("", []):
        found.add(Message("system", told), "system")
    for index, turn in enumerate(turns):
        if findings.is_full:
            break
        path = f"messages[{index}]"
        if isinstance(turn.content, str) or turn.role == "system":
            found.add(Message(turn.role, _read_texts(turn.content, f"{path}.content", findings)), path)
        elif turn.role == "user":
            _add_user(turn.content, path, found, findings)
        else:
            found.add(_assistant(turn.content, path, findings), path)
    return found


def _read_texts(content: str | list[msgspec.Raw], path: str, findings: Findings) -> str | list[ContentPart]:
    if isinstance(content, str):
        return content
    parts = []
    for index, raw in enumerate(content):
        if findings.is_full:
            break
        place = f"{path}[{index}]"
        block = read_block(raw, place, TEXT_BLOCKS, findings)
        if not isinstance(block, TextBlock):
            continue
        _check_citations(block, place, findings)
        if path == "system" and block.text.startswith(BOOKKEEPING):
            findings.ignored.append(place)
        else:
            parts.append(ContentPart("text", block.text))
    return parts


def _check_citations(block: TextBlock, path: str, findings: Findings) -> None:
    if block.citations:
        found = f"found {len(block.citations)}, which the model cannot be shown; leave them out"
        findings.refuse(f"{path}.citations", found)


def _add_user(
    blocks: list[msgspec.Raw],
    path: str,
    found: Conversation,
    findings: Findings,
) -> None:
    texts: list[ContentPart] = []
    begin = len(found.messages)
    for index, raw in enumerate(blocks):
        if findings.is_full:
            return
        place = f"{path}.content[{index}]"
        block = read_block(raw, place, USER_BLOCKS, findings)
        if isinstance(block, TextBlock):
            _check_citations(block, place, findings)
            if not texts:
                found.add(Message("user", texts), path)
            texts.append(ContentPart("text", block.text))
        elif isinstance(block, ToolResultBlock):
            texts = []
            if block.is_error:
                findings.ignored.append(f"{place}.is_error")
            content = _read_texts(block.content or "", f"{place}.content", findings)
            found.add(Message("tool", content, tool_call_id=block.tool_use_id), place)
    if len(found.messages) == begin and not findings.bad:
        found.add(Message("user", ""), path)


def _assistant(blocks: list[msgspec.Raw], path: str, findings: Findings) -> Message:
    texts: list[ContentPart] = []
    thoughts: list[str] = []
    calls: list[MessageCall] = []
    for index, raw in enumerate(blocks):
        if findings.is_full:
            break
        place = f"{path}.content[{index}]"
        block = read_block(raw, place, ASSISTANT_BLOCKS, findings)
        if isinstance(block, TextBlock):
            _check_citations(block, place, findings)
            texts.append(ContentPart("text", block.text))
        elif isinstance(block, ThinkingBlock):
            thoughts.append(block.thinking)
        elif isinstance(block, ToolUseBlock):
            calls.append(MessageCall(CalledFunction(block.name, bytes(block.input).decode()), block.id))
    content = texts or (None if calls else "")
    return Message(
        "assistant", content, tool_calls=calls or None, reasoning_content="".join(thoughts) or None
    )
