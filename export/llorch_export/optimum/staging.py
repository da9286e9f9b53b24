"""The folder that Optimum reads: links to a checkpoint's weights, and its config in words that Optimum knows.

Input is a checkpoint that llorch has read and checked; output a folder with nothing else in it, so that
neither code nor pickles that lie in the checkpoint's own folder are within reach.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Final

from llorch_export.checkpoint.base import Checkpoint
from llorch_export.checkpoint.folder import ModelFolder
from llorch_serve.errors import UsageError

_CONFIG: Final = "config.json"
_LINKED: Final = (".safetensors", ".safetensors.index.json")


def check_exportable(checkpoint: Checkpoint) -> None:
    """Raise UsageError for a checkpoint that Optimum cannot read as llorch does."""
    if checkpoint.kind == "gguf":
        raise UsageError(
            f"--via optimum traces a Hugging Face folder, and {checkpoint.path} is a GGUF file, whose "
            f"weights transformers "
            "would dequantise first; give the folder it was converted from, or leave --via out"
        )
    if checkpoint.only_read_here:
        raise UsageError(
            f"--via optimum loads weights with transformers, which does not know the names that the tensors "
            f"of {checkpoint.path} have; leave --via out"
        )
    if _config(checkpoint).get("quantization_config") is not None:
        raise UsageError(
            f"--via optimum traces plain weights, and {checkpoint.path / _CONFIG} has a quantization_config; "
            "leave --via out, llorch reads them itself"
        )


def stage(checkpoint: Checkpoint, folder: Path) -> None:
    """Fill an empty folder with what Optimum needs of a checkpoint."""
    (folder / _CONFIG).write_text(json.dumps(known_config(_config(checkpoint))), encoding="utf-8")
    for path in checkpoint.content_files:
        if path.name.endswith(_LINKED):
            (folder / path.name).symlink_to(path.resolve())


def known_config(config: dict[str, object]) -> dict[str, object]:
    """Return a config as transformers 4 writes it.

    transformers 5 puts the rotary settings under ``rope_parameters``, which 4 passes over without a word, and
    then rotates by its default base. Names of code files are left out.
    """
    found = {key: value for key, value in config.items() if key not in ("rope_parameters", "auto_map")}
    parameters = config.get("rope_parameters")
    if isinstance(parameters, dict):
        scaling = dict(parameters)
        for key in ("rope_theta", "partial_rotary_factor"):
            if key in scaling:
                found[key] = scaling.pop(key)
        plain = scaling.get("rope_type", "default") == "default"
        found["rope_scaling"] = None if plain else scaling
    return found


def _config(checkpoint: Checkpoint) -> dict[str, object]:
    return ModelFolder(checkpoint.path).read_json(_CONFIG) or {}
