"""What the system says of every name on the way to a model's files, so that a name which meant something else
for a moment is noticed afterwards.

Input are the files and folders of a model; output is a mapping of real paths, among them links and the
folders above, to what tells each from another, or from itself before it was changed.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

_MOST_LINKS: Final = 40  # on the way to one file, as Linux has it


@dataclass(frozen=True, slots=True)
class Identity:
    """A file, link or folder at one moment. Times are in nanoseconds.

    status_changed: when the system last changed anything of it, its name in most file systems included. It
        cannot be set back, other than the time of the content.
    """

    device: int
    inode: int
    mode: int
    size: int
    content_changed: int
    status_changed: int

    def is_same_folder(self, later: Identity) -> bool:
        """Tell whether ``later`` is the same folder, in which others may have made files."""
        return (later.device, later.inode, later.mode) == (self.device, self.inode, self.mode)

    def may_be_renamed(self, later: Identity) -> bool:
        """Tell whether a folder has another time of its status, as after a rename, and not of its content."""
        return self.content_changed == later.content_changed and self.status_changed != later.status_changed


@dataclass(frozen=True, slots=True)
class Identities:
    """Of a model's files and folders and of what leads to them.

    own: those that must stay as they are. above: folders that lead to them.
    """

    own: Mapping[Path, Identity]
    above: Mapping[Path, Identity]

    def changed(self, later: Identities) -> Path | None:
        """Return the first path that is not what it was, or that came or went; None if there is none."""
        differing = [path for path, was in self.own.items() if later.own.get(path) != was]
        differing += later.own.keys() - self.own.keys()
        differing += self.above.keys() ^ later.above.keys()
        differing += [path for path in self.above.keys() & later.above.keys() if self._differs(path, later)]
        return min(differing, default=None)

    def _differs(self, path: Path, later: Identities) -> bool:
        """Tell whether a folder above is another one, or was renamed.

        A rename and one back change the content of the folder that it lies in. Where they do not, as where a
        container's file system makes a folder writable, nobody renamed it.
        """
        was, now = self.above[path], later.above[path]
        if not was.is_same_folder(now):
            return True
        around, around_now = self.above.get(path.parent), later.above.get(path.parent)
        is_around_same = (
            around is not None
            and around_now is not None
            and around.content_changed == around_now.content_changed
        )
        return was.may_be_renamed(now) and not is_around_same


def identities(folders: Iterable[Path], files: Iterable[Path]) -> Identities:
    """Return those of ``folders``, whose entries must stay, of ``files`` in them, and of what leads there.

    Raises OSError if a path cannot be followed to its end.
    """
    found: dict[Path, Identity] = {}
    places = {folder: _follow(folder.absolute(), found) for folder in folders}
    for file in files:
        _follow(places[file.parent] / file.name, found, known=places[file.parent])
    above = {path for path, one in found.items() if stat.S_ISDIR(one.mode)} - set(places.values())
    return Identities(
        own={path: one for path, one in found.items() if path not in above},
        above={path: found[path] for path in above},
    )


def _follow(path: Path, found: dict[Path, Identity], known: Path | None = None) -> Path:
    """Note every name that the system looks up for ``path``; return the real path.

    known: a real folder, noted already, that ``path`` begins with.
    """
    place = Path(path.anchor) if known is None else known
    found.setdefault(place, _identity(place))
    pending = list(reversed(path.relative_to(place).parts))
    links = 0
    while pending:
        part = pending.pop()
        if part == "..":
            place = place.parent
            continue
        here = place / part
        one = found[here] = found.get(here) or _identity(here)  # what was seen first is what is compared
        if not stat.S_ISLNK(one.mode):
            place = here
            continue
        links += 1
        if links > _MOST_LINKS:
            raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(path))
        target = here.readlink()
        if target.is_absolute():
            place = Path(target.anchor)
            target = target.relative_to(place)
        pending += reversed(target.parts)
    return place


def _identity(path: Path) -> Identity:
    status = path.lstat()
    return Identity(
        device=status.st_dev,
        inode=status.st_ino,
        mode=status.st_mode,
        size=status.st_size,
        content_changed=status.st_mtime_ns,
        status_changed=status.st_ctime_ns,
    )
