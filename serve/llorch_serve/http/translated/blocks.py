"""Reads the parts of a conversation whose ``type`` says which fields they have: blocks, items and tools.

Input: one part as raw JSON, and a table of the types that are understood. Output: its structure. A type that
is not in the table is refused by its name before its fields are looked at, since nobody can know them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeVar

import msgspec

from llorch_serve.errors import FieldViolation
from llorch_serve.files.json_errors import NOT_JSON
from llorch_serve.http.fields import MAX_COUNTED, MAX_LISTED
from llorch_serve.http.unknown_fields import MAX_NAME_CHARS, listed, unknown_fields

S = TypeVar("S", bound=msgspec.Struct)


@dataclass(slots=True)
class Findings:
    """What was found in a body beside what it asks for. bad: what it is refused for.

    ignored: names of what is known and has no effect, for the answer to tell. unknown: gets names of what is
    not known, and of tools that this worker cannot offer, for the answer and the log; None: they are refused.
    """

    bad: list[FieldViolation] = field(default_factory=list)
    ignored: list[str] = field(default_factory=list)
    unknown: list[str] | None = None

    @property
    def is_full(self) -> bool:
        """Whether more has been found than is listed, so that no more need be looked for."""
        return len(self.bad) > MAX_LISTED

    @property
    def told(self) -> tuple[str, ...]:
        """What has no effect, each name once, and how much more there is than is listed."""
        return tuple(listed(list(dict.fromkeys([*(self.unknown or ()), *self.ignored])), MAX_LISTED))

    def refuse(self, name: str, found: str) -> None:
        """Note what a field is refused for."""
        self.bad.append(FieldViolation(name, found))


def any_of(*tables: Mapping[str, type[msgspec.Struct]]) -> msgspec.Meta:
    """Return what /openapi.json says of a part that is one of the types of some tables."""
    names = dict.fromkeys(kind.__name__ for table in tables for kind in table.values())
    return msgspec.Meta(
        extra_json_schema={"anyOf": [{"$ref": f"#/components/schemas/{name}"} for name in names]}
    )


class _Typed(msgspec.Struct):
    type: str | None = None


def read_block(
    raw: msgspec.Raw,
    path: str,
    kinds: Mapping[str, type[S]],
    findings: Findings,
    *,
    default: str | None = None,
    optional: bool = False,
) -> S | None:
    """Return a part as the structure of its type; None where it is refused, or left aside.

    path: its name in the body. default: the type of a part that names none. optional: the model can do
    without a part of a type that is not known.
    """
    try:
        str(memoryview(raw), "utf-8")  # msgspec does not look into what is kept as it came
        named = msgspec.json.decode(raw, type=_Typed).type or default
        kind = kinds.get(named or "")
        if kind is not None:
            block = msgspec.json.decode(raw, type=kind)
            _note_unknown(raw, path, kind, findings)
            return block
    except NOT_JSON as error:
        findings.bad.append(_violation(path, error))
        return None
    if optional and findings.unknown is not None:
        findings.unknown.append(path)
        return None
    shown = "none" if named is None else repr(named[:MAX_NAME_CHARS])
    expected = ", ".join(kinds)
    hint = ", or start the worker with --unknown-fields ignore" if optional else ""
    findings.refuse(f"{path}.type", f"found {shown}, expected one of {expected}; leave it out{hint}")
    return None


def _note_unknown(raw: msgspec.Raw, path: str, kind: type[msgspec.Struct], findings: Findings) -> None:
    for unknown in unknown_fields(raw, kind, path):
        if findings.unknown is None:
            findings.refuse(unknown.path, unknown.description())
        else:
            findings.unknown.append(unknown.path)
        if findings.is_full or len(findings.unknown or ()) > MAX_COUNTED:
            return


def _violation(path: str, error: Exception) -> FieldViolation:
    if isinstance(error, RecursionError):
        return FieldViolation(path, "nested too deeply")
    text, _, place = str(error).partition(" - at `$")
    return FieldViolation(path + place.rstrip("`"), text)
