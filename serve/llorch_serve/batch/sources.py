"""Where a batch's lines come from: a file that is read once in its order, and then by places in any order."""

from __future__ import annotations

import codecs
import hashlib
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Final, Protocol

from llorch_serve.batch.lines import MAX_LINE_BYTES
from llorch_serve.errors import UsageError

MAX_ANSWER_BYTES: Final = 2**30  # of a line of output: vectors of thousands of texts are an answer, too
_CHUNK: Final = 2**20
_OTHER_ENCODINGS: Final = {
    codecs.BOM_UTF16_LE: "UTF-16",
    codecs.BOM_UTF16_BE: "UTF-16",
    b"\x1f\x8b": "gzip",
    b"\x28\xb5\x2f\xfd": "zstd",
}


@dataclass(frozen=True, slots=True)
class RawLine:
    """A line as it lies in its file.

    place, size: where it lies, and its length, both in bytes.
    raw: the line without its end; None: it is longer than MAX_LINE_BYTES.
    """

    number: int
    place: int
    size: int
    raw: bytes | None


class Source(Protocol):
    """A file of lines."""

    @property
    def left_aside(self) -> tuple[str, ...]:
        """Columns of a table that no line is made of."""

    def scan(self) -> Iterator[RawLine]:
        """Yield every line that is not blank, in the file's order. Raises UsageError, OSError."""

    def sha256(self) -> str:
        """Return the hash of the whole file, which has been scanned."""

    def read(self, place: int, size: int) -> bytes:
        """Return the bytes of one line."""

    def close(self) -> None:
        """Give the file back."""


class JsonLinesSource:
    """A file of JSON Lines. A byte order mark, CRLF and blank lines do no harm."""

    left_aside: tuple[str, ...] = ()

    def __init__(self, path: Path) -> None:
        """Open the file. Raises UsageError where it is no file, or one that is packed or in UTF-16."""
        self._path = path
        try:
            mode = path.stat().st_mode
        except FileNotFoundError:
            raise UsageError(f"{path} does not exist; give a file of JSON Lines") from None
        if stat.S_ISDIR(mode):
            raise UsageError(f"{path} is a folder; give a file of JSON Lines")
        if not stat.S_ISREG(mode):  # opening a pipe would wait for whoever writes it
            raise UsageError(f"{path} is no file, and lines are read twice; write them to a file first")
        self._file = path.open("rb")
        try:
            self._begin = self._find_begin()
        except BaseException:
            self._file.close()
            raise
        self._sha256 = ""

    def _find_begin(self) -> int:
        head = self._file.read(4)
        for mark, name in _OTHER_ENCODINGS.items():
            if head.startswith(mark):
                raise UsageError(f"{self._path} is in {name}; give JSON Lines in UTF-8")
        return len(codecs.BOM_UTF8) if head.startswith(codecs.BOM_UTF8) else 0

    def scan(self) -> Iterator[RawLine]:
        """Yield every line that is not blank. Raises OSError."""
        digest = hashlib.sha256()
        self._file.seek(0)
        digest.update(self._file.read(self._begin))
        place = self._begin
        for number, raw in enumerate(whole_lines(self._file, digest, most=MAX_LINE_BYTES), 1):
            if isinstance(raw, int):
                yield RawLine(number, place, raw, None)
                place += raw
                continue
            text = raw.rstrip(b"\r\n")
            if text.strip():
                yield RawLine(number, place, len(text), text if len(text) <= MAX_LINE_BYTES else None)
            place += len(raw)
        self._sha256 = digest.hexdigest()

    def sha256(self) -> str:
        """Return the hash of the file's bytes, which have been scanned."""
        return self._sha256

    def read(self, place: int, size: int) -> bytes:
        """Return the bytes of one line."""
        self._file.seek(place)
        return self._file.read(size)

    def close(self) -> None:
        """Close the file."""
        self._file.close()


class Digest(Protocol):
    """What sees all bytes that are read."""

    def update(self, data: bytes, /) -> None:
        """See some more."""


def whole_lines(file: BinaryIO, digest: Digest | None = None, *, most: int) -> Iterator[bytes | int]:
    """Yield each line with its end; for one that is longer than ``most`` its length, none of it held.

    digest: sees all bytes.
    """
    while raw := file.readline(most + 2):
        if digest:
            digest.update(raw)
        if raw.endswith(b"\n") or len(raw) < most + 2:
            yield raw
            continue
        size = len(raw)
        while rest := file.readline(_CHUNK):
            if digest:
                digest.update(rest)
            size += len(rest)
            if rest.endswith(b"\n"):
                break
        yield size
