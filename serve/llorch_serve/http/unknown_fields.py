"""Fields of a JSON body that no structure knows: found at any depth, and refused, or left aside where the
worker is told to.

Input: a value as it came, and the type that it has been read as. Output: the paths of what was not read. What
is null, or empty inside of another value, asks for nothing and is never told.
"""

from __future__ import annotations

import enum
import functools
import re
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import msgspec

MAX_NAME_CHARS: Final = 64
_PLACE: Final = re.compile(r"\[\d+\]")
_MOST_EMPTY_BYTES: Final = 256  # of what is looked at for being empty, so that it is not nested deeply

JSON_SCHEMA_SHAPE: Final = '{"type": "json_schema", "json_schema": {"name": "NAME", "schema": {...}}}'

_THOUGHTS: Final = 'for templates that know it, send chat_template_kwargs {"enable_thinking": false}'
_INSTEAD: Final[dict[str, tuple[tuple[str, str], ...]]] = {
    **dict.fromkeys(
        ("think", "thinking", "reasoning", "enable_thinking"), (("chat_template_kwargs", _THOUGHTS),)
    ),
    **dict.fromkeys(("num_ctx", "n_ctx", "context_length"), (("", "llorch serve --max-context sets it"),)),
    **dict.fromkeys(
        ("num_predict", "n_predict", "max_new_tokens", "max_tokens", "max_completion_tokens"),
        (("max_tokens", "send max_tokens"), ("max_output_tokens", "send max_output_tokens")),
    ),
    "repeat_penalty": (("repetition_penalty", "send repetition_penalty"),),
    **dict.fromkeys(("typical", "typ_p"), (("typical_p", "send typical_p"),)),
    "keep_alive": (("", "the model stays loaded"),),
    "options": (("", "send what it holds in the body itself"),),
    **dict.fromkeys(
        ("stop", "stop_sequences"), (("stop", "send stop"), ("stop_sequences", "send stop_sequences"))
    ),
    "random_seed": (("seed", "send seed"),),
    **dict.fromkeys(
        ("guided_json", "json_schema", "format", "structured_outputs", "response_format"),
        (
            ("response_format", f"send response_format {JSON_SCHEMA_SHAPE}"),
            ("text", "send text.format"),
            ("output_config", "send output_config.format"),
        ),
    ),
}
"""What to send, or to do, in place of fields that other servers and routes know: the first whose field is
known where it is sent; an empty one is known everywhere.
"""


class UnknownFields(enum.Enum):
    """What becomes of fields that llorch does not know."""

    REFUSE = "refuse"
    IGNORE = "ignore"


@dataclass(frozen=True, slots=True)
class UnknownField:
    """A field that was not read. path: where it is in the body. known: the names that are read there."""

    path: str
    known: tuple[str, ...]

    def description(self, *, ignorable: bool = True) -> str:
        """Return why it is refused, and what to do. ignorable: the worker can be told to leave it aside."""
        in_form = self.path.startswith("response_format.")
        others = (text for known, text in _INSTEAD.get(self.path, ()) if known in ("", *self.known))
        todo = ["Leave it out", f"send {JSON_SCHEMA_SHAPE}" if in_form else next(others, "")]
        todo.append("start the worker with --unknown-fields ignore" if ignorable else "")
        return f"unknown field; known are {', '.join(self.known)}. {', or '.join(filter(None, todo))}"


def unknown_fields(raw: msgspec.Raw, type_: Any, path: str) -> Iterator[UnknownField]:
    """Yield what ``type_`` has not read of a value inside a body. The value has been read as that type."""
    kind = structure_in(type_)
    if kind is None:
        return
    if (first := memoryview(raw)[:1].tobytes()) == b"[":
        for index, item in enumerate(msgspec.json.decode(raw, type=list[msgspec.Raw])):
            yield from unknown_fields(item, kind, f"{path}[{index}]")
    elif first == b"{":
        known = fields_of(kind)
        for name, value in msgspec.json.decode(raw, type=dict[str, msgspec.Raw]).items():
            if name in known:
                yield from unknown_fields(value, known[name][0], f"{path}.{name}")
            elif not _is_empty(value):
                yield UnknownField(f"{path}.{name[:MAX_NAME_CHARS]}", names_of(kind))


def unknown_names(values: Mapping[str, msgspec.Raw], kind: type[msgspec.Struct]) -> Iterator[UnknownField]:
    """Yield what ``kind`` does not know of a whole body, cut into its values."""
    known = fields_of(kind)
    for name, value in values.items():
        if name not in known and not is_null(value):
            yield UnknownField(name[:MAX_NAME_CHARS], names_of(kind))


def listed(paths: Sequence[str], most: int) -> list[str]:
    """Return paths, at most so many: where there are more, places in lists are left out, then the last
    ones.
    """
    if len(paths) <= most:
        return list(paths)
    found = list(dict.fromkeys(_PLACE.sub("[]", path) for path in paths))
    return found if len(found) <= most else [*found[: most - 1], f"and {len(found) - most + 1} more"]


def is_null(raw: msgspec.Raw) -> bool:
    """Tell whether a value is null, which is the same as none."""
    return memoryview(raw)[:5].tobytes() == b"null"


@functools.cache
def fields_of(kind: type[msgspec.Struct]) -> dict[str, tuple[Any, bool]]:
    """Return a structure's fields: type and whether it must be there, by the name that JSON has."""
    hints = typing.get_type_hints(kind, include_extras=True)
    return {field.encode_name: (hints[field.name], field.required) for field in msgspec.structs.fields(kind)}


@functools.cache
def names_of(kind: type[msgspec.Struct]) -> tuple[str, ...]:
    """Return the names that JSON has for a structure's fields."""
    return tuple(fields_of(kind))


@functools.cache
def structure_in(type_: Any) -> type[msgspec.Struct] | None:
    """Return the structure that a type is, or is a list of, in an alternative if it has several."""
    if isinstance(type_, type) and issubclass(type_, msgspec.Struct):
        return type_
    if typing.get_origin(type_) in (list, typing.Union, types.UnionType):
        found = (structure_in(part) for part in typing.get_args(type_))
        return next((kind for kind in found if kind is not None), None)
    return None


def _is_empty(raw: msgspec.Raw) -> bool:
    """Tell whether there is nothing in a value: null, an empty text, or a list or an object that holds such
    values alone, as ``{"refusal": null}``.
    """
    view = memoryview(raw)
    return len(view) <= _MOST_EMPTY_BYTES and holds_nothing(msgspec.json.decode(view))


def holds_nothing(value: Any) -> bool:
    """Tell whether a value is null, an empty text, or made of such values alone."""
    if isinstance(value, dict):
        return all(map(holds_nothing, value.values()))
    if isinstance(value, list):
        return all(map(holds_nothing, value))
    return value is None or value == ""
