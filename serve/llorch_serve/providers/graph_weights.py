"""How many bytes of weights each node of an ONNX file reads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from google.protobuf.message import DecodeError

from llorch_serve.errors import ArtifactError
from llorch_serve.providers.onnx_messages import model_class


def weights_of_nodes(path: Path) -> dict[str, dict[str, int]]:
    """Return the weights that each node reads: node name -> weight name -> bytes.

    Raises ArtifactError if the file cannot be read as ONNX.
    """
    model = model_class()()
    try:
        model.ParseFromString(path.read_bytes())
    except (OSError, DecodeError) as error:
        raise ArtifactError(f"{path} cannot be read as ONNX ({error}); export the model again") from error
    sizes = {tensor.name: _size(tensor) for tensor in model.graph.initializer}
    return {
        node.name: {name: sizes[name] for name in node.input if name in sizes} for node in model.graph.node
    }


def _size(tensor: Any) -> int:
    lengths = [entry.value for entry in tensor.external_data if entry.key == "length"]
    return int(lengths[0]) if lengths and lengths[0].isdecimal() else len(tensor.raw_data)
