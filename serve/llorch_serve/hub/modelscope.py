"""ModelScope's repositories, through its own client (``modelscope-hub``): listed, and fetched into its cache.

Input is a :class:`Reference`; output is a :class:`Listing`, and the folder of a snapshot below
``MODELSCOPE_CACHE``. The hub names no commit for what it lists, and a branch may move on. So a snapshot's
folder is named by its revision and by the hashes of what is in it: its files belong together.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import shutil
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote, unquote

from llorch_serve.errors import ArtifactError, HubError, ProviderError
from llorch_serve.hub.limits import MOST_ANSWER_BYTES, UnusableAnswerError, require_room
from llorch_serve.hub.listing import HubFile, Listing, is_inside, require_few
from llorch_serve.hub.modelscope_failures import hub_address, told_failures, usable_token
from llorch_serve.hub.reference import Reference

CACHE_NAME: Final = "llorch-modelscope"
"""What the folder in ``MODELSCOPE_CACHE`` is called that holds snapshots by content."""
_DEFAULT: Final = "master"
_TIMEOUT_S: Final = "10"  # without a byte, until the client asks again
_AT: Final = "@"  # between a revision and the hash of a snapshot, in its folder's name
_SHA256: Final = re.compile(r"[0-9a-f]{64}")
_NOTHING: Final = hashlib.sha256(b"").hexdigest()

__all__ = ["cached_snapshot", "download", "fetch", "list_repository", "origin_of", "told_failures"]


def list_repository(reference: Reference, note: str = "") -> Listing:
    """Ask the hub what it holds. Raises ArtifactError, HubError, or ProviderError without the client."""
    api = _client()
    with told_failures(reference, note):
        try:
            listed = api.list_repo_files(reference.repository, "model", revision=reference.revision)
            require_few(listed, reference)
            files = {one.path: _file(one) for one in listed if not one.is_dir and is_inside(one.path)}
        except (TypeError, KeyError, AttributeError) as error:  # what answered is no hub
            raise ValueError("not the description of a model") from error
    if not files:
        revision = reference.revision or _DEFAULT
        raise ArtifactError(
            f"{reference} has no revision {revision!r} at {hub_address()}, or no files; check both names, or "
            "choose a branch or tag that is listed there"
        )
    return Listing(reference, reference.revision or _DEFAULT, files)


def fetch(listing: Listing, paths: Sequence[str], note: str = "") -> Path:
    """Return the snapshot's folder in the cache, with ``paths`` in it; see
    :func:`llorch_serve.hub.files.fetch`.
    """
    api = _client()
    files = [_checkable(listing, path) for path in paths]
    place = _repository_folder(listing.reference)
    folder = place / f"{quote(listing.commit, safe='')}{_AT}{_content(listing)}"
    with told_failures(listing.reference, note):
        for one in files:
            _reuse(one, folder)
        missing = sum(one.bytes or 0 for one in files if not (folder / one.path).is_file())
        require_room(place, missing, str(listing.reference))
        for one in files:
            _download(api, listing, one, folder)
    return folder


def download(listing: Listing, path: str, part: Path, size: int) -> None:
    """Fetch a file of known size, or what is missing of it, to ``part``; see
    :func:`llorch_serve.hub.files.download`.
    """
    file = _checkable(listing, path)
    if file.bytes != size:
        raise HubError(
            f"{listing.reference} lists {path} with {file.bytes} bytes, expected {size}; try again"
        )
    api = _client()
    holder = part.with_name(f"{part.name}.d")  # where the client keeps what it goes on with
    with told_failures(listing.reference):
        _download(api, listing, file, holder)
        (holder / path).replace(part)
        shutil.rmtree(holder)


def cached_snapshot(reference: Reference) -> Path | None:
    """Return the newest snapshot of a revision that is in the cache, whole or in part."""
    prefix = f"{quote(reference.revision or _DEFAULT, safe='')}{_AT}"
    place = _repository_folder(reference)
    found = [path for path in place.glob("*") if path.name.startswith(prefix) and path.is_dir()]
    return max(found, key=lambda path: path.stat().st_mtime_ns, default=None)


def origin_of(snapshot: Path) -> tuple[str, str] | None:
    """Return repository and revision of a snapshot in the cache; None if ``snapshot`` is none."""
    revision, at, _ = snapshot.name.rpartition(_AT)
    repository = snapshot.parent.parent
    if not at or repository.parent.name != CACHE_NAME:
        return None
    return repository.name.removeprefix("models--").replace("--", "/"), unquote(revision)


def _client() -> Any:
    # All are read when the client is imported: bars and its own log are for those who watch it.
    os.environ.setdefault("MODELSCOPE_LOG_LEVEL", "ERROR")
    os.environ.setdefault("MODELSCOPE_DOWNLOAD_TIMEOUT", _TIMEOUT_S)
    if not sys.stderr.isatty():
        os.environ.setdefault("TQDM_DISABLE", "1")
    try:
        from modelscope_hub import HubApi, HubConfig
    except ModuleNotFoundError as error:
        raise ProviderError(
            f"{error.name} is not installed, and ModelScope is asked by it; install it with: pip install "
            "'llorch[modelscope]'"
        ) from error
    # Where none is given, the client would look for a login that it keeps as a pickle.
    api = HubApi(HubConfig(token=usable_token()))
    # The client holds files to the size that is listed, and what it lists to nothing but a time.
    session = getattr(api.legacy, "_read_session", None)
    if session is not None:
        session.hooks["response"].append(_bound_listing)
    return api


def _bound_listing(response: Any, **_: object) -> None:
    """Have the body of a listing counted while it is read."""
    if not response.request.path_url.split("?")[0].endswith("/repo/files"):
        return
    raw, taken = response.raw, 0

    def counted(read: Callable[..., bytes]) -> Callable[..., bytes]:
        def read_counted(*args: Any, **kwargs: Any) -> bytes:
            nonlocal taken
            data = read(*args, **kwargs)
            taken += len(data)
            if taken > MOST_ANSWER_BYTES:
                raise UnusableAnswerError(f"sends more than {MOST_ANSWER_BYTES} bytes as a listing")
            return data

        return read_counted

    for name in ("read", "read1"):
        if hasattr(raw, name):
            setattr(raw, name, counted(getattr(raw, name)))


def _file(one: Any) -> HubFile:
    sha256 = str(one.sha256 or "").lower()
    known = _SHA256.fullmatch(sha256) is not None
    # The client has 0 for a size that is not told, too.
    size = one.size if one.size > 0 else 0 if sha256 == _NOTHING else None
    return HubFile(one.path, size, sha256 if known else None, None)


def _checkable(listing: Listing, path: str) -> HubFile:
    """Return a file whose size and hash are known. Raises HubError if the hub does not tell them."""
    file = listing.find(path)
    if file is None or file.bytes is None or file.sha256 is None:
        raise HubError(
            f"{listing.reference} lists {path} without its size or its SHA-256, so that it could not be "
            "checked; choose another repository"
        )
    return file


def _download(api: Any, listing: Listing, file: HubFile, folder: Path) -> None:
    api.download_file(
        listing.reference.repository,
        "model",
        file.path,
        revision=listing.commit,
        local_dir=folder,
        expected_sha256=file.sha256,
        file_size=file.bytes,
    )


def _content(listing: Listing) -> str:
    """Return a short hash of all that is listed."""
    listed = sorted(f"{path}\0{file.sha256}\0" for path, file in listing.files.items())
    return hashlib.sha256("".join(listed).encode()).hexdigest()[:16]


def _reuse(file: HubFile, folder: Path) -> None:
    """Link what an earlier snapshot has; the client compares its hash, and removes it if it differs."""
    target = folder / file.path
    for other in sorted(folder.parent.glob("*")):
        found = other / file.path
        if not target.exists() and found.is_file() and found.stat().st_size == file.bytes:
            target.parent.mkdir(parents=True, exist_ok=True)
            with contextlib.suppress(OSError):  # a disk without hard links: it is fetched
                os.link(found, target)


def _repository_folder(reference: Reference) -> Path:
    cache = os.environ.get("MODELSCOPE_CACHE") or Path.home() / ".cache" / "modelscope"
    name = "models--" + reference.repository.replace("/", "--")
    return Path(cache).expanduser() / CACHE_NAME / name / "snapshots"
