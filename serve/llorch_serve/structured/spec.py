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
