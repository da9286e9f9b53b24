"""safetensors files written and read by the format's definition: storage types and sizes that numpy's writer
lacks.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
KINDS: dict[str, Any] = {
    "F32": np.float32,
    "BF16": ml_dtypes.bfloat16,
    "F8_E4M3": ml_dtypes.float8_e4m3fn,
    "F8_E5M2": ml_dtypes.float8_e5m2,
    "F16": np.float16,
    "I64": np.int64,
    "I32": np.int32,
    "I8": np.int8,
    "U8": np.uint8,
}
_NAMES = {np.dtype(kind): name for name, kind in KINDS.items()}


def save(path: Path, tensors: Mapping[str, Array], notes: Mapping[str, str] | None = None) -> None:
    """Write ``tensors``. notes: what the header says beside them."""
    shapes = {name: value.shape for name, value in tensors.items()}
    with path.open("wb") as file:
        file.write(_header(shapes, {name: _NAMES[value.dtype] for name, value in tensors.items()}, notes))
        for value in tensors.values():
            file.write(value.tobytes())


def save_zeros(path: Path, shapes: Mapping[str, tuple[int, ...]], dtype: str) -> None:
    """Write a file of zeros that takes next to nothing on the disk, whatever its size."""
    with path.open("wb") as file:
        file.write(_header(shapes, dict.fromkeys(shapes, dtype)))
        size = sum(math.prod(shape) for shape in shapes.values()) * np.dtype(KINDS[dtype]).itemsize
        file.truncate(file.tell() + size)


def load(path: Path) -> dict[str, Array]:
    """Read every tensor; they can be written to."""
    data = path.read_bytes()
    start = 8 + int.from_bytes(data[:8], "little")
    found = {}
    for name, entry in json.loads(data[8:start]).items():
        if name == "__metadata__":
            continue
        first, last = entry["data_offsets"]
        values = np.frombuffer(data[start + first : start + last], KINDS[entry["dtype"]])
        found[name] = values.reshape(entry["shape"]).copy()
    return found


def _header(
    shapes: Mapping[str, tuple[int, ...]], dtypes: Mapping[str, str], notes: Mapping[str, str] | None = None
) -> bytes:
    entries: dict[str, Any] = {} if notes is None else {"__metadata__": dict(notes)}
    end = 0
    for name, shape in shapes.items():
        start, end = end, end + math.prod(shape) * np.dtype(KINDS[dtypes[name]]).itemsize
        entries[name] = {"dtype": dtypes[name], "shape": list(shape), "data_offsets": [start, end]}
    encoded = json.dumps(entries).encode()
    encoded += b" " * (-len(encoded) % 8)
    return len(encoded).to_bytes(8, "little") + encoded
