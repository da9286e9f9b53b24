"""Folders whose files are trusted because nobody else can write them."""

from __future__ import annotations

import os
import stat
import sys
from pathlib import Path


class NotPrivateError(Exception):
    """Somebody else could have written it, or it cannot be made; the message is for people."""


def make_private(folder: Path) -> None:
    """Make a folder for this user alone, or check that one is. Raises as :func:`check_private`."""
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        folder.mkdir(mode=0o700, exist_ok=True)
    except OSError as error:
        raise NotPrivateError(
            f"{folder} cannot be made ({error.strerror}); expected a folder that can be written: set "
            "LLORCH_CACHE to one"
        ) from error
    check_private(folder)
    for place in Path(os.path.realpath(folder)).parents:
        mode = place.stat().st_mode
        if mode & stat.S_IWOTH and not mode & stat.S_ISVTX:
            raise NotPrivateError(
                f"{place}, which {folder} lies in, can be written by everybody; expected a folder where "
                "nobody else can put files: set LLORCH_CACHE to one"
            )


def check_private(path: Path, *, folder: bool = True) -> os.stat_result:
    """Return the status of a folder, or of a file, that belongs to this user and that nobody else may write.

    Raises NotPrivateError for one that is another's, can be written by others, is a link or is of another
    kind, OSError if it is not there.
    """
    found = path.lstat()
    what = stat.S_ISDIR if folder else stat.S_ISREG
    if not what(found.st_mode):
        problem = f"is no {'folder' if folder else 'file'}"
    elif sys.platform != "win32" and found.st_uid != os.geteuid():
        problem = f"belongs to user {found.st_uid}"
    elif found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        problem = f"can be written by others (mode {stat.S_IMODE(found.st_mode):o})"
    else:
        return found
    raise NotPrivateError(
        f"{path} {problem}; expected a {'folder' if folder else 'file'} of your own that nobody else can "
        "write: remove it, or set LLORCH_CACHE to another folder"
    )
