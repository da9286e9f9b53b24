"""Files that are whole or not there, and that a power cut does not empty.

Data is on the disk before the name that promises it: a file system may write a rename before the bytes of
what was renamed.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import stat
import sys
from pathlib import Path


def write_whole(path: Path, *parts: bytes | memoryview) -> None:
    """Write a file of ``parts``: readers find the old content or all of the new, whatever happens meanwhile.

    A link stays one: its target is written. What is no file (``/dev/stdout``, a pipe) is written to as it is.
    Raises OSError.
    """
    place = Path(os.path.realpath(path))
    try:
        mode = place.stat().st_mode
    except FileNotFoundError:
        mode = None
    if mode is not None and not stat.S_ISREG(mode):
        with place.open("wb") as file:
            file.writelines(parts)
        return
    unfinished = place.with_name(f".{place.name}.{secrets.token_hex(4)}.part")
    try:
        with unfinished.open("xb") as file:
            file.writelines(parts)
            file.flush()
            os.fsync(file.fileno())
        if mode is not None:
            unfinished.chmod(stat.S_IMODE(mode))
        unfinished.replace(place)
    except BaseException:
        with contextlib.suppress(OSError):  # the first error is the one to tell
            unfinished.unlink(missing_ok=True)
        raise
    flush_folder(place.parent)


def flush_tree(folder: Path) -> None:
    """Wait until the disk has every file below ``folder``, and every name. Raises OSError."""
    for path, _, files in os.walk(folder):
        for name in files:
            _flush(Path(path) / name, os.O_RDWR)
        flush_folder(Path(path))


def flush_folder(folder: Path) -> None:
    """Wait until the disk has the names in ``folder``, where the system has such a call. Raises OSError."""
    if sys.platform != "win32":
        try:
            _flush(folder, os.O_RDONLY)
        except OSError as error:
            # Some network file systems know it for files alone.
            if error.errno not in (errno.EINVAL, errno.ENOTSUP):
                raise


def _flush(path: Path, flags: int) -> None:
    handle = os.open(path, flags)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
