"""Single fields of protobuf messages: values that a field cannot carry, lists longer than any honest request
has.

Used by the bridges beside it, which collect what is bad about a whole request.
"""

from __future__ import annotations

from collections.abc import MutableSequence, Sequence
from typing import Final, TypeVar

from google.protobuf.message import Message

from llorch_serve.errors import FieldViolation

MAX_ITEMS: Final = 2**14  # of messages, tools, stop strings and stop token ids
_PART: Final = 2**14  # numbers that are copied at a time

T = TypeVar("T")


def set_field(message: Message, name: str, value: object, path: str, bad: list[FieldViolation]) -> None:
    """Set a field, None leaves it absent; add to ``bad`` a value that it cannot carry, and a field that the
    message lacks.
    """
    if value is None:
        return
    if name not in message.DESCRIPTOR.fields_by_name:
        lacks = f"found a value, expected none, as {message.DESCRIPTOR.name} has no such field; leave it out"
        bad.append(FieldViolation(path, f"cannot be sent: {lacks}"))
        return
    try:
        setattr(message, name, value)
    except ValueError as error:  # out of the wire type's range, or text that UTF-8 cannot encode
        bad.append(FieldViolation(path, f"cannot be sent: {error}"))


def extend_field(
    target: MutableSequence[T], values: Sequence[T], path: str, bad: list[FieldViolation]
) -> None:
    """Extend a repeated field; add to ``bad`` values that it cannot carry."""
    try:
        target.extend(values)
    except ValueError as error:
        bad.append(FieldViolation(path, f"cannot be sent: {error}"))


def copied_ids(ids: Sequence[int]) -> tuple[int, ...]:
    """Return a repeated field's numbers as a tuple, copied part by part, so that other threads run in
    between.
    """
    copy: list[int] = []
    for at in range(0, len(ids), _PART):
        copy += ids[at : at + _PART]
    return tuple(copy)


def extend_ids(target: MutableSequence[int], ids: Sequence[int]) -> None:
    """Extend a repeated field by many numbers, part by part as :func:`copied_ids`."""
    for at in range(0, len(ids), _PART):
        target.extend(ids[at : at + _PART])


def check_count(field: str, found: int, limit: int, bad: list[FieldViolation]) -> bool:
    """Tell whether a list is short enough; add to ``bad`` one that is not."""
    if found > limit:
        bad.append(FieldViolation(field, f"found {found} items, expected at most {limit}"))
    return found <= limit


def optional_text(message: Message, name: str) -> str | None:
    """Return a field's text, or None if it is not set."""
    value: str | None = getattr(message, name) if message.HasField(name) else None
    return value
