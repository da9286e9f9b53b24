"""One export, pull or batch at a time: a lock file next to the output, held from first byte to the last."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import sys
from collections.abc import Iterator
from pathlib import Path

from llorch_serve.errors import ArtifactError, UsageError

if sys.platform == "win32":
    import msvcrt
else:
    import fcntl


class BeingWrittenError(UsageError):
    """Another run has the place; it may have left what was wanted when it ends."""


@contextlib.contextmanager
def exclusive(place: Path, work: str = "export or pull", kind: str = "folder") -> Iterator[None]:
    """Hold ``place`` for one run, on this machine and wherever the file system tells of locks.

    work, kind: what the run is and what the place is, for whoever finds it held.
    Raises BeingWrittenError while another has it, ArtifactError if something else has the lock's name,
    OSError if the file system knows no locks.
    """
    path = place.with_name(f".{place.name}.lock")
    handle = _locked(path, place, work, kind)
    try:
        yield
    finally:
        if sys.platform == "win32":  # where an open file cannot be removed
            os.close(handle)
            with contextlib.suppress(OSError):  # the next one has it already
                path.unlink()
        else:
            path.unlink(missing_ok=True)
            os.close(handle)


def _locked(path: Path, place: Path, work: str, kind: str) -> int:
    while True:
        try:
            handle = os.open(path, os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0), 0o600)
        except OSError as error:
            if error.errno in (errno.EISDIR, errno.ELOOP):
                raise _no_lock(path, place) from error
            raise
        try:
            found = os.fstat(handle)
            if not stat.S_ISREG(found.st_mode) or found.st_size:  # it would be removed
                raise _no_lock(path, place)
            _lock(handle)
            # Whoever had it removes the file; a lock on a file without a name would keep nobody out.
            if os.path.samestat(os.fstat(handle), os.lstat(path)):
                return handle
        except FileNotFoundError:
            pass
        except BlockingIOError as error:
            os.close(handle)
            raise BeingWrittenError(
                f"another {work} is writing {place}; wait until it has ended, or choose another {kind}"
            ) from error
        except BaseException:
            os.close(handle)
            raise
        os.close(handle)


def _no_lock(path: Path, place: Path) -> ArtifactError:
    return ArtifactError(
        f"{path} is no lock that llorch made, and one of that name is needed beside {place}; move it away"
    )


def _lock(handle: int) -> None:
    """Take the lock, which the system gives back when its process ends. Raises BlockingIOError if another has
    it.
    """
    if sys.platform == "win32":
        try:
            msvcrt.locking(handle, msvcrt.LK_NBLCK, 1)
        except PermissionError as error:
            raise BlockingIOError(*error.args) from error
    else:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
