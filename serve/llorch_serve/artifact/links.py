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
import sys
from pathlib import Path
from typing import BinaryIO, Final

from llorch_serve.errors import ArtifactError

_VERSION: Final = re.compile(r"\.\.[^/\\]+")  # what a Kubernetes volume calls the folders that ..data names
_FOLLOW_NOTHING: Final = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_CLOEXEC", 0)
# A FIFO would keep whoever opens it waiting.
_NO_WAITING: Final = getattr(os, "O_NONBLOCK", 0)
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
    real = real_file(path, folder)
    root = next(root for root in link_roots(folder) if real.is_relative_to(root))
    handle = _open_below(root, real.relative_to(root)) if _STEP_BY_STEP else os.open(real, os.O_RDONLY)
    try:
        if not stat.S_ISREG(os.fstat(handle).st_mode):
            raise OSError(errno.EINVAL, "it is no regular file", str(path))
        return os.fdopen(handle, "rb")
    except BaseException:
        os.close(handle)
        raise


def _open_below(root: Path, inner: Path) -> int:
    """Open ``inner`` below ``root`` one folder after the other, so that no part of it can be a link."""
    assert sys.platform != "win32", "Windows opens whole paths only"
    flags = os.O_RDONLY | _FOLLOW_NOTHING | _NO_WAITING
    place = os.open(root, flags | os.O_DIRECTORY)
    for number, part in enumerate(inner.parts, start=1):
        kind = os.O_DIRECTORY if number < len(inner.parts) else 0
        try:
            found = os.open(part, flags | kind, dir_fd=place)
        finally:
            os.close(place)
        place = found
    return place
