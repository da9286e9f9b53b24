"""TOML tables read into structs, with all that is wrong gathered and told at once.

Input: a document of tomllib. Output: structs of msgspec, and the problems in words for people.
"""

from __future__ import annotations

import difflib
import enum
from collections.abc import Callable, Collection, Mapping
from typing import Any, Final, Literal, TypeGuard, TypeVar, get_args, get_origin

import msgspec

from llorch_serve.errors import LlorchError

_MOST_BITS: Final = 63  # of an integer of TOML, beside its sign

S = TypeVar("S", bound=msgspec.Struct)
R = TypeVar("R")


class Problems:
    """What is wrong with a document. explained: keys that are refused for a reason of their own."""

    def __init__(self, explained: Mapping[str, str]) -> None:
        self.found: list[str] = []
        self._explained = explained

    def note(self, problem: object) -> None:
        """Add one, in words for people."""
        self.found.append(str(problem))

    def attempt(self, read: Callable[..., R], *arguments: object) -> R | None:
        """Return what ``read`` returns; note what it refuses, and return None then."""
        try:
            return read(*arguments)
        except LlorchError as error:
            self.note(error)
            return None

    def table(self, table: object, kind: type[S], where: str) -> S | None:
        """Return a table as a struct; None, with every key and value noted that is wrong, where it is none.

        where: what comes before a key's name in messages.
        """
        if not isinstance(table, dict):
            self.note(f"{where} is {_shown(table, str)[:42]}; expected a table of keys and values")
            return None
        fields = {field.name: field for field in msgspec.structs.fields(kind)}
        before = len(self.found)
        self.refuse_unknown(table, fields, where)
        given = {}
        for name, field in fields.items():
            if name not in table:
                if field.required:
                    self.note(f"{where}.{name} is missing")
                continue
            try:
                given[name] = msgspec.convert(table[name], field.type)
            except msgspec.ValidationError as error:
                self.note(f"{where}.{name} is {_shown(table[name])[:80]}; {_wanted(field.type, error)}")
                continue
            if _is_huge(table[name]):
                self.note(f"{where}.{name} is {_shown(table[name])}; expected one of at most {_MOST_BITS}")
        return None if len(self.found) > before else kind(**given)

    def refuse_unknown(self, table: Mapping[str, Any], known: Collection[str], where: str) -> None:
        """Note every key of a table that is not known, with the nearest that is."""
        for key in table:
            if key in known:
                continue
            if key in self._explained:
                self.note(f"{where}.{key} {self._explained[key]}")
                continue
            close = difflib.get_close_matches(key, list(known), n=1)
            meant = f"did you mean {close[0]}?" if close else f"known are {', '.join(known)}"
            self.note(f"{where} has the unknown key {key[:40]!r}; {meant}")


def _is_huge(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and value.bit_length() > _MOST_BITS


def _shown(value: object, read: Callable[[object], object] = lambda value: value) -> str:
    """Return a value for a message. Python writes no integer of more than some thousand digits."""
    try:
        return f"a number of {value.bit_length()} bits" if _is_huge(value) else repr(read(value))
    except ValueError:
        return f"a {type(value).__name__} with such a number"


def _wanted(kind: Any, error: msgspec.ValidationError) -> str:
    """Say what a key takes: the values themselves, where there are few."""
    for part in (kind, *get_args(kind)):
        if isinstance(part, type) and issubclass(part, enum.Enum):
            return f"expected one of {', '.join(member.value for member in part)}"
        if get_origin(part) is Literal:
            return f"expected one of {', '.join(get_args(part))}"
    said = str(error).replace("`", "")
    return f"{said[:1].lower()}{said[1:]}"
