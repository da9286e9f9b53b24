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

from llorch_serve.chat.parsing.bodies import CallPart
from llorch_serve.chat.parsing.calls import CallParser
from llorch_serve.chat.parsing.reasoning import ExpectedThought, ReasoningParser
from llorch_serve.chat.parsing.registry import AnswerFormats
from llorch_serve.chat.tools import callable_names, held_calls, shown_tools
from llorch_serve.engine.sequence import FinishReason
from llorch_serve.requests import ChatPrompt, GenerationUpdate, ToolCallDelta, ToolMode
from llorch_serve.structured.spec import (
    AfterThought,
    FormOrCalls,
    HeldForm,
    Structured,
    ToolCalls,
    begins_with_space,
)

# Mistral's templates take ids of exactly nine letters and digits; others take anything.
_ID_CHARS: Final = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
_ID_LENGTH: Final = 9
# What an answer may be held to where calls are looked for in it; None: nothing.
_WITH_CALLS: Final = (ToolCalls, FormOrCalls, type(None))


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
        self._ends_with_call = False  # and nothing but white space behind it

    @property
    def done(self) -> bool:
        """Whether the answer has the only call that is wanted, so that it ends here."""
        return self._calls is not None and self._calls.done

    def push(self, text: str) -> ParsedText:
        """Take new text; return what is certain by now."""
        thoughts, said = ("", text) if self._reasoning is None else self._reasoning.push(text)
        return self._sorted(thoughts, [said] if self._calls is None else self._calls.push(said))

    def finish(self) -> ParsedText:
        """Return what was held back: the answer has ended."""
        thoughts, said = ("", "") if self._reasoning is None else self._reasoning.finish()
        pieces: Sequence[str | CallPart] = [said]
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

    def _sorted(self, thoughts: str, pieces: Sequence[str | CallPart]) -> ParsedText:
        texts: list[str] = []
        calls: list[ToolCallDelta] = []
        for piece in pieces:
            if isinstance(piece, CallPart):
                id_ = (piece.id or call_id(f"{self._key}:{piece.place}")) if piece.name else ""
                if piece.name or piece.arguments or piece.broken:
                    delta = ToolCallDelta(piece.place, id_, piece.name, piece.arguments, piece.broken)
                    calls.append(delta)
                self._ends_with_call = self._ends_with_call or piece.ends
            elif piece:
                texts.append(piece)
                self._ends_with_call = self._ends_with_call and piece.isspace()
        return ParsedText("".join(texts), thoughts, tuple(calls))


def expected_thought(
    formats: AnswerFormats, prompt: ChatPrompt, rendered: str, *, held: bool
) -> ExpectedThought | None:
    """Return the thought that the answer to a chat may begin with, or None.

    rendered: the prompt as text, which may end inside the model's thoughts.
    held: the answer is held to a form, so that it has a thought only if the prompt has begun one.
    """
    if (form := formats.reasoning) is None:
        return None
    begun = rendered.rstrip().endswith(form.begin)
    if prompt.continue_final_message:
        content = prompt.messages[-1].content or ""
        last = content if isinstance(content, str) else "".join(content)
        begun = last.rfind(form.begin) > last.rfind(form.end)
    return ExpectedThought(form, begun) if begun or not held else None


def held_form(
    formats: AnswerFormats, prompt: ChatPrompt, rendered: str, asked: Structured | None
) -> HeldForm | None:
    """Return the form that the answer to a chat is held to, or None. It holds the answer and not the thought.

    asked: what the request asks for; where a call is required, that takes its place, and where tools may be
        called, the answer is one or the other. rendered: the prompt as text.
    Raises InvalidRequestError where calls cannot be held.
    """
    required = prompt.tool_choice.mode is ToolMode.REQUIRED
    if asked is None and not required:
        return None
    calls = held_calls(prompt, formats.writing)
    form: Structured | ToolCalls | FormOrCalls | None = calls if required else asked
    if asked is not None and calls is not None and not required:
        form = FormOrCalls(asked, calls)
    assert form is not None
    thought = expected_thought(formats, prompt, rendered, held=True)
    if thought is None:
        return form
    marks = thought.form
    return AfterThought(form, marks.end, marks.answer_begin, marks.answer_end)


def parser_for(
    formats: AnswerFormats, prompt: ChatPrompt, rendered: str, *, key: str, form: HeldForm | None = None
) -> AnswerParser | None:
    """Return a parser for the answer to a chat, or None if it is text and nothing else.

    Calls are looked for only if the model is told of tools.

    rendered: the prompt as text, which may end inside the model's thoughts.
    key: what the ids of calls are made from.
    form: what the answer is held to.
    """
    thought = expected_thought(formats, prompt, rendered, held=form is not None)
    answer = form.form if isinstance(form, AfterThought) else form
    reasoning = None
    if thought is not None:
        exact = isinstance(form, AfterThought) and begins_with_space(form.form)
        reasoning = ReasoningParser(thought, exact=exact)
    calls = None
    if formats.tools is not None and shown_tools(prompt) and isinstance(answer, _WITH_CALLS):
        calls = CallParser(
            formats.tools,
            callable_names(prompt),
            first_only=not prompt.parallel_tool_calls,
            at_start=isinstance(answer, FormOrCalls),
        )
    return None if reasoning is None and calls is None else AnswerParser(key, reasoning, calls)


def call_id(key: str) -> str:
    """Return nine letters and digits; the same key gives the same ones."""
    number = int.from_bytes(hashlib.sha256(key.encode()).digest())
    characters = []
    for _ in range(_ID_LENGTH):
        number, rest = divmod(number, len(_ID_CHARS))
        characters.append(_ID_CHARS[rest])
    return "".join(characters)
