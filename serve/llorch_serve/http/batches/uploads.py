"""A file that a caller sends, from the first byte of a multipart body to its record.

Input: pieces of a body of type multipart/form-data. Output: a file on disk, which holds what has come; memory
holds a piece at a time, and the small fields. Methods block on the disk and may be called on any thread.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
from typing import Final

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header

from llorch_serve.errors import FieldViolation, InvalidRequestError
from llorch_serve.http.batches.records import INPUT_PURPOSE, FileRecord
from llorch_serve.http.batches.store import Store
from llorch_serve.http.fields import refuse_fields
from llorch_serve.http.problems import HttpError

MAX_FILE_BYTES: Final = 512 * 2**20
"""Of one file that a caller sends, as OpenAI has it."""
MAX_FORM_BYTES: Final = 64 * 2**10
"""Of all of a body but the file."""

MIN_SECONDS: Final = 3600
MAX_SECONDS: Final = 30 * 24 * 3600
"""After which files may be told to expire, as OpenAI has it."""

FORM: Final = ("file", "purpose", "expires_after[anchor]", "expires_after[seconds]")
"""The fields of the form."""

_FILE, *_FIELDS = FORM
_SILENT: Final = logging.Logger("forms", logging.CRITICAL)
"""For the library, which warns the log of every bad byte: whoever sends it is told."""
_MOST_NAME_CHARS: Final = 255
_MOST_VALUE_BYTES: Final = 1024
_MOST_PARTS: Final = 16
_NUMBER: Final = re.compile(r"[0-9]{1,9}")


class Upload:
    """Takes a body piece by piece, then keeps the file or abandons it.

    owner: whose file it becomes. content_type: the body's header. ignore_unknown: fields that are not known
    are left aside, in ``ignored``, and not refused.
    Raises HttpError for another type than a form, and if the caller has no room.
    """

    def __init__(self, store: Store, owner: str, content_type: str, *, ignore_unknown: bool = False) -> None:
        self._store = store
        self._owner = owner
        self._size = self._counted = 0  # bytes of the file, and those that the store has counted
        self._fields: dict[str, bytearray] = {}
        self._bad: list[FieldViolation] = []
        self._ignore_unknown = ignore_unknown
        self.ignored: list[str] = []
        self._filename: str | None = None
        self._parts = 0
        self._part: str | None = None  # that which comes now; None: one that is left aside
        self._header = (bytearray(), bytearray())
        self._disposition = b""
        self._is_whole = False
        self._rest = 0  # bytes beside the file's
        self._parser = self._made_parser(content_type)
        store.check_room(owner, 0)
        self._place, self._file = store.folder.new_upload()

    def write(self, piece: bytes) -> None:
        """Take bytes of the body.

        Raises HttpError for too many, or bytes that are no form, OSError if the disk is full.
        """
        before = self._size
        try:
            self._parser.write(piece)
        except FormParserError as error:
            raise _no_form(f"the body is no multipart form ({error})") from error
        if (grown := self._size - before) > 0:
            self._store.take(self._owner, grown)
            self._counted += grown
        self._rest += len(piece) - grown
        if self._rest > MAX_FORM_BYTES:
            raise _no_form(f"the body has more than {MAX_FORM_BYTES} bytes beside the file")

    def finish(self) -> FileRecord:
        """Keep the file, once the body is whole.

        Raises InvalidRequestError for bad fields, HttpError for a form that has no end, or too many files.
        """
        if not self._is_whole:
            raise _no_form("the form ends before its last boundary")
        seconds = self._check()
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        name = self._filename or ""
        record = self._store.keep_upload(self._place, self._size, self._owner, name, INPUT_PURPOSE, seconds)
        self._counted = 0
        return record

    def abandon(self) -> None:
        """Let go of what has come, unless it is kept."""
        with contextlib.suppress(OSError):  # what a full disk did not take, it does not take now
            self._file.close()
        self._store.give_back(self._owner, self._counted)
        self._counted = 0
        self._place.unlink(missing_ok=True)

    def _made_parser(self, content_type: str) -> MultipartParser:
        kind, options = parse_options_header(content_type[:1024])
        if kind != b"multipart/form-data":
            found = f"Content-Type is {kind.decode('latin-1')[:100]!r}, expected multipart/form-data"
            raise HttpError(415, "unsupported_media_type", found)
        boundary = options.get(b"boundary", b"")
        if not boundary:
            raise _no_form("Content-Type names no boundary")
        try:
            parser = MultipartParser(
                boundary,
                {
                    "on_part_begin": self._begin_part,
                    "on_header_field": lambda data, start, end: self._header[0].extend(data[start:end]),
                    "on_header_value": lambda data, start, end: self._header[1].extend(data[start:end]),
                    "on_header_end": self._end_header,
                    "on_headers_finished": self._begin_data,
                    "on_part_data": self._take_data,
                    "on_end": self._end,
                },
            )
        except FormParserError as error:
            raise _no_form(f"Content-Type is no form's ({error})") from error
        parser.logger = _SILENT
        return parser

    def _begin_part(self) -> None:
        self._parts += 1
        if self._parts > _MOST_PARTS:
            raise _no_form(f"the form has more than {_MOST_PARTS} fields")
        self._disposition = b""

    def _end_header(self) -> None:
        name, value = self._header
        if name.lower() == b"content-disposition":
            self._disposition = bytes(value)
        self._header = (bytearray(), bytearray())

    def _begin_data(self) -> None:
        _, options = parse_options_header(self._disposition)
        name = options.get(b"name", b"").decode("utf-8", "replace")[:_MOST_NAME_CHARS]
        self._part = name
        if name == _FILE:
            if self._filename is not None:
                raise _no_form("the form has two fields of the name file")
            self._filename = plain_name(options.get(b"filename", b""))
        elif name in self._fields:
            self._bad.append(FieldViolation(name, "sent twice, expected once"))
            self._part = None
        elif name in _FIELDS:
            self._fields[name] = bytearray()
        elif self._ignore_unknown:
            self.ignored.append(name)
            self._part = None
        else:
            known = ", ".join(FORM)
            self._bad.append(FieldViolation(name, f"unknown field; known are {known}. Leave it out"))
            self._part = None

    def _take_data(self, data: bytes, start: int, end: int) -> None:
        if self._part == _FILE:
            size = end - start
            if self._size + size > MAX_FILE_BYTES:
                raise too_large()
            self._size += size
            self._file.write(memoryview(data)[start:end])
        elif self._part is not None:
            value = self._fields[self._part]
            value += data[start:end]
            if len(value) > _MOST_VALUE_BYTES:
                raise _no_form(f"{self._part} has more than {_MOST_VALUE_BYTES} bytes")

    def _end(self) -> None:
        self._is_whole = True

    def _check(self) -> int | None:
        """Return after how many seconds the file expires, None: never. Raises InvalidRequestError."""
        bad = self._bad
        values = {name: value.decode("utf-8", "replace") for name, value in self._fields.items()}
        if self._filename is None:
            bad.append(FieldViolation(_FILE, "not set, expected a file of JSON Lines"))
        elif not self._size:
            bad.append(FieldViolation(_FILE, "empty, expected a file of JSON Lines"))
        if (purpose := values.get("purpose")) != INPUT_PURPOSE:
            found = "not set" if purpose is None else f"found {purpose[:100]!r}"
            bad.append(
                FieldViolation("purpose", f"{found}, expected {INPUT_PURPOSE!r}: nothing else reads files")
            )
        anchor, seconds = values.get("expires_after[anchor]"), values.get("expires_after[seconds]")
        found_seconds = None
        if (anchor, seconds) != (None, None):
            number = int(seconds) if seconds is not None and _NUMBER.fullmatch(seconds) else None
            try:
                found_seconds = check_expiry(anchor, number)
            except InvalidRequestError as error:
                bad += error.violations
        if bad:
            refuse_fields(bad)
        return found_seconds


def check_expiry(anchor: str | None, seconds: int | None, name: str = "expires_after") -> int:
    """Return after how many seconds a file expires. name: of the field. Raises InvalidRequestError."""
    bad = []
    if anchor != "created_at":
        bad.append(FieldViolation(f"{name}[anchor]", "expected 'created_at'"))
    if seconds is None or not MIN_SECONDS <= seconds <= MAX_SECONDS:
        bad.append(FieldViolation(f"{name}[seconds]", f"expected {MIN_SECONDS} to {MAX_SECONDS}"))
    if bad or seconds is None:
        raise InvalidRequestError(bad)
    return seconds


def plain_name(sent: bytes) -> str:
    """Return what a file is called: a label for its owner, without folders and what cannot be printed."""
    text = sent.decode("utf-8", "replace").replace("\\", "/").rpartition("/")[2]
    return "".join(char for char in text if char.isprintable())[:_MOST_NAME_CHARS]


def too_large() -> HttpError:
    """Return the refusal of a file that is larger than any may be."""
    found = f"the file has more than {MAX_FILE_BYTES} bytes; send its lines in several files"
    return HttpError(413, "file_too_large", found, (("Connection", "close"),))


def _no_form(found: str) -> HttpError:
    told = f"{found}; send multipart/form-data with the fields file and purpose"
    return HttpError(400, "invalid_form", told, (("Connection", "close"),))
