"""The forms that an answer can be held to, as plain data.

They come from the command line or gRPC as part of ``SamplingParams``, are checked here for size, and go to
``translate.py``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Final

from llorch_serve.errors import FieldViolation

MAX_TEXT_BYTES: Final = 256 * 2**10
"""Largest schema, expression or grammar, and most bytes of all choices together."""

MAX_CHOICES: Final = 4096


@dataclass(frozen=True, slots=True)
class JsonSchema:
    """JSON that a JSON Schema (draft 2020-12, as far as llguidance knows it) describes. schema: its text."""

    field: ClassVar[str] = "json_schema"
    schema: str


@dataclass(frozen=True, slots=True)
class JsonObject:
    """Any JSON object."""

    field: ClassVar[str] = "json_object"


@dataclass(frozen=True, slots=True)
class Regex:
    """Text that a regular expression matches from its first character to its last; no look-around, no back
    references.
    """

    field: ClassVar[str] = "regex"
    pattern: str


@dataclass(frozen=True, slots=True)
class Choice:
    """Exactly one of these texts."""

    field: ClassVar[str] = "choice"
    options: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Grammar:
    """Text of a context-free grammar in llguidance's form of Lark's language, from its rule ``start``."""

    field: ClassVar[str] = "grammar"
    lark: str


Structured = JsonSchema | JsonObject | Regex | Choice | Grammar
"""What a request may ask for."""


@dataclass(frozen=True, slots=True)
class CallWriting:
    """How a model writes its calls of tools. In these texts, that of a special token means the token.

    before, behind: around all calls.
    opening: before a tool's name; middle: between that and the arguments; closing: behind the arguments.
    between: between two calls; None: the model's template knows one call at most.
    quoted: the name is written as in JSON.
    id_marker: behind the name, before an id of nine letters and digits; empty: there is none.
    """

    opening: str
    middle: str
    closing: str
    before: str = ""
    behind: str = ""
    between: str | None = None
    quoted: bool = True
    id_marker: str = ""


@dataclass(frozen=True, slots=True)
class CallableTool:
    """A tool that may be called.

    parameters: JSON Schema of its arguments, which are an object.
    field: where the request has them, for errors.
    """

    name: str
    parameters: str
    field: str = "input.chat.tools"


@dataclass(frozen=True, slots=True)
class ToolCalls:
    """One call or several of these tools, in the model's own format. several: more than one may be made."""

    writing: CallWriting
    tools: tuple[CallableTool, ...]
    several: bool


@dataclass(frozen=True, slots=True)
class FormOrCalls:
    """A form, or calls of tools instead."""

    form: Structured
    calls: ToolCalls


@dataclass(frozen=True, slots=True)
class AfterThought:
    """A form behind the thought that the model's template has opened.

    thought_end: what the model writes behind its thought.
    answer_begin, answer_end: what it writes around the answer, if anything.
    """

    form: Structured | ToolCalls | FormOrCalls
    thought_end: str
    answer_begin: str = ""
    answer_end: str = ""


HeldForm = Structured | ToolCalls | FormOrCalls | AfterThought
"""What an answer is held to, from its first token to its last."""


def field_of(form: HeldForm) -> str:
    """Return what errors call a form: the field that asks for it."""
    if isinstance(form, AfterThought | FormOrCalls):
        return field_of(form.form)
    return "input.chat.tools" if isinstance(form, ToolCalls) else f"sampling.{form.field}"


def begins_with_space(form: Structured | ToolCalls | FormOrCalls) -> bool:
    """Tell whether the white space that an answer begins with may be the form's own."""
    match form:
        case FormOrCalls(inner):
            return begins_with_space(inner)
        case JsonSchema() | JsonObject() | ToolCalls():
            return False
        case Choice(options):
            return any(option[:1].isspace() for option in options)
        case Regex() | Grammar():
            return True


def violations(form: Structured, *, prefix: str) -> list[FieldViolation]:
    """Return what is wrong with a form before anyone reads its language; empty if all is well."""
    name = f"{prefix}.{form.field}"
    match form:
        case JsonObject():
            return []
        case Choice(options):
            if not 0 < len(options) <= MAX_CHOICES:
                found = f"found {len(options)} options, expected 1 to {MAX_CHOICES}"
                return [FieldViolation(name, found)]
            bad = [_text_violation(option, f"{name}[{index}]") for index, option in enumerate(options)]
            total = sum(map(_size, options))
            if total > MAX_TEXT_BYTES:
                bad.append(FieldViolation(name, f"found {total} bytes, expected at most {MAX_TEXT_BYTES}"))
            return [violation for violation in bad if violation is not None][:16]
        case JsonSchema(text) | Regex(text) | Grammar(text):
            found_bad = _text_violation(text, name)
            return [] if found_bad is None else [found_bad]


def _text_violation(text: str, field: str) -> FieldViolation | None:
    if not 0 < (size := _size(text)) <= MAX_TEXT_BYTES:
        return FieldViolation(field, f"found {size} bytes, expected 1 to {MAX_TEXT_BYTES}")
    if any("\ud800" <= char <= "\udfff" for char in text):
        return FieldViolation(field, "found a lone surrogate, expected text that is valid Unicode")
    return None


def _size(text: str) -> int:
    return len(text.encode("utf-8", "surrogatepass"))
