"""Arrays of a safetensors file in their own type: the parts that packed matrices are made of.

Input is a tensor's place; output are numpy arrays, of some rows or columns where a matrix is large. Files are
read, not mapped, as in :mod:`llorch_export.checkpoint.stream`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

import ml_dtypes
import numpy as np
import numpy.typing as npt

from llorch_export.checkpoint.stream import BlockCodec, TensorRange, read_exactly
from llorch_serve.artifact.links import open_real
from llorch_serve.errors import ArtifactError

DTYPES: Final[dict[str, np.dtype[np.generic]]] = {
    "F32": np.dtype("<f4"),
    "F16": np.dtype("<f2"),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
    "F8_E8M0": np.dtype(ml_dtypes.float8_e8m0fnu),
    "I64": np.dtype("<i8"),
    "I32": np.dtype("<i4"),
    "I16": np.dtype("<i2"),
    "I8": np.dtype("i1"),
    "U64": np.dtype("<u8"),
    "U32": np.dtype("<u4"),
    "U16": np.dtype("<u2"),
    "U8": np.dtype("u1"),
    "BOOL": np.dtype("u1"),
}
"""By safetensors' name of the type."""


def whole_numbers(kind: str) -> BlockCodec:
    """Return what stands for a type that holds no weights by itself, so that its place can be kept."""
    dtype = DTYPES[kind]
    return BlockCodec(1, dtype.itemsize, lambda data: data.view(dtype).astype(np.float32))


@dataclass(frozen=True, slots=True)
class StoredArray:
    """A tensor's place: ``path`` from byte ``offset`` on; ``kind`` is safetensors' name of its type.

    name, path: for error messages. real: the path that is opened, on which no link is followed.
    notes: what the file's header says beside tensors, by keys of the tool's own.
    """

    name: str
    path: Path
    real: Path
    offset: int
    shape: tuple[int, ...]
    kind: str
    notes: Mapping[str, str] = field(default_factory=dict, compare=False, repr=False)

    @staticmethod
    def at(place: TensorRange, kind: str, notes: Mapping[str, str] | None = None) -> StoredArray:
        """Return the array of a tensor whose values are of type ``kind``."""
        return StoredArray(place.name, place.path, place.real, place.offset, place.shape, kind, notes or {})

    @property
    def dtype(self) -> np.dtype[np.generic]:
        """The type of its items."""
        return DTYPES[self.kind]

    def as_bytes(self) -> StoredArray:
        """Return it as the bytes that it is made of, in one dimension."""
        count = math.prod(self.shape) * self.dtype.itemsize
        return replace(self, shape=(count,), kind="U8")

    def read(self) -> npt.NDArray[np.generic]:
        """Read all of it. Raises ArtifactError if the file cannot be read or ends early."""
        return self._runs(0, math.prod(self.shape), 1, 0).reshape(self.shape)

    def rows(self, start: int, stop: int) -> npt.NDArray[np.generic]:
        """Read rows ``start`` to ``stop`` (excluded) along the first axis. Raises as :meth:`read` does."""
        size = math.prod(self.shape[1:])
        found = self._runs(start * size, (stop - start) * size, 1, 0)
        return found.reshape(stop - start, *self.shape[1:])

    def columns(self, start: int, stop: int) -> npt.NDArray[np.generic]:
        """Read columns ``start`` to ``stop`` (excluded) of all rows of a matrix. Raises as :meth:`read`
        does.
        """
        rows, columns = self.shape
        if stop - start == columns:
            return self._runs(0, rows * columns, 1, 0).reshape(rows, columns)
        return self._runs(start, stop - start, rows, columns)

    def _runs(self, start: int, count: int, runs: int, stride: int) -> npt.NDArray[np.generic]:
        """Read ``runs`` times ``count`` items, from item ``start`` on and every ``stride`` items: [runs,
        count].
        """
        size = self.dtype.itemsize
        data = bytearray()
        try:
            with open_real(self.real, buffering=0) as file:
                for run in range(runs):
                    file.seek(self.offset + (start + run * stride) * size)
                    data += read_exactly(file.read, count * size, self.path, self.name)
        except OSError as error:
            raise ArtifactError(f"{self.path} cannot be read: {error.strerror or error}") from error
        return np.frombuffer(data, self.dtype).reshape(runs, count)

    def require(self, shape: tuple[int, ...], kinds: tuple[str, ...]) -> None:
        """Raise ArtifactError unless it has this shape and one of these types."""
        if self.shape == shape and self.kind in kinds:
            return
        raise ArtifactError(
            f"{self.path}: tensor {self.name} is {self.kind} {list(self.shape)}, expected "
            f"{' or '.join(kinds)} {list(shape)} as its config says; the file is damaged or its config "
            "belongs to another model, fetch both again"
        )
