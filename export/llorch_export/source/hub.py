"""Fetch a model from the Hugging Face hub, from its cache where it is there already.

Input is a hub id; output is the folder of a snapshot that holds what an export needs and nothing else.
"""

from __future__ import annotations

import glob
import re
from collections.abc import Callable
from pathlib import Path
from typing import Final

from llorch_export.checkpoint.folder import LICENCE_FILE
from llorch_export.checkpoint.safetensors import CONVERT_PICKLE, INDEX, SINGLE
from llorch_export.config.fp8 import PACKING_FILES
from llorch_export.tokenizer.chat_templates import TEMPLATE_FOLDER
from llorch_export.tokenizer.reading import FOLDER_FILES
from llorch_export.tokenizer.vocabulary_files import vocabulary_files
from llorch_serve.errors import ArtifactError

_ID: Final = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_TIMEOUT_S: Final = 10.0
_CONFIG: Final = "config.json"
_TEMPLATE: Final = re.compile(rf"{TEMPLATE_FOLDER}/[^/]+\.jinja")
_SHARD: Final = re.compile(r"model[\w.-]*\.safetensors")


def is_hub_id(source: str) -> bool:
    """Tell whether ``source`` has the form ``org/name``."""
    return (
        _ID.fullmatch(source) is not None
        and ".." not in source
        and not source.endswith((".gguf", ".safetensors"))
    )


def fetch_snapshot(repo_id: str, *, is_complete: Callable[[Path], bool], config_only: bool = False) -> Path:
    """Return the folder of a snapshot.

    is_complete: tells whether a cached snapshot holds all that is needed; if so, nothing is asked of the hub.
    config_only: fetch ``config.json`` without weights, where the repository has one.
    Raises ArtifactError if it is neither cached nor to be had.
    """
    # Imported here: it takes a quarter of a second, and files and folders do not need it.
    from huggingface_hub import HfApi, snapshot_download
    from huggingface_hub.errors import (
        HfHubHTTPError,
        HFValidationError,
        LocalEntryNotFoundError,
    )

    # The pattern matters: without one, a snapshot that lacks any file of the repository counts as incomplete.
    try:
        cached = Path(snapshot_download(repo_id, local_files_only=True, allow_patterns=[_CONFIG]))
    except (LocalEntryNotFoundError, HFValidationError):
        cached = None
    if cached is not None and is_complete(cached):
        return cached
    # The HTTP library differs between versions of the hub's client; the first base is its own root of all
    # errors.
    transport_error: type[Exception] = HfHubHTTPError.__bases__[0]
    try:
        files = [entry.rfilename for entry in HfApi().model_info(repo_id, timeout=_TIMEOUT_S).siblings or ()]
        wanted = _wanted(files, repo_id, config_only=config_only)
        return Path(snapshot_download(repo_id, allow_patterns=[glob.escape(name) for name in wanted]))
    except (transport_error, HFValidationError, OSError) as error:
        state = "only partly in the hub's cache" if cached is not None else "not in the hub's cache"
        reason = str(error).strip().split("\n", 1)[0].rstrip(".")
        raise ArtifactError(
            f"{repo_id} is neither a file nor a folder; as a hub id it is {state} and cannot be fetched: "
            f"{reason}. "
            f"Check the name and the network, or log in with: hf auth login"
        ) from error


def _wanted(files: list[str], repo_id: str, *, config_only: bool) -> list[str]:
    """Return which files of a repository to fetch: weights of one kind, and the small files with them."""
    top = [name for name in files if "/" not in name]
    named = {_CONFIG, *PACKING_FILES, *FOLDER_FILES, *vocabulary_files(top)}
    small = [name for name in top if name in named or LICENCE_FILE.match(name)]
    small += [name for name in files if _TEMPLATE.fullmatch(name)]
    if SINGLE in top:
        weights = [SINGLE]
    elif INDEX in top:
        weights = [INDEX, *(name for name in top if _SHARD.fullmatch(name))]
    else:
        weights = [name for name in top if name.endswith(".gguf")]
        if len(weights) > 1:
            raise ArtifactError(
                f"{repo_id} has {len(weights)} GGUF files ({', '.join(weights[:8])}); download one and give "
                f"its path"
            )
        if not weights:
            pickled = any(name.endswith((".bin", ".pt", ".pth")) for name in top)
            raise ArtifactError(
                f"{repo_id} has no safetensors or GGUF files; "
                f"{CONVERT_PICKLE if pickled else 'choose another repository'}"
            )
        return [*small, *weights]
    return [_CONFIG] if config_only else [*small, *weights]
