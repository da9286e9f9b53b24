"""Links in a model's folder: which are followed, and opening a file without following any other.

Input is a folder that a stranger may have filled. A link may lead to a file of the folder itself, and out of
it in two layouts that are made of links: a snapshot in the Hugging Face hub's cache, whose files lie in
``blobs`` of the same repository, and a Kubernetes volume, whose files lie in the folder that its ``..data``
names. What is compared is where a path really ends, so chains of links and ``..`` are of no use.
"""

from __future__ import annotations

import errno
import os
import re
import stat
from pathlib import Path
from typing import BinaryIO, Final

from llorch_serve.errors import ArtifactError

_VERSION: Final = re.compile(r"\.\.[^/\\]+")  # what a Kubernetes volume calls the folders that ..data names
# Flags that a system lacks are left out there. A FIFO would keep whoever opens it waiting.
_NO_LINK: Final = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_CLOEXEC", 0)
_FILE: Final = os.O_RDONLY | _NO_LINK | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
_FOLDER: Final = os.O_RDONLY | _NO_LINK | getattr(os, "O_DIRECTORY", 0) | getattr(os, "O_PATH", 0)
_STEP_BY_STEP: Final = os.open in os.supports_dir_fd and hasattr(os, "O_NOFOLLOW")


def link_roots(folder: Path) -> tuple[Path, ...]:
    """Return the real folders that links in ``folder`` may lead into, itself first."""
    real = Path(os.path.realpath(folder))
    blobs = [
        place.parent / "blobs"
        for place in real.parents
        if place.name == "snapshots" and place.parent.name.startswith("models--")
    ]
    volumes = [version for place in (real, *real.parents) if (version := _volume_version(place)) is not None]
    return (real, *blobs, *volumes)


def _volume_version(place: Path) -> Path | None:
    """Return the folder that a Kubernetes volume's ``..data`` names at present; None if it is no volume."""
    data = place / "..data"
    if not data.is_symlink():
        return None
    name = str(data.readlink())
    return place / name if _VERSION.fullmatch(name) else None


def real_file(path: Path, folder: Path) -> Path:
    """Return the real path of a file that ``path``, a name or a link in ``folder``, stands for.

    Raises ArtifactError if it leads out of the folder, OSError or ValueError if it is no possible path.
    """
    real = Path(os.path.realpath(path))
    if not any(real.is_relative_to(root) for root in link_roots(folder)):
        raise ArtifactError(
            f"{path} is a link that leads out of its folder, to {real}; links may lead into the folder, and "
            "in the hub's cache or a Kubernetes volume to where these keep their files: copy the file into "
            "the folder (cp -L)"
        )
    return real


def open_inside(path: Path, folder: Path) -> BinaryIO:
    """Open a file for reading, where it really lies; a link that appears meanwhile is not followed.

    Raises ArtifactError if it leads out of the folder, OSError if it cannot be opened or is no regular file.
    """
    return open_real(real_file(path, folder))


def open_real(real: Path, *, buffering: int = -1) -> BinaryIO:
    """Open a file by its real path for reading; no part of the path may have become a link.

    Raises OSError if it cannot be opened or is no regular file.
    """
    # The file owns its handle from the first moment: an interrupt must not have it closed twice.
    file = open(real, "rb", buffering, opener=_open_handle)  # noqa: SIM115 - returned
    try:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise OSError(errno.EINVAL, "it is no regular file", str(real))
    except BaseException:
        file.close()
        raise
    return file


def _open_handle(path: str, _flags: int) -> int:
    return _open_step_by_step(Path(path)) if _STEP_BY_STEP else os.open(path, _FILE)


def _open_step_by_step(real: Path) -> int:
    """Open one folder after the other, each in the one before, so that no link is followed on the way."""
    place = os.open(real.anchor, _FOLDER)
    for part in real.parts[1:-1]:
        place = _next(part, _FOLDER, place)
    return _next(real.name, _FILE, place)


def _next(part: str, flags: int, place: int) -> int:
    """Open ``part`` in the folder ``place``, which is closed."""
    try:
        return os.open(part, flags, dir_fd=place)
    finally:
        os.close(place)
