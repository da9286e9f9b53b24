"""Reads the parts of a conversation whose ``type`` says which fields they have: blocks, items and tools.

Input: one part as raw JSON, and a table of the types that are understood. Output: its structure. A type that
is not in the table is refused by its name before its fields are looked at, since nobody can know them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, TypeVar

import msgspec

from llorch_serve.errors import FieldViolation
from llorch_serve.files.json_errors import NOT_JSON
from llorch_serve.http.fields import MAX_LISTED

_MAX_SHOWN_CHARS: Final = 64

S = TypeVar("S", bound=msgspec.Struct)


class _Typed(msgspec.Struct):
    type: str | None = None


def read_block(
    raw: msgspec.Raw,
    path: str,
    kinds: Mapping[str, type[S]],
    bad: list[FieldViolation],
    *,
    default: str | None = None,
) -> S | None:
    """Return a part as the structure of its type; None where ``bad`` got what is wrong with it.

    path: its name in the body. default: the type of a part that names none.
    """
    try:
        str(memoryview(raw), "utf-8")  # msgspec does not look into what is kept as it came
        kind = msgspec.json.decode(raw, type=_Typed).type or default
        if kind in kinds:
            return msgspec.json.decode(raw, type=kinds[kind])
    except NOT_JSON as error:
        bad.append(_violation(path, error))
        return None
    shown = "none" if kind is None else repr(kind[:_MAX_SHOWN_CHARS])
    expected = ", ".join(kinds)
    bad.append(FieldViolation(f"{path}.type", f"found {shown}, expected one of {expected}; leave it out"))
    return None


def is_full(bad: list[FieldViolation]) -> bool:
    """Tell whether more violations than are listed have been found, so that no more need be looked for."""
    return len(bad) > MAX_LISTED


def _violation(path: str, error: Exception) -> FieldViolation:
    if isinstance(error, RecursionError):
        return FieldViolation(path, "nested too deeply")
    text, _, place = str(error).partition(" - at `$")
    return FieldViolation(path + place.rstrip("`"), text)
