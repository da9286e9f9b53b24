"""A file that only grows, by whole lines: whatever fails, it ends with a line that is whole."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from pathlib import Path
from typing import Final

from llorch_serve.errors import ResourceError, UsageError

_CHUNK: Final = 64 * 1024
FULL: Final = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)  # errors that say there is no room


class AppendedFile:
    """A file of lines that is added to, and nothing else, while it is held."""

    def __init__(self, path: Path) -> None:
        """Open the file, or make it, and cut a line that was being written when its writer ended.

        Raises UsageError if something else has the name, OSError.
        """
        self.path = path
        flags = os.O_RDWR | os.O_CREAT | getattr(os, "O_BINARY", 0) | getattr(os, "O_NONBLOCK", 0)
        self._handle = os.open(path, flags, 0o666)
        try:
            if not stat.S_ISREG(os.fstat(self._handle).st_mode):
                raise UsageError(f"{path} is no file, and a batch goes on from its output; give a file")
            self.size = _end_of_last_line(self._handle)
            self.cut(self.size)
        except BaseException:
            os.close(self._handle)
            raise

    def cut(self, size: int) -> None:
        """Take everything from ``size`` on away. Raises OSError."""
        if os.fstat(self._handle).st_size != size:
            os.ftruncate(self._handle, size)
        os.lseek(self._handle, size, os.SEEK_SET)
        self.size = size

    def append(self, lines: bytes) -> None:
        """Add whole lines. Raises ResourceError if there is no room, OSError; lines that fit stay then."""
        written = 0
        try:
            while written < len(lines):
                written += os.write(self._handle, lines[written:] if written else lines)
        except OSError as error:
            whole = lines.rfind(b"\n", 0, written) + 1
            with contextlib.suppress(OSError):  # the first error is the one to tell
                self.cut(self.size + whole)
            if error.errno in FULL:
                raise self._no_room(error) from error
            raise
        self.size += len(lines)

    def flush(self) -> None:
        """Wait until the disk has it all. Raises ResourceError, OSError."""
        try:
            os.fsync(self._handle)
        except OSError as error:
            if error.errno in FULL:
                raise self._no_room(error) from error
            raise

    def close(self) -> None:
        """Close the file, if it is open."""
        if self._handle >= 0:
            os.close(self._handle)
            self._handle = -1

    def _no_room(self, error: OSError) -> ResourceError:
        return ResourceError(
            f"{self.path} cannot grow ({error.strerror}); what is in it is whole: make room and run the same "
            "command again, which goes on from there"
        )


def _end_of_last_line(handle: int) -> int:
    """Return the length of a file without what follows its last line break."""
    end = os.fstat(handle).st_size
    while end > 0:
        begin = max(0, end - _CHUNK)
        os.lseek(handle, begin, os.SEEK_SET)
        found = os.read(handle, end - begin).rfind(b"\n")
        if found >= 0:
            return begin + found + 1
        end = begin
    return 0
