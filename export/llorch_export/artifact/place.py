"""The place that an artifact takes: what may stand there, one export at a time, and moving into it.

``write.py`` asks before, during and after writing. A lock file beside the output is held from before the
first byte to after the last rename, so temporary folders of that output that are found under it were left by
exports that were killed.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import secrets
import shutil
import stat
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

from llorch_serve.artifact.folder import is_artifact
from llorch_serve.errors import ArtifactError, ResourceError, UsageError

if sys.platform == "win32":
    import msvcrt
else:
    import fcntl

MOUNT_TABLE: Final = Path("/proc/self/mountinfo")
NEW: Final = ".partial"
"""Ends the name of a folder that an export writes to."""
_OLD: Final = ".old"  # and of one that holds the artifact which is being replaced
_HELD: Final = "artifact"  # its name in there
_TAKEN: Final = (errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR, errno.EISDIR)

Standing = Mapping[str, tuple[int, int, int]] | None
"""What stands at a place: nothing, or a folder's entries by relative path, each with mode, bytes and time of
its last change.
"""


def real_place(output: Path) -> Path:
    """Return where an artifact for ``output`` goes: links are followed, so that a link to an artifact stays
    one.
    """
    return Path(os.path.realpath(output))


def check_output(output: Path, *, force: bool) -> None:
    """Raise UsageError if an artifact may not be written to ``output``, ArtifactError if it cannot or if that
    cannot be told.

    force: whether it may replace an artifact.
    """
    with disk_errors(output):
        place = real_place(output)
        _check_parent(output, place)
        if not place.exists():
            return
        if not place.is_dir():
            raise UsageError(f"{output} is a file; --output names the artifact's folder")
        here = real_place(Path())
        if place == here or place in here.parents:
            raise UsageError(
                f"--output {output} is the current folder, or holds it; an artifact takes the place of a "
                f"whole folder. "
                "Name a new folder, as in --output model"
            )
        if _is_mount(place):
            raise UsageError(
                f"{output} is a mount point, which no folder can take the place of; choose a folder inside it"
            )
        if is_artifact(place):
            if not force:
                raise UsageError(
                    f"{output} already holds an artifact; replace it with --force, or use --if-changed"
                )
        elif any(place.iterdir()):
            raise UsageError(
                f"{output} is a folder that llorch did not make; choose a new --output, it would be "
                f"replaced as a whole"
            )


def _check_parent(output: Path, place: Path) -> None:
    above = next((folder for folder in place.parents if folder.exists()), place)
    if not above.is_dir():
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))
    if not os.access(above, os.W_OK | os.X_OK):
        raise ArtifactError(
            f"{above} may not be written, and {output} is made in it; check its permissions, or choose "
            f"another --output"
        )


def _is_mount(place: Path) -> bool:
    if os.path.ismount(place):
        return True
    # A folder mounted within its own file system has its parent's device number; only Linux' own table tells.
    try:
        lines = os.fsdecode(MOUNT_TABLE.read_bytes()).splitlines()
    except OSError:
        return False
    points = (line.split(" ")[4] for line in lines)
    return str(place) in (re.sub(r"\\([0-7]{3})", lambda code: chr(int(code[1], 8)), p) for p in points)


@contextlib.contextmanager
def exclusive(place: Path) -> Iterator[None]:
    """Hold ``place`` for one export, on this machine and wherever the file system tells of locks.

    Raises UsageError while another export has it, ArtifactError if something else has the lock's name,
    OSError if the file system knows no locks.
    """
    path = place.with_name(f".{place.name}.lock")
    handle = _locked(path, place)
    try:
        yield
    finally:
        if sys.platform == "win32":  # where an open file cannot be removed
            os.close(handle)
            with contextlib.suppress(OSError):  # the next export has it already
                path.unlink()
        else:
            path.unlink(missing_ok=True)
            os.close(handle)


def _locked(path: Path, place: Path) -> int:
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
            raise UsageError(
                f"another export is writing {place}; wait until it has ended, or choose another --output"
            ) from error
        except BaseException:
            os.close(handle)
            raise
        os.close(handle)


def _no_lock(path: Path, place: Path) -> ArtifactError:
    return ArtifactError(
        f"{path} is no lock of an export, and one of that name is needed beside {place}; move it away"
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


def clear_leftovers(place: Path) -> None:
    """Remove what killed exports to ``place`` left; an artifact that one had taken away comes back. Needs
    :func:`exclusive`.

    Raises ArtifactError if something cannot be removed.
    """
    name = re.compile(rf"\.{re.escape(place.name)}\.[0-9a-f]{{16}}({re.escape(NEW)}|{re.escape(_OLD)})")
    for path in sorted(place.parent.iterdir()):
        found = name.fullmatch(path.name)
        if found is None or path.is_symlink() or not path.is_dir():
            continue
        try:
            if found[1] == _OLD and os.path.lexists(path / _HELD) and not is_artifact(place):
                (path / _HELD).rename(place)
            shutil.rmtree(path)
        except OSError as error:
            raise ArtifactError(
                f"{path} was left by an export that was killed, and cannot be removed ({error.strerror}); "
                f"remove it"
            ) from error


def standing(place: Path) -> Standing:
    """Return what stands at ``place``. Raises OSError."""
    if not os.path.lexists(place):
        return None
    found = {}
    for folder, folders, files in os.walk(place, onerror=_raise):
        for name in (*folders, *files):
            path = Path(folder) / name
            status = path.lstat()
            found[str(path.relative_to(place))] = (status.st_mode, status.st_size, status.st_mtime_ns)
    return found


def _raise(error: OSError) -> None:
    raise error


def temporary(place: Path, suffix: str) -> Path:
    """Make a folder beside ``place``: only within one file system is a move a rename."""
    folder = place.with_name(f".{place.name}.{secrets.token_hex(8)}{suffix}")  # as no person would name one
    folder.mkdir(0o700)
    return folder


def take_place(new: Path, place: Path, before: Standing) -> None:
    """Rename ``new`` to ``place``, where ``before`` stood when the export began.

    Nothing else is ever removed: renames refuse what they find in their way, and what is taken away is looked
    at before it goes.
    Raises ArtifactError if something else stands there by now; then all is as it was, or the message names
    where it is kept.
    """
    if _now(place) != before:
        raise _changed(place)
    if not before:
        if sys.platform == "win32" and before is not None:
            place.rmdir()  # other systems' rename takes the place of an empty folder, and of no other
        _move_in(new, place)
        return
    aside = temporary(place, _OLD)
    old = aside / _HELD
    try:
        place.rename(old)
        if standing(old) != before:
            raise _changed(place)
        _move_in(new, place)
    except BaseException as error:  # an interrupt must not cost the old artifact either
        if os.path.lexists(old):
            _put_back(aside, place, error)
        with contextlib.suppress(
            OSError
        ):  # not empty, if another interrupt has come: the next export puts it back
            aside.rmdir()
        raise
    shutil.rmtree(aside, ignore_errors=True)


def _now(place: Path) -> Standing:
    try:
        return standing(place)
    except NotADirectoryError as error:
        raise _changed(place) from error


def _move_in(new: Path, place: Path) -> None:
    try:
        new.rename(place)
    except OSError as error:
        if error.errno in _TAKEN:
            raise _changed(place) from error
        raise


def _put_back(aside: Path, place: Path, error: BaseException) -> None:
    try:
        if not os.path.lexists(place):
            (aside / _HELD).rename(place)
            return
        reason = "something else stands there now"
    except OSError as refusal:
        reason = str(refusal.strerror)
    kept = aside.with_suffix(".kept")
    aside.rename(kept)
    raise ArtifactError(
        f"what stood at {place} could not be put back ({reason}) and was kept as {kept / _HELD}; move it "
        f"where it belongs"
    ) from error


def _changed(place: Path) -> ArtifactError:
    return ArtifactError(
        f"what stands at {place} appeared or changed while the export ran; nothing was replaced. Move it "
        f"away and export again"
    )


@contextlib.contextmanager
def disk_errors(output: Path) -> Iterator[None]:
    """Turn the operating system's refusals into ours."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise ResourceError(
                f"the disk of {output} is full ({error.strerror}); free some space or choose another --output"
            ) from error
        raise ArtifactError(
            f"cannot write {output}: {error.strerror or error}; check the path and its permissions"
        ) from error
