"""One safetensors file: which tensors it holds and where they lie.

Input is an untrusted file; the safetensors library checks its header (sizes, overlaps, holes), and no tensor
is read here.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Final

from safetensors import SafetensorError, safe_open

from llorch_export.checkpoint import names
from llorch_export.checkpoint.folder import ModelFolder, require_content
from llorch_export.checkpoint.fp8 import FP8_CODECS
from llorch_export.checkpoint.stored_tensors import StoredTensor
from llorch_export.checkpoint.stream import FLOAT_CODECS, TensorRange
from llorch_export.config.fields import shown
from llorch_serve.artifact.links import open_real, real_file
from llorch_serve.errors import ArtifactError

MAX_HEADER_BYTES: Final = 2**24
"""Of one file. The longest published ones have a million bytes."""

MAX_TENSORS: Final = 2**16
"""Of one file; no model that is exported has a third of them."""

_CODECS: Final = FLOAT_CODECS | FP8_CODECS


def file_tensors(path: Path, folder: ModelFolder) -> dict[str, StoredTensor]:
    """Return every tensor of one safetensors file of a folder, by name. Raises ArtifactError if it is
    damaged, or has more than any model.
    """
    try:
        real = real_file(path, folder.path)
        require_content(path, real)
        before = _header(path, real)
        # Opened for its checks only, and closed at once: its mapping would count as this process's memory.
        with safe_open(real, framework="numpy"):
            pass
        if _header(path, real) != before:
            raise ArtifactError(f"{path} changed while it was read; try again")
    except SafetensorError as error:
        raise ArtifactError(f"{path} is truncated or damaged ({error}); fetch it again") from error
    except OSError as error:
        raise ArtifactError(f"{path} cannot be read: {error.strerror or error}") from error
    header = json.loads(before)
    if len(header) > MAX_TENSORS:
        raise ArtifactError(
            f"{path} holds {len(header)} tensors, expected at most {MAX_TENSORS}; it is no model's"
        )
    tensors: dict[str, StoredTensor] = {}
    for name, entry in header.items():
        if name == "__metadata__" or names.is_ignorable(name):
            continue
        dtype, shape = entry["dtype"], tuple(entry["shape"])
        if dtype not in _CODECS:
            raise ArtifactError(
                f"{path}: tensor {shown(name)} has storage type {dtype}; supported are {', '.join(_CODECS)}. "
                "Export from the original weights"
            )
        offset = 8 + len(before) + entry["data_offsets"][0]
        tensors[name] = StoredTensor(TensorRange(name, path, offset, shape, _CODECS[dtype], real), dtype)
    return tensors


def _header(path: Path, real: Path) -> bytes:
    """Return the JSON in front of a file's tensors as it stands there. Raises ArtifactError if it is longer
    than any, OSError if the file cannot be read.
    """
    with open_real(real) as file:
        length = int.from_bytes(file.read(8), "little")
        data = file.read(min(length, MAX_HEADER_BYTES + 1))
    if len(data) > MAX_HEADER_BYTES:
        raise ArtifactError(
            f"{path} has a header of {length} bytes, expected at most {MAX_HEADER_BYTES}; fetch it again"
        )
    return data
