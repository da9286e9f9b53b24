"""The hidden folder in which a pull gathers files, beside the place that it gets in the end.

Input is that place; output is a folder which holds files and folders of pulls alone. It may be there already,
with what a call before left, and whoever may write beside the place may have made it: what is written to it
or removed from it must be nobody else's.
"""

from __future__ import annotations

import os
import stat
import tempfile
from collections.abc import Iterator, Set
from pathlib import Path
from typing import Final

from llorch_serve.errors import UsageError

_JUNCTION: Final = 0xA0000003  # the tag of a link to a folder that Windows does not call one


def open_gathered(place: Path) -> Path:
    """Return the folder in which files of ``place`` are gathered; it is made if there is none.

    Raises UsageError if it, or anything in it, is what no pull makes: a link, a file with a second name, a
    pipe; or if it belongs to another user. Raises OSError if it cannot be made or read.
    """
    folder = place.with_name(f".{place.name}.pull")
    try:
        folder.mkdir()
    except FileExistsError:
        user = os.geteuid() if hasattr(os, "geteuid") else None
        if user is not None and folder.lstat().st_uid != user:
            user = _user_of_new_folders(place.parent)
        _require_own(folder, folder, user)
        for entry in _entries(folder):
            _require_own(Path(entry.path), folder, user)
    return folder


def drop_others(folder: Path, wanted: Set[str]) -> None:
    """Remove what an earlier call left of another revision.

    wanted: paths of files, relative to the folder.
    """
    found = [Path(entry.path) for entry in _entries(folder)]
    for path in reversed(found):  # what a folder holds comes before it
        if path.is_dir() and not path.is_symlink():
            if not any(path.iterdir()):
                path.rmdir()
        elif path.relative_to(folder).as_posix() not in wanted:
            path.unlink()


def _entries(folder: Path) -> Iterator[os.DirEntry[str]]:
    """Yield what lies below a folder, each folder before what it holds; links are not followed."""
    pending = [str(folder)]
    while pending:
        with os.scandir(pending.pop()) as entries:
            for entry in entries:
                yield entry
                if entry.is_dir(follow_symlinks=False):
                    pending.append(entry.path)


def _user_of_new_folders(place: Path) -> int:
    """Return whom a file system gives what this process makes there; a file server may have its own mind."""
    made = Path(tempfile.mkdtemp(prefix=".", dir=place))
    try:
        return made.lstat().st_uid
    finally:
        made.rmdir()


def _require_own(path: Path, folder: Path, user: int | None) -> None:
    status = path.lstat()
    found = None
    if stat.S_ISLNK(status.st_mode) or getattr(status, "st_reparse_tag", 0) == _JUNCTION:
        found = "is a link"
    elif path == folder and not stat.S_ISDIR(status.st_mode):
        found = "is no folder"
    elif not (stat.S_ISDIR(status.st_mode) or stat.S_ISREG(status.st_mode)):
        found = "is no file and no folder"
    elif stat.S_ISREG(status.st_mode) and status.st_nlink > 1:
        found = "has another name too, under which it would be changed"
    elif user is not None and status.st_uid != user:
        found = "belongs to another user"
    if found is not None:
        raise UsageError(
            f"{path} {found}, which nothing has that a pull leaves, and files are gathered in {folder}; see "
            "whose it is, remove it, and pull again"
        )
