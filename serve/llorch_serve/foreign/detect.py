"""Which tool made a folder, told by the names of the files in it."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from llorch_serve.artifact.kinds import ModelKind

GENAI_CONFIG: Final = "genai_config.json"
OPTIMUM_GRAPH: Final = "model.onnx"
OLD_OPTIMUM_GRAPHS: Final = (
    "decoder_model_merged.onnx",
    "decoder_with_past_model.onnx",
    "decoder_model.onnx",
)


def foreign_kind(folder: Path) -> ModelKind | None:
    """Return which other tool made a folder; None if it is none of theirs.

    A graph beside weights is an extra of a checkpoint, which is exported instead.
    """
    try:
        names = {entry.name for entry in folder.iterdir()} if folder.is_dir() else set()
    except OSError:  # not readable, or a name that is too long for the file system
        return None
    if GENAI_CONFIG in names:
        return ModelKind.GENAI
    graphs = names & {OPTIMUM_GRAPH, *OLD_OPTIMUM_GRAPHS}
    if "config.json" in names and graphs and not any(name.endswith(".safetensors") for name in names):
        return ModelKind.OPTIMUM
    return None
