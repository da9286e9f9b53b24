"""Which files of a model's folder a signature covers, and whether any changed while it was loaded.

Input is a folder that a stranger may have filled. All of its files are covered but the signature itself, the
card of a hub's repository, which is written later and read by people alone, and what Git keeps.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from llorch_serve.artifact.identities import Identities, identities
from llorch_serve.artifact.links import real_file
from llorch_serve.errors import ArtifactError

SIGNATURE_NAME: Final = "model.sig"
CARD_NAME: Final = "README.md"
GIT_NAMES: Final = frozenset({".git", ".github", ".gitattributes", ".gitignore"})  # as model-signing has it
_MOST_ENTRIES: Final = 10_000
_COARSEST_CLOCK_NS: Final = 20_000_000  # by which local file systems tell times


@dataclass(frozen=True, slots=True)
class SignedFolder:
    """A folder whose signature was good. found: what the system said before any of it was read."""

    folder: Path
    found: Identities

    @classmethod
    def of(cls, folder: Path) -> SignedFolder:
        """Look at a folder whose signature is then checked. Raises ArtifactError as :func:`files_to_cover`
        does.
        """
        found = _identities(folder)
        newest = max(one.status_changed for one in found.own.values())
        if time.time_ns() - newest < _COARSEST_CLOCK_NS:
            # Two changes within one tick of a file system's clock would leave the same time.
            time.sleep(_COARSEST_CLOCK_NS / 1e9)
            found = _identities(folder)
        return cls(folder, found)

    def check_unchanged(self) -> None:
        """Raise ArtifactError if a file, a link or a folder was replaced, written to, added or removed since,
        even if all is again as it was.
        """
        if (path := self.found.changed(_identities(self.folder))) is not None:
            raise ArtifactError(
                f"{path} changed between the check of the signature of {self.folder} and the end of its "
                "load; let nobody write there, and start again"
            )


def files_to_cover(folder: Path) -> list[Path]:
    """Return the files of a folder, those that Git keeps left out.

    Raises ArtifactError for what no signature can cover: links out of the folder or to folders, pipes; and
    for more files and folders than a model has.
    """
    return _walk(folder)[1]


def _identities(folder: Path) -> Identities:
    folders, files = _walk(folder)
    try:
        return identities(folders, files)
    except OSError as error:
        raise ArtifactError(f"{folder} cannot be read: {error.strerror or error}") from error


def _walk(folder: Path) -> tuple[list[Path], list[Path]]:
    """Return the folders, the given one first, and the files that are covered."""
    folders, files = [folder], list[Path]()
    volume = (folder / "..data").is_symlink()  # a Kubernetes volume, which keeps versions of its files in ..*
    entries = 0
    try:
        for place in folders:  # which grows meanwhile
            for entry in _few(place, _MOST_ENTRIES - entries, folder):
                entries += 1
                path, is_folder = place / entry.name, entry.is_dir()
                kept_apart = volume and is_folder and entry.name.startswith("..")
                if place == folder and (kept_apart or entry.name in GIT_NAMES):
                    continue
                if is_folder and entry.is_symlink():
                    raise ArtifactError(
                        f"{path} is a link to a folder, which no signature covers; put a folder there"
                    )
                (folders if is_folder else files).append(path)
        for path in files:
            if not real_file(path, folder).is_file():
                raise ArtifactError(f"{path} is no regular file, which no signature covers; remove it")
    except OSError as error:
        raise ArtifactError(f"{folder} cannot be read: {error.strerror or error}") from error
    return folders, files


def _few(place: Path, most: int, folder: Path) -> Iterator[os.DirEntry[str]]:
    """Yield what lies in ``place``. Raises ArtifactError, without a look at the rest, beyond ``most``."""
    with os.scandir(place) as found:
        for number, entry in enumerate(found):
            if number == most:
                raise ArtifactError(
                    f"{folder} has more than {_MOST_ENTRIES} files and folders, which no model has"
                )
            yield entry
