"""Fetch a model from a model hub, from its cache where it is there already.

Input is a :class:`Reference`; output is the snapshot's folder in the cache, with what an export needs in it
and nothing else, or the GGUF file in it that is meant.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Final, Literal

from llorch_export.checkpoint.folder import LICENCE_FILE
from llorch_export.checkpoint.safetensors import CONVERT_PICKLE, INDEX, SINGLE
from llorch_export.config.fp8 import PACKING_FILES
from llorch_export.source.gguf_choice import choose
from llorch_export.source.pooling import SENTENCE_FILES
from llorch_export.tokenizer.chat_templates import TEMPLATE_FOLDER
from llorch_export.tokenizer.reading import FOLDER_FILES
from llorch_export.tokenizer.vocabulary_files import vocabulary_files
from llorch_serve.errors import ArtifactError, HubError
from llorch_serve.hub import modelscope
from llorch_serve.hub.files import cached_snapshot, fetch, list_repository
from llorch_serve.hub.listing import Listing
from llorch_serve.hub.reference import Reference
from llorch_serve.terminal.console import say

_CONFIG: Final = "config.json"
_TEMPLATE: Final = re.compile(rf"{TEMPLATE_FOLDER}/[^/]+\.jinja")
_POOLING: Final = re.compile(r"[^/]+_Pooling/config\.json")
_SHARD: Final = re.compile(r"model[\w.-]*\.safetensors")


def fetch_model(
    reference: Reference, *, is_complete: Callable[[Path], bool], config_only: bool = False
) -> Path:
    """Return the folder of a snapshot, or the GGUF file in it.

    is_complete: tells whether a cached snapshot is a whole folder of a model; if so, nothing is asked of the
        hub. Nor is it for a GGUF file in the cache that ``reference`` chooses.
    config_only: fetch ``config.json`` without weights, where the repository has one.
    Raises ArtifactError if there is no such model, HubError if it is not cached and not to be had.
    """
    cached = cached_snapshot(reference)
    found = None if cached is None else _chosen_in(cached, reference.choice)
    if cached is not None and reference.choice is None and is_complete(cached):
        return cached
    if found is not None and reference.choice is not None:
        return found
    note = "only partly in the hub's cache" if cached is not None else "not in the hub's cache"
    try:
        listing = list_repository(reference, note)
    except HubError as error:
        if found is None:
            raise
        # The hub might hold other files, and then the choice would be the user's.
        say(f"note: {found.name} is taken from the cache, without a look at what else there is: {error}")
        return found
    wanted, model = _wanted(listing, config_only=config_only)
    folder = fetch(listing, wanted, note)
    return folder if model is None else folder / model


def snapshot_of(path: Path) -> Path | None:
    """Return the snapshot's folder in the hub's cache that ``path`` is or lies in, if it does."""
    for folder in (path, *path.parents):
        if folder.parent.name == "snapshots" and folder.parent.parent.name.startswith("models--"):
            return folder
    return None


def origin_of(path: Path) -> tuple[str, str] | None:
    """Return repository and commit of a file or folder in the hub's cache; None for any other.

    ModelScope tells no commit: there it is the revision.
    """
    snapshot = snapshot_of(path.absolute())
    if snapshot is None:
        return None
    if (origin := modelscope.origin_of(snapshot)) is not None:
        return origin
    return snapshot.parent.parent.name.removeprefix("models--").replace("--", "/"), snapshot.name


def hub_of(path: Path) -> Literal["modelscope"] | None:
    """Return which hub a file or folder in a cache is from, if not the Hugging Face hub."""
    snapshot = snapshot_of(path.absolute())
    return None if snapshot is None or modelscope.origin_of(snapshot) is None else "modelscope"


def _chosen_in(snapshot: Path, choice: str | None) -> Path | None:
    """Return the GGUF file of a cached snapshot that is meant, if it is there with all its parts."""
    paths = {
        path.relative_to(snapshot).as_posix(): None for path in snapshot.rglob("*.gguf") if path.is_file()
    }
    try:
        return snapshot / choose(paths, choice, snapshot.name)[0]
    except ArtifactError:
        return None


def _wanted(listing: Listing, *, config_only: bool) -> tuple[list[str], str | None]:
    """Return which files to fetch: weights of one kind, and the small files with them; and the GGUF file that
    is the model, if it is one.
    """
    paths = list(listing.files)
    top = [path for path in paths if "/" not in path]
    named = {_CONFIG, *PACKING_FILES, *SENTENCE_FILES, *FOLDER_FILES, *vocabulary_files(top)}
    small = [path for path in top if path in named or LICENCE_FILE.match(path)]
    small += [path for path in paths if _TEMPLATE.fullmatch(path)]
    of_sentences = [path for path in top if path in SENTENCE_FILES]
    of_sentences += [path for path in paths if _POOLING.fullmatch(path)]
    small += [path for path in of_sentences if path not in small]
    if listing.reference.choice is None and (INDEX in top or SINGLE in top):
        if config_only:
            return [_CONFIG, *of_sentences], None
        shards = [path for path in top if _SHARD.fullmatch(path)]
        return [*small, *([SINGLE] if SINGLE in top else [INDEX, *shards])], None
    sizes = {path: file.bytes for path, file in listing.files.items() if path.endswith(".gguf")}
    repository = str(replace(listing.reference, choice=None))
    if not sizes:
        pickled = any(path.endswith((".bin", ".pt", ".pth")) for path in top)
        kinds = "safetensors or GGUF files" if listing.reference.choice is None else "GGUF files"
        raise ArtifactError(
            f"{repository} has no {kinds}; {CONVERT_PICKLE if pickled else 'choose another repository'}"
        )
    model = choose(sizes, listing.reference.choice, repository)
    return [*small, *model], model[0]
