"""Counts the values of a JSON body before it is decoded: decoding holds the interpreter's lock, for a second
per million of them.

Input: a request's raw bytes, from ``fields.py``. What is malformed is left for the decoder to name.
"""

from __future__ import annotations

from typing import Final

from llorch_serve.errors import FieldViolation, InvalidRequestError

MAX_COMMAS: Final = 3 * 2**16
"""Outside of strings: more than a prompt of token ids needs, which is the longest list there is."""

MAX_OPENINGS: Final = 2**14
"""Objects and lists: messages, their parts, tools and schemas."""

_SMALL_BYTES: Final = 2**14  # as many openings need as many bytes
_PIECE: Final = 2**16  # bytes that are looked at without another thread's turn


def check_values(raw: bytes, field: str) -> None:
    """Raise InvalidRequestError, naming ``field``, for a body of more values than any request needs."""
    if len(raw) <= _SMALL_BYTES:
        return
    commas = openings = 0
    in_string = escaping = False
    for at in range(0, len(raw), _PIECE):
        piece = raw[at + escaping : at + _PIECE]
        piece = piece.replace(rb"\\", b"")
        escaping = piece.endswith(b"\\")  # what it escapes is the next piece's first byte
        parts = piece.replace(rb"\"", b"").split(b'"')
        outside = b"".join(parts[in_string::2])
        in_string ^= len(parts) % 2 == 0
        commas += outside.count(b",")
        openings += outside.count(b"[") + outside.count(b"{")
        if commas > MAX_COMMAS or openings > MAX_OPENINGS:
            found = (
                f"found more than {MAX_COMMAS} commas or {MAX_OPENINGS} objects and lists in {len(raw)} "
                f"bytes, "
                "expected fewer; send shorter lists"
            )
            raise InvalidRequestError([FieldViolation(field, found)])
