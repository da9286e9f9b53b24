"""A repository's files, from whichever hub its reference names.

Input is a :class:`Reference`; output is a :class:`Listing`, and the folder of a snapshot in the hub's cache
that holds the files that were asked for, each with the size and the hash that the hub lists.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Protocol

from llorch_serve.hub import hugging_face, modelscope
from llorch_serve.hub.listing import Listing
from llorch_serve.hub.reference import Hub, Reference


class _Hub(Protocol):
    """A module of this room that speaks with one hub."""

    def list_repository(self, reference: Reference, note: str = "") -> Listing: ...

    def fetch(self, listing: Listing, paths: Sequence[str], note: str = "") -> Path: ...

    def download(self, listing: Listing, path: str, part: Path, size: int) -> None: ...

    def cached_snapshot(self, reference: Reference) -> Path | None: ...

    def told_failures(self, reference: Reference, note: str = "") -> AbstractContextManager[None]: ...


def _hub(reference: Reference) -> _Hub:
    if reference.hub is Hub.MODELSCOPE:  # each on a line of its own, for then its functions are type-checked
        return modelscope
    return hugging_face


def list_repository(reference: Reference, note: str = "") -> Listing:
    """Ask the hub what it holds; ``note`` is added to what failures name.

    Raises ArtifactError or HubError, as :func:`told_failures` does.
    """
    return _hub(reference).list_repository(reference, note)


def fetch(listing: Listing, paths: Sequence[str], note: str = "") -> Path:
    """Return the snapshot's folder in the cache, with ``paths`` in it; what is there is not fetched again.

    Raises HubError if a file comes with another size or content than is listed; nothing of it is kept then.
    Raises ResourceError if the disk cannot hold what is missing.
    """
    return _hub(listing.reference).fetch(listing, paths, note)


def download(listing: Listing, path: str, part: Path, size: int) -> None:
    """Fetch a file of known size, or what is missing of it, to ``part``, outside of the cache.

    Raises HubError if it comes with another size; nothing of it is kept then.
    """
    _hub(listing.reference).download(listing, path, part, size)


def cached_snapshot(reference: Reference) -> Path | None:
    """Return the folder of a snapshot that is in the cache, whole or in part, without asking the hub."""
    return _hub(reference).cached_snapshot(reference)


def told_failures(reference: Reference, note: str = "") -> AbstractContextManager[None]:
    """Raise what fails inside, of the hub's client or of a disk, as an error of ours: one sentence."""
    return _hub(reference).told_failures(reference, note)
