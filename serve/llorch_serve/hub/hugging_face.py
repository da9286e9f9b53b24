"""Repositories of the Hugging Face hub: listed at one commit, and fetched into its client's cache.

Input is a :class:`Reference`; output is a :class:`Listing`, and the folder of a snapshot in the cache that
holds the files that were asked for, each with the size and the hash that the hub lists.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path, PurePosixPath
from typing import Final

from llorch_serve.errors import HubError
from llorch_serve.hub.failures import hub_failures, is_wrong_size, told_failures
from llorch_serve.hub.limits import UnusableAnswerError, limit_of_file, require_room
from llorch_serve.hub.listing import HubFile, Listing, is_inside, require_few
from llorch_serve.hub.reference import Reference

_TIMEOUT_S: Final = 10.0

__all__ = ["cached_snapshot", "download", "fetch", "list_repository", "told_failures"]


def list_repository(reference: Reference, note: str = "") -> Listing:
    """Ask the hub what it holds. Raises ArtifactError or HubError; see :func:`hub_failures`."""
    from huggingface_hub import HfApi

    with hub_failures(reference, note):
        try:
            info = HfApi().model_info(
                reference.repository, revision=reference.revision, timeout=_TIMEOUT_S, files_metadata=True
            )
            listed = info.siblings or ()
            require_few(listed, reference)
            files = {
                one.rfilename: HubFile(
                    path=one.rfilename,
                    bytes=one.size,
                    sha256=one.lfs.sha256 if one.lfs else None,
                    blob=None if one.lfs else one.blob_id,
                )
                for one in listed
                if is_inside(one.rfilename)
            }
        except (TypeError, KeyError, AttributeError) as error:  # what answered is no hub
            raise ValueError("not the description of a model") from error
        if info.sha is None or not _is_hash(info.sha):
            raise ValueError("no commit is named")
    return Listing(reference, info.sha, files)


def fetch(listing: Listing, paths: Sequence[str], note: str = "") -> Path:
    """Return the snapshot's folder in the cache, with ``paths`` in it; what is there is not fetched again.

    Raises HubError if a file comes with another size or content than is listed; nothing of it is kept then.
    Raises ResourceError if the disk cannot hold what is missing.
    """
    from huggingface_hub import constants, hf_hub_download, try_to_load_from_cache

    repository, commit = listing.reference.repository, listing.commit
    cache = Path(constants.HF_HUB_CACHE)
    missing = [path for path in paths if not _is_cached(listing, path, cache)]
    sizes = {path: None if (file := listing.find(path)) is None else file.bytes for path in paths}
    require_room(cache, sum(sizes[path] or 0 for path in missing), str(listing.reference))
    folder = Path()
    for number, path in enumerate(paths):
        had = try_to_load_from_cache(repository, path, revision=commit)
        with hub_failures(listing.reference, note, limit_of_file(path, sizes[path], cache)):
            # The first is asked for by the name of its revision, by which the cache knows the commit then.
            revision = listing.reference.revision if number == 0 else commit
            found = Path(hf_hub_download(repository, path, revision=revision, etag_timeout=_TIMEOUT_S))
        folder = found.parents[len(PurePosixPath(path).parts) - 1]
        if folder.name != commit:
            raise HubError(f"{listing.reference} has changed while it was fetched; try again")
        if not isinstance(had, str):
            _check(found, listing.find(path), listing.reference, cache)
    return folder


def _is_cached(listing: Listing, path: str, cache: Path) -> bool:
    """Tell whether the cache has a file's content, be it of another revision."""
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.file_download import repo_folder_name

    repository, file = listing.reference.repository, listing.find(path)
    content = None if file is None else file.sha256 or file.blob
    if content is not None and is_inside(content):
        blobs = cache / repo_folder_name(repo_id=repository, repo_type="model") / "blobs"
        return (blobs / content).is_file()
    return isinstance(try_to_load_from_cache(repository, path, revision=listing.commit), str)


def download(listing: Listing, path: str, part: Path, size: int) -> None:
    """Fetch a file of known size, or what is missing of it, to ``part``, outside of the cache.

    Raises HubError if it comes with another size; nothing of it is kept then.
    """
    from huggingface_hub import hf_hub_url
    from huggingface_hub.file_download import http_get
    from huggingface_hub.utils import build_hf_headers  # type: ignore[attr-defined]  # reexported without __all__

    if part.exists() and part.stat().st_size > size:
        part.unlink()
    url = hf_hub_url(listing.reference.repository, path, revision=listing.commit)
    try:
        with part.open("ab") as file:
            there = file.tell()
            limit = limit_of_file(path, size, part.parent, there=there)
            with hub_failures(listing.reference, limit=limit):
                http_get(
                    url,
                    file,
                    resume_size=there,
                    headers=build_hf_headers(),
                    expected_size=size,
                    displayed_filename=path,
                )
    except HubError as error:
        if isinstance(error.__cause__, UnusableAnswerError) or is_wrong_size(error.__cause__):
            part.unlink()
        raise


def cached_snapshot(reference: Reference) -> Path | None:
    """Return the folder of a snapshot that is in the cache, whole or in part, without asking the hub."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        # The pattern matters: without one, a snapshot that lacks any file of the repository is incomplete.
        return Path(
            snapshot_download(
                reference.repository,
                revision=reference.revision,
                local_files_only=True,
                allow_patterns=["config.json"],
            )
        )
    except (LocalEntryNotFoundError, HFValidationError):
        return None


def content_hash(path: Path, file: HubFile) -> str:
    """Return the hash of a file on disk, of the kind that the hub lists for it."""
    digest = hashlib.sha256() if file.sha256 else hashlib.sha1(usedforsecurity=False)
    with path.open("rb") as stream:
        if not file.sha256:
            digest.update(f"blob {path.stat().st_size}\0".encode())
        while chunk := stream.read(2**22):
            digest.update(chunk)
    return digest.hexdigest()


def _check(path: Path, file: HubFile | None, reference: Reference, cache: Path) -> None:
    expected = None if file is None else file.sha256 or file.blob
    if file is None or expected is None or content_hash(path, file) == expected:
        return
    real = path.resolve()
    if real.is_relative_to(cache.resolve()):  # what a hub called it might have led elsewhere
        real.unlink(missing_ok=True)
    path.unlink(missing_ok=True)
    raise HubError(
        f"{file.path} of {reference} came with another content than the hub lists (hash {expected}); nothing "
        "of it is kept; try again"
    )


def _is_hash(text: str) -> bool:
    return len(text) == 40 and all(character in "0123456789abcdef" for character in text)
