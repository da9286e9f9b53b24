"""Where an artifact may go, checked before anything is read or written."""

from __future__ import annotations

import errno
import os
import re
from pathlib import Path
from typing import Final

from llorch_export.artifact.disk_errors import disk_errors
from llorch_serve.artifact.folder import is_artifact
from llorch_serve.errors import ArtifactError, UsageError

MOUNT_TABLE: Final = Path("/proc/self/mountinfo")


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
