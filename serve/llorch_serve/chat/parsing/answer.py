"""From the text of an answer to a chat, piece by piece, to what is said, what was thought, and which tools
are called.

The intake makes an :class:`AnswerParser` for each answer to a chat and puts its text through it, after stop
strings.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

import msgspec

from llorch_serve.chat.parsing.calls import CallParser
from llorch_serve.chat.parsing.json_calls import ParsedCall
from llorch_serve.chat.parsing.reasoning import ReasoningParser
from llorch_serve.chat.parsing.registry import AnswerFormats
from llorch_serve.engine.sequence import FinishReason
from llorch_serve.files.json_errors import NOT_JSON
from llorch_serve.requests import ChatPrompt, GenerationUpdate, ToolCallDelta

# Mistral's templates take ids of exactly nine letters and digits; others take anything.
_ID_CHARS: Final = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
_ID_LENGTH: Final = 9


@dataclass(frozen=True, slots=True)
class ParsedText:
    """New text of an answer."""

    text: str
    reasoning: str
    tool_calls: tuple[ToolCallDelta, ...]


class AnswerParser:
    """Parses one answer. Joined pieces depend on the joined text alone. Make one with :func:`parser_for`."""

    def __init__(self, key: str, reasoning: ReasoningParser | None, calls: CallParser | None) -> None:
        self._key = key
        self._reasoning = reasoning
        self._calls = calls
        self._told = 0
        self._ends_with_call = False  # and nothing but white space behind it

    def push(self, text: str) -> ParsedText:
        """Take new text; return what is certain by now."""
        thoughts, said = ("", text) if self._reasoning is None else self._reasoning.push(text)
        return self._sorted(thoughts, [said] if self._calls is None else self._calls.push(said))

    def finish(self) -> ParsedText:
        """Return what was held back: the answer has ended."""
        thoughts, said = ("", "") if self._reasoning is None else self._reasoning.finish()
        pieces: Sequence[str | ParsedCall] = [said]
        if self._calls is not None:
            pieces = [*self._calls.push(said), *self._calls.finish()]
        return self._sorted(thoughts, pieces)

    def parsed(self, update: GenerationUpdate) -> GenerationUpdate:
        """Return an update whose text has been parsed; the last one brings what was held back.

        Its completion says whether the answer ends with calls.
        """
        found = self.push(update.text)
        completion = update.completion
        if completion is not None:
            rest = self.finish()
            found = ParsedText(
                found.text + rest.text, found.reasoning + rest.reasoning, found.tool_calls + rest.tool_calls
            )
            if completion.reason is FinishReason.STOP and self._ends_with_call:
                completion = replace(completion, reason=FinishReason.TOOL_CALLS)
        return replace(
            update,
            text=found.text,
            reasoning=found.reasoning,
            tool_calls=found.tool_calls,
            completion=completion,
        )

    def _sorted(self, thoughts: str, pieces: Sequence[str | ParsedCall]) -> ParsedText:
        texts: list[str] = []
        calls: list[ToolCallDelta] = []
        for piece in pieces:
            if isinstance(piece, ParsedCall):
                id_ = piece.id or call_id(f"{self._key}:{self._told}")
                calls.append(ToolCallDelta(self._told, id_, piece.name, piece.arguments))
                self._told += 1
                self._ends_with_call = True
            elif piece:
                texts.append(piece)
                self._ends_with_call = self._ends_with_call and piece.isspace()
        return ParsedText("".join(texts), thoughts, tuple(calls))


def parser_for(formats: AnswerFormats, prompt: ChatPrompt, rendered: str, *, key: str) -> AnswerParser | None:
    """Return a parser for the answer to a chat, or None if it is text and nothing else.

    Calls are looked for only if the prompt has tools.

    rendered: the prompt as text, which may end inside the model's thoughts.
    key: what the ids of calls are made from.
    """
    reasoning = None
    if (form := formats.reasoning) is not None:
        begun = rendered.rstrip().endswith(form.begin)
        if prompt.continue_final_message:
            content = prompt.messages[-1].content or ""
            last = content if isinstance(content, str) else "".join(content)
            begun = last.rfind(form.begin) > last.rfind(form.end)
        reasoning = ReasoningParser(form, begun=begun)
    calls = None
    if formats.tools is not None and prompt.tools:
        calls = CallParser(formats.tools, frozenset(map(_tool_name, prompt.tools)))
    return None if reasoning is None and calls is None else AnswerParser(key, reasoning, calls)


def call_id(key: str) -> str:
    """Return nine letters and digits; the same key gives the same ones."""
    number = int.from_bytes(hashlib.sha256(key.encode()).digest())
    characters = []
    for _ in range(_ID_LENGTH):
        number, rest = divmod(number, len(_ID_CHARS))
        characters.append(_ID_CHARS[rest])
    return "".join(characters)


class _Function(msgspec.Struct):
    name: str = ""


class _Tool(msgspec.Struct):
    function: _Function | None = None
    name: str = ""


def _tool_name(tool: str) -> str:
    try:
        found = msgspec.json.decode(tool, type=_Tool)
    except NOT_JSON:  # a template takes tools of any shape; this one has no name to call
        return ""
    return found.function.name if found.function is not None else found.name
