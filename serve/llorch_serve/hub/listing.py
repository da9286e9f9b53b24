"""What a hub says that a repository holds.

Input are a client's descriptions of files; output is a :class:`Listing`, whose paths stay inside the folder
that they are put into.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from llorch_serve.errors import ArtifactError
from llorch_serve.hub.limits import MOST_FILES
from llorch_serve.hub.reference import Reference


@dataclass(frozen=True, slots=True)
class HubFile:
    """A file of a repository. sha256: in hex, of a large file; blob: Git's own hash of any other."""

    path: str
    bytes: int | None
    sha256: str | None
    blob: str | None


@dataclass(frozen=True, slots=True)
class Listing:
    """What a repository holds at ``commit``, a hash in hex: files by path. Those whose paths lead elsewhere
    are left out.
    """

    reference: Reference
    commit: str
    files: Mapping[str, HubFile]

    def find(self, path: str) -> HubFile | None:
        """Return the file at ``path``."""
        return self.files.get(path)


def require_few(listed: Collection[object], reference: Reference) -> None:
    """Raise ArtifactError if more is listed than a model has."""
    if len(listed) > MOST_FILES:
        raise ArtifactError(
            f"{reference} lists {len(listed)} files; a model has at most {MOST_FILES}, choose another"
        )


def is_inside(path: str) -> bool:
    """Tell whether a repository's path stays in the folder that it is put into, on every system."""
    parts = path.replace("\\", "/").split("/")
    return bool(path) and not {"\0", ":"} & set(path) and not {"", ".", ".."} & set(parts)
