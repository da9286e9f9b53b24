"""Grammars made of others: calls of tools, and forms behind a thought, for ``compiler.py``.

Each part is a grammar of its own in what llguidance compiles, so that a schema's references and a grammar's
rules keep their names to themselves. What a model writes as a special token is asked for by its id, since no
text spells one.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import msgspec

from llorch_serve.structured.spec import (
    AfterThought,
    CallableTool,
    CallWriting,
    FormOrCalls,
    HeldForm,
    JsonSchema,
    Structured,
    ToolCalls,
    begins_with_space,
)
from llorch_serve.structured.translate import quoted, translate

_CALL_ID: Final = "/[A-Za-z0-9]{9}/"
_SPACE: Final = r"/[ \n]{0,4}/"
"""Between a thought and the answer; models write line breaks there, which are no part of either."""


def compose(form: HeldForm, special: Mapping[int, str]) -> str:
    """Return the grammar of any form; needs llguidance. special: the tokenizer's special tokens, by id.

    Raises InvalidRequestError for what is no schema.
    """
    if not isinstance(form, AfterThought | FormOrCalls | ToolCalls):
        return translate(form)
    parts = _Parts({text: id_ for id_, text in special.items()})
    start = parts.thoughtful(form) if isinstance(form, AfterThought) else parts.answer(form)
    lark = "\n".join([f"start: {start}", *parts.rules])
    return msgspec.json.encode({"grammars": [{"lark_grammar": lark}, *parts.grammars]}).decode()


@dataclass(slots=True)
class _Parts:
    """The rules and grammars that a form is made of. special: ids of special tokens, by their text."""

    special: Mapping[str, int]
    rules: list[str] = field(default_factory=list)
    grammars: list[dict[str, Any]] = field(default_factory=list)

    def thoughtful(self, form: AfterThought) -> str:
        """Return the rest of a thought, and the form behind it."""
        between = "" if begins_with_space(form.form) else " BETWEEN"
        if between:
            self.rules.append(f"BETWEEN: {_SPACE}")
        answer = self.answer(form.form)
        begin, end = self._text(form.answer_begin), self._text(form.answer_end)
        return " ".join(filter(None, [self._thought(form.thought_end) + between, begin, answer, end]))

    def answer(self, form: Structured | ToolCalls | FormOrCalls) -> str:
        """Return an answer without its thought."""
        if isinstance(form, FormOrCalls):
            return f"({self._reference(form.form)} | {self._calls(form.calls)})"
        return self._calls(form) if isinstance(form, ToolCalls) else self._reference(form)

    def _thought(self, end: str) -> str:
        """Return a thought up to the first place where its end is spelled out, or stands as a token."""
        self.rules.append(f"spelled[suffix={quoted(end)}]: /(?s:.*)/")
        if end not in self.special:
            return "spelled"
        escaped = "".join(f"\\x{{{ord(char):x}}}" for char in end)
        self.rules.append(f"THOUGHT: /(?s:.*)/ & ~/(?s:.*){escaped}(?s:.*)/")
        return f"(spelled | THOUGHT {self._text(end)})"

    def _calls(self, form: ToolCalls) -> str:
        """Return one call or several."""
        writing = form.writing
        self.rules.append(
            "call: " + " | ".join(self._call(index, tool, writing) for index, tool in enumerate(form.tools))
        )
        calls = "call"
        if form.several and writing.between is not None:
            calls += f" ({self._text(writing.between)} call)*"
        return " ".join(filter(None, [self._text(writing.before), calls, self._text(writing.behind)]))

    def _call(self, index: int, tool: CallableTool, writing: CallWriting) -> str:
        name = json.dumps(tool.name, ensure_ascii=False)
        pieces = [self._text(writing.opening), quoted(name if writing.quoted else tool.name)]
        if writing.id_marker:
            pieces += [self._text(writing.id_marker), "CALL_ID"]
            if index == 0:
                self.rules.append(f"CALL_ID: {_CALL_ID}")
        arguments = self._reference(JsonSchema(tool.parameters))
        return " ".join([*pieces, self._text(writing.middle), arguments, self._text(writing.closing)])

    def _reference(self, form: Structured) -> str:
        """Return what stands for a form, which becomes a grammar of its own."""
        (grammar,) = msgspec.json.decode(translate(form))["grammars"]
        name = f"part{len(self.grammars)}"
        self.grammars.append({**grammar, "name": name})
        return f"@{name}"

    def _text(self, text: str) -> str:
        """Return a text of the model's format, whose special tokens are meant as such."""
        if not text:
            return ""
        found = [known for known in self.special if known in text]
        if not found:
            return quoted(text)
        longest_first = "|".join(re.escape(known) for known in sorted(found, key=len, reverse=True))
        pieces = re.split(f"({longest_first})", text)
        return " ".join(
            f"<[{self.special[piece]}]>" if piece in self.special else quoted(piece)
            for piece in pieces
            if piece
        )
