"""Which files of a model's folder a signature covers, and whether any changed while it was loaded.

Input is a folder that a stranger may have filled. All of its files are covered but the signature itself, the
card of a hub's repository, which is written later and read by people alone, and what Git keeps.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from llorch_serve.artifact.links import real_file
from llorch_serve.errors import ArtifactError

SIGNATURE_NAME: Final = "model.sig"
CARD_NAME: Final = "README.md"
GIT_NAMES: Final = frozenset({".git", ".github", ".gitattributes", ".gitignore"})  # as model-signing has it
_MOST_FILES: Final = 10_000

_Identity = tuple[int, int, int, int, int]


@dataclass(frozen=True, slots=True)
class SignedFolder:
    """A folder whose signature was good. files: what the system said of each before it was read."""

    folder: Path
    files: Mapping[Path, _Identity]

    def check_unchanged(self) -> None:
        """Raise ArtifactError if a file was replaced, written to, added or removed since."""
        if identities(self.folder) != self.files:
            raise ArtifactError(
                f"files of {self.folder} changed between the check of its signature and the end of its load; "
                "let nobody write there, and start again"
            )


def files_to_cover(folder: Path) -> list[Path]:
    """Return the files of a folder, those that Git keeps left out.

    Raises ArtifactError for what no signature can cover: links out of the folder or to folders, pipes.
    """
    found: list[Path] = []
    volume = (folder / "..data").is_symlink()  # a Kubernetes volume, which keeps versions of its files in ..*
    try:
        for at, folders, names in os.walk(folder, onerror=_raise):
            place = Path(at)
            if place == folder:
                folders[:] = [name for name in folders if not (volume and name.startswith(".."))]
                folders[:] = [name for name in folders if name not in GIT_NAMES]
                names = [name for name in names if name not in GIT_NAMES]
            for name in folders:
                if (place / name).is_symlink():
                    raise ArtifactError(
                        f"{place / name} is a link to a folder, which no signature covers; put a folder there"
                    )
            found += [place / name for name in names]
            if len(found) > _MOST_FILES:
                raise ArtifactError(f"{folder} has more than {_MOST_FILES} files, which no model has")
        for path in found:
            if not real_file(path, folder).is_file():
                raise ArtifactError(f"{path} is no regular file, which no signature covers; remove it")
    except OSError as error:
        raise ArtifactError(f"{folder} cannot be read: {error.strerror or error}") from error
    return found


def identities(folder: Path) -> dict[Path, _Identity]:
    """Return what tells a file from another one, or from itself before it was written to. Raises
    ArtifactError.
    """
    found = {}
    for path in files_to_cover(folder):
        try:
            status = path.stat()
        except OSError as error:
            raise ArtifactError(f"{path} cannot be read: {error.strerror or error}") from error
        # The time of the last change of state cannot be set back, other than that of the content.
        found[path] = (
            status.st_dev,
            status.st_ino,
            status.st_size,
            status.st_mtime_ns,
            status.st_ctime_ns,
        )
    return found


def _raise(error: OSError) -> None:
    raise error
