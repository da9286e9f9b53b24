"""Fetch a finished artifact from a hub into a folder: whole and checked, or not there.

Input is a repository that holds a manifest; output is the artifact's folder. Files are gathered in a hidden
folder beside it, where a later call goes on with what an earlier one left; the folder gets its name when the
hash of every file has been compared with the manifest's.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from pathlib import Path
from typing import Final

from llorch_serve.artifact.folder import MANIFEST_NAME, MAX_MANIFEST_BYTES, Artifact, load_artifact
from llorch_serve.artifact.lock import exclusive
from llorch_serve.artifact.manifest import FileEntry, decode_manifest
from llorch_serve.artifact.signature import MAX_SIGNATURE_BYTES, check_signature
from llorch_serve.artifact.signed_files import SIGNATURE_NAME
from llorch_serve.errors import ArtifactError, HubError, UsageError
from llorch_serve.files.durable import flush_folder, flush_tree, write_whole
from llorch_serve.hub.files import download, list_repository, told_failures
from llorch_serve.hub.gathered import drop_others, open_gathered
from llorch_serve.hub.limits import require_room
from llorch_serve.hub.listing import Listing
from llorch_serve.hub.reference import Reference

_PART: Final = ".part"


def pull(reference: Reference, folder: Path, *, public_key: Path | None = None) -> Artifact:
    """Return the artifact in ``folder``, fetched unless it is there already, and with its signature.

    public_key: its owner must have signed the artifact, before the folder gets its name.
    Raises UsageError if something else is there or another call writes it, ArtifactError if the repository
    holds no artifact or one that is not signed so, HubError if it cannot be had; what has come is kept for
    the next call.
    """
    if reference.choice is not None:
        raise UsageError(f"{reference} chooses a file, and an artifact is fetched whole; leave that out")
    place = Path(os.path.realpath(folder))
    listing = list_repository(reference)
    with told_failures(reference):
        place.parent.mkdir(parents=True, exist_ok=True)
        with exclusive(place):
            _pull(listing, place, folder, public_key)
    return load_artifact(folder)


def _pull(listing: Listing, place: Path, folder: Path, public_key: Path | None) -> None:
    """Make ``place``, whose name for the user is ``folder``, the artifact."""
    reference = listing.reference
    gathered = open_gathered(place)
    try:
        manifest_bytes = _fetch_manifest(listing, gathered)
        signature = _fetch_signature(listing, gathered)
        if place.exists() and (not place.is_dir() or any(place.iterdir())):
            _check_there(place, folder, manifest_bytes, reference)
            _renew_signature(place, signature, public_key)
            return
        _gather(listing, manifest_bytes, signature, gathered)
        if public_key is not None:
            check_signature(gathered, public_key)
        if place.exists():
            place.rmdir()
        gathered.rename(place)
        flush_folder(place.parent)
    finally:
        with contextlib.suppress(OSError):  # what holds something serves the next call
            gathered.rmdir()


def _gather(listing: Listing, manifest_bytes: bytes, signature: bytes | None, gathered: Path) -> None:
    """Fetch what the manifest lists, and leave the folder with the checked artifact, its signature, and
    nothing else.
    """
    manifest = decode_manifest(manifest_bytes, origin=f"{MANIFEST_NAME} of {listing.reference}")
    _check_listed(listing, manifest.files)
    needed = sum(entry.bytes - _there(entry, gathered) for entry in manifest.files)
    require_room(gathered.parent, needed, str(listing.reference))
    for entry in manifest.files:
        _fetch_file(listing, entry, gathered)
    (gathered / MANIFEST_NAME).write_bytes(manifest_bytes)
    signed = set() if signature is None else {SIGNATURE_NAME}
    if signature is not None:
        (gathered / SIGNATURE_NAME).write_bytes(signature)
    drop_others(gathered, {MANIFEST_NAME, *signed, *(entry.path for entry in manifest.files)})
    load_artifact(gathered)
    flush_tree(gathered)


def _check_there(place: Path, folder: Path, manifest: bytes, reference: Reference) -> None:
    """Raise UsageError unless this very artifact stands in the folder, ArtifactError if it is damaged."""
    there = place / MANIFEST_NAME
    if not there.is_file() or there.stat().st_size != len(manifest) or there.read_bytes() != manifest:
        raise UsageError(f"{folder} holds something else than {reference}; name a new folder, or remove it")
    load_artifact(folder, verify_hashes=True)


def _renew_signature(place: Path, signature: bytes | None, public_key: Path | None) -> None:
    """Give an artifact that is there the repository's signature; one that is refused does not stay."""
    path = place / SIGNATURE_NAME
    if path.is_symlink() or (path.exists() and not path.is_file()):
        raise UsageError(f"{path} is no file of its own; remove it and try again")
    before = path.read_bytes() if path.exists() else None
    if signature not in (None, before):
        write_whole(path, signature)
    if public_key is None:
        return
    try:
        check_signature(place, public_key)
    except BaseException:
        if before is not None:
            write_whole(path, before)
        elif signature is not None:
            path.unlink()
        raise


def _fetch_manifest(listing: Listing, gathered: Path) -> bytes:
    found = listing.find(MANIFEST_NAME)
    if found is None:
        raise ArtifactError(
            f"{listing.reference} holds no {MANIFEST_NAME}, so it is no artifact; make one of it with: "
            f"llorch export {listing.reference} --output DIR"
        )
    if found.bytes is None or found.bytes > MAX_MANIFEST_BYTES:
        raise ArtifactError(
            f"{MANIFEST_NAME} of {listing.reference} has {found.bytes} bytes; a manifest has at most "
            f"{MAX_MANIFEST_BYTES}"
        )
    return _fetch_small(listing, MANIFEST_NAME, found.bytes, gathered)


def _fetch_signature(listing: Listing, gathered: Path) -> bytes | None:
    found = listing.find(SIGNATURE_NAME)
    if found is None:
        return None
    if found.bytes is None or found.bytes > MAX_SIGNATURE_BYTES:
        raise ArtifactError(
            f"{SIGNATURE_NAME} of {listing.reference} has {found.bytes} bytes; a signature has at most "
            f"{MAX_SIGNATURE_BYTES}"
        )
    return _fetch_small(listing, SIGNATURE_NAME, found.bytes, gathered)


def _fetch_small(listing: Listing, name: str, size: int, gathered: Path) -> bytes:
    part = gathered / f"{name}{_PART}"
    part.unlink(missing_ok=True)
    download(listing, name, part, size)
    content = part.read_bytes()
    part.unlink()
    return content


def _check_listed(listing: Listing, entries: tuple[FileEntry, ...]) -> None:
    """Raise ArtifactError unless the repository has each file, with its size, before any is fetched."""
    for entry in entries:
        found = listing.find(entry.path)
        reserved = entry.path in (MANIFEST_NAME, SIGNATURE_NAME) or entry.path.endswith(_PART)
        if found is None or found.bytes not in (None, entry.bytes) or reserved:
            has = "does not have it" if found is None else f"has one of {found.bytes} bytes"
            raise ArtifactError(
                f"the manifest of {listing.reference} lists {entry.path[:100]!r} with {entry.bytes} bytes, "
                f"and the repository {has}; it is not whole, choose another revision"
            )


def _fetch_file(listing: Listing, entry: FileEntry, gathered: Path) -> None:
    """Put a file into the folder, from where an earlier call stopped, and compare its hash."""
    path = gathered / entry.path
    if path.is_file() and not path.is_symlink():
        if path.stat().st_size == entry.bytes and _sha256(path) == entry.sha256:
            return
        path.unlink()
    path.parent.mkdir(parents=True, exist_ok=True)
    part = _part_of(entry, gathered)
    download(listing, entry.path, part, entry.bytes)
    if (found := _sha256(part)) != entry.sha256:
        part.unlink()
        raise HubError(
            f"{entry.path} of {listing.reference} has SHA-256 {found} where the manifest says "
            f"{entry.sha256}; nothing of it is kept; try again"
        )
    part.rename(path)


def _part_of(entry: FileEntry, gathered: Path) -> Path:
    """Return where half a file lies; named by content: another commit's bytes are never gone on with."""
    path = gathered / entry.path
    return path.with_name(f"{path.name}.{entry.sha256[:16]}{_PART}")


def _there(entry: FileEntry, gathered: Path) -> int:
    """Return how many bytes of a file an earlier call has left, as far as its size tells."""
    found = [path for path in (gathered / entry.path, _part_of(entry, gathered)) if path.is_file()]
    return min(entry.bytes, sum(path.stat().st_size for path in found))


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
