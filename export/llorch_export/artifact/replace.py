"""Moving a finished folder into its place, so that nothing an export has not seen is ever lost there.

``write.py`` asks during and after writing, and holds the lock of ``lock.py``: temporary folders of the output
that are found then were left by exports that were killed.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import secrets
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from llorch_serve.artifact.folder import is_artifact
from llorch_serve.errors import ArtifactError

NEW: Final = ".partial"
"""Ends the name of a folder that an export writes to."""
_OLD: Final = ".old"  # and of one that holds the artifact which is being replaced
_HELD: Final = "artifact"  # its name in there
_TAKEN: Final = (errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR, errno.EISDIR)

Standing = Mapping[str, tuple[int, int, int]] | None
"""What stands at a place: nothing, or a folder's entries by relative path, each with mode, bytes and time of
its last change.
"""


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
    """Make a folder next to ``place``: only within one file system is a move a rename."""
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
    displaced = temporary(place, _OLD)
    old = displaced / _HELD
    try:
        place.rename(old)
        if standing(old) != before:
            raise _changed(place)
        _move_in(new, place)
    except BaseException as error:  # an interrupt must not cost the old artifact either
        if os.path.lexists(old):
            _put_back(displaced, place, error)
        with contextlib.suppress(
            OSError
        ):  # not empty, if another interrupt has come: the next export puts it back
            displaced.rmdir()
        raise
    shutil.rmtree(displaced, ignore_errors=True)


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


def _put_back(displaced: Path, place: Path, error: BaseException) -> None:
    try:
        if not os.path.lexists(place):
            (displaced / _HELD).rename(place)
            return
        reason = "something else stands there now"
    except OSError as refusal:
        reason = str(refusal.strerror)
    kept = displaced.with_suffix(".kept")
    displaced.rename(kept)
    raise ArtifactError(
        f"what stood at {place} could not be put back ({reason}) and was kept as {kept / _HELD}; move it "
        f"where it belongs"
    ) from error


def _changed(place: Path) -> ArtifactError:
    return ArtifactError(
        f"what stands at {place} appeared or changed while the export ran; nothing was replaced. Move it "
        f"away and export again"
    )
