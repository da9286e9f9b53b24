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
from llorch_export.checkpoint.packed.stored import DTYPES, whole_numbers
from llorch_export.checkpoint.stored_tensors import StoredTensor
from llorch_export.checkpoint.stream import FLOAT_CODECS, TensorRange
from llorch_export.config.fields import shown
from llorch_serve.artifact.links import open_real, real_file
from llorch_serve.errors import ArtifactError

MAX_HEADER_BYTES: Final = 2**24
"""Of one file. The longest published ones have a million bytes."""

MAX_TENSORS: Final = 2**16
"""Of one file; no model that is exported has a third of them."""

CODECS: Final = FLOAT_CODECS | FP8_CODECS
"""Of the types whose values stand for weights by themselves."""


def file_tensors(path: Path, folder: ModelFolder, *, packed: bool = False) -> dict[str, StoredTensor]:
    """Return every tensor of one safetensors file of a folder, by name. Raises ArtifactError if it is
    damaged, or has more than any model.

    packed: types may be any that packed weights are made of.
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
    notes = header.get("__metadata__") or {}
    for name, entry in header.items():
        if name == "__metadata__" or names.is_ignorable(name):
            continue
        dtype, shape = entry["dtype"], tuple(entry["shape"])
        codec = CODECS.get(dtype)
        if codec is None and packed and dtype in DTYPES:
            codec = whole_numbers(dtype)
        if codec is None:
            raise unsupported_type(path, name, dtype)
        offset = 8 + len(before) + entry["data_offsets"][0]
        tensors[name] = StoredTensor(TensorRange(name, path, offset, shape, codec, real), dtype, notes=notes)
    return tensors


def unsupported_type(path: Path, name: str, dtype: str) -> ArtifactError:
    """Return the error that says of which type a tensor is, and of which it may be."""
    return ArtifactError(
        f"{path}: tensor {shown(name)} has storage type {dtype}; supported are {', '.join(CODECS)}. "
        "Export from the original weights"
    )


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
