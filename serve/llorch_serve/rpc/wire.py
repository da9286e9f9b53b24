"""Looks at a protobuf message before it is parsed, as parsing many fields or long texts holds the
interpreter's lock.

It takes a second per million fields, and milliseconds per MiB of a text that becomes a string.

Input: a call's raw bytes, from ``servicer.py``. What is malformed is left for the parser to name.
"""

from __future__ import annotations

from typing import Any, Final, TypeAlias

from llorch_serve.errors import FieldViolation, InvalidRequestError

MAX_FIELDS: Final = 2**16
"""Of one message, those of messages inside included: more than any list that is accepted needs."""

MAX_TEXT_BYTES: Final = 4 * 2**20
"""Of one text, in UTF-8: a million tokens, which is more than contexts hold. HTTP's bodies have as many at
most.
"""

_SMALL_BYTES: Final = 2**16  # such a message has fewer fields than that


Descriptor: TypeAlias = Any
"""A message type's own: of one class in protobuf's Python, of another in its C."""


def check_fields(raw: bytes, kind: Descriptor) -> None:
    """Raise InvalidRequestError for a message of more than MAX_FIELDS fields, or with a text of more than
    MAX_TEXT_BYTES.
    """
    if len(raw) > _SMALL_BYTES and _count(raw, kind) > MAX_FIELDS:
        found = f"found more than {MAX_FIELDS} fields in {len(raw)} bytes, expected fewer; send shorter lists"
        raise InvalidRequestError([FieldViolation("request", found)])


def _count(raw: bytes, kind: Descriptor) -> int:
    """Return how many fields there are, or one more than are allowed, or those before the first malformed
    one.
    """
    found, waiting = 0, [(0, len(raw), kind)]
    try:
        while waiting:
            at, end, message = waiting.pop()
            while at < end and found <= MAX_FIELDS:
                found += 1
                tag, at = _varint(raw, at)
                match tag & 7:
                    case 0:
                        at = _varint(raw, at)[1]
                    case 1:
                        at += 8
                    case 5:
                        at += 4
                    case 2:
                        size, at = _varint(raw, at)
                        field = message.fields_by_number.get(tag >> 3)
                        if field is not None and field.message_type is not None:
                            waiting.append((at, min(at + size, end), field.message_type))
                        elif field is not None and field.type == field.TYPE_STRING and size > MAX_TEXT_BYTES:
                            raise _too_long(field.name, size)
                        at += size
    except IndexError:
        pass  # cut off inside a number
    return found


def _too_long(field: str, size: int) -> InvalidRequestError:
    found = f"found {size} bytes in {field}, expected at most {MAX_TEXT_BYTES} in one text; send it in parts"
    return InvalidRequestError([FieldViolation("request", found)])


def _varint(raw: bytes, at: int) -> tuple[int, int]:
    """Return a number of up to 10 bytes, and where it ends."""
    value = 0
    for shift in range(0, 70, 7):
        byte = raw[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            break
    return value, at
