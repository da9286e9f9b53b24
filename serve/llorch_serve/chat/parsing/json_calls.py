"""Calls of tools as JSON: where a value ends in text that grows, and what calls it holds.

Used by the formats of calls. A value is an object or a list of objects with ``name`` and ``arguments`` (or
``parameters``), as itself or under ``function``.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Final

import msgspec

from llorch_serve.files.json_errors import NOT_JSON

_IN_STRING: Final = re.compile(r'["\\]')
_OUTSIDE: Final = re.compile(r'["{}\[\]]')


@dataclass(frozen=True, slots=True)
class ParsedCall:
    """A complete call; arguments: JSON text of an object, as the model wrote it; id: the model's, or
    empty.
    """

    name: str
    arguments: str
    id: str = ""


@dataclass(slots=True)
class ValueScanner:
    """Finds the end of an object or list in text that comes in pieces. No character is looked at twice."""

    _depth: int = field(default=0, init=False)
    _in_string: bool = field(default=False, init=False)

    def read(self, text: str, start: int, *, end: int | None = None, until: int = 0) -> tuple[int, bool]:
        """Take text from ``start`` on, first where the value begins; return how far it has been read, and
        whether the value ends there.

        What has not been read, a backslash at most, comes again with what follows it.

        end: no further. until: how many brackets are open where what is read ends; 0: the value.
        """
        at, end = start, len(text) if end is None else end
        while at < end:
            found = (_IN_STRING if self._in_string else _OUTSIDE).search(text, at, end)
            if found is None:
                break
            mark = found[0]
            if mark == "\\":
                if found.end() == end:  # what is escaped has not come yet
                    return found.start(), False
                at = found.end() + 1
                continue
            at = found.end()
            if mark == '"':
                self._in_string = not self._in_string
            else:
                self._depth += 1 if mark in "{[" else -1
                if self._depth == until and mark in "}]":
                    return at, True
        return end, False


def first_bracket(text: str, start: int, end: int) -> int | None:
    """Return where the first bracket outside strings is, or None; the text begins outside of them."""
    in_string, at = False, start
    while found := (_IN_STRING if in_string else _OUTSIDE).search(text, at, end):
        at = found.end()
        if found[0] == "\\":
            at += 1
        elif found[0] == '"':
            in_string = not in_string
        else:
            return found.start()
    return None


def read_calls(text: str) -> tuple[ParsedCall, ...]:
    """Return the calls of a JSON value; none if it is malformed, or anything in it is no call."""
    try:
        if text.startswith("["):
            return tuple(_read_call(item) for item in msgspec.json.decode(text, type=list[msgspec.Raw]))
        return (_read_call(text.encode()),)
    except NOT_JSON:
        return ()


def _read_call(data: bytes | msgspec.Raw) -> ParsedCall:
    call = msgspec.json.decode(data, type=dict[str, msgspec.Raw])
    id_ = msgspec.json.decode(call["id"], type=str | None) if "id" in call else None
    if "name" not in call and "function" in call:
        call = msgspec.json.decode(call["function"], type=dict[str, msgspec.Raw])
    name = msgspec.json.decode(call.get("name", msgspec.Raw(b"null")), type=str)
    if not name:
        raise msgspec.ValidationError("a call without name")
    arguments = call.get("arguments", call.get("parameters", msgspec.Raw(b"{}")))
    value = msgspec.json.decode(arguments)
    if value is None or (isinstance(value, str) and not value.strip()):  # as for a tool without parameters
        text, value = "{}", {}
    elif isinstance(value, str):  # an object written as text inside JSON
        text, value = value, msgspec.json.decode(value)
    else:
        text = bytes(arguments).decode()
    if not isinstance(value, dict):
        raise msgspec.ValidationError("arguments that are no object")
    return ParsedCall(name, text, id_ or "")
