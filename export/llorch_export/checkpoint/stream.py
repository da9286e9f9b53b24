"""Read rows of one tensor out of a file, a piece at a time, as float32 or as they are stored.

Input is a byte range, how its blocks decode and which rows are wanted; output is a float32 or byte array.
Files are read, not mapped, so that what the page cache keeps never counts as this process's memory; beside
the result only one piece is held.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt

from llorch_serve.artifact.links import open_real
from llorch_serve.errors import ArtifactError

# Large enough to make numpy's overhead vanish, small enough for the decoder's temporaries to stay in cache.
_PIECE_ELEMENTS: Final = 2**18
_PIECE_BYTES: Final = 2**20


@dataclass(frozen=True, slots=True)
class BlockCodec:
    """A storage type: ``elements`` values share ``bytes`` bytes.

    decode: turns the bytes of whole blocks, uint8 of shape [n], into float32 values in storage order.
    """

    elements: int
    bytes: int
    decode: Callable[[npt.NDArray[np.uint8]], npt.NDArray[np.float32]]


def _decode_f32(data: npt.NDArray[np.uint8]) -> npt.NDArray[np.float32]:
    return data.view("<f4").astype(np.float32, copy=False)


def _decode_f16(data: npt.NDArray[np.uint8]) -> npt.NDArray[np.float32]:
    return data.view("<f2").astype(np.float32)


def _decode_bf16(data: npt.NDArray[np.uint8]) -> npt.NDArray[np.float32]:
    # bfloat16 is the upper half of a float32.
    return (data.view("<u2").astype(np.uint32) << np.uint32(16)).view(np.float32)


FLOAT_CODECS: Final = {
    "F32": BlockCodec(1, 4, _decode_f32),
    "F16": BlockCodec(1, 2, _decode_f16),
    "BF16": BlockCodec(1, 2, _decode_bf16),
}


@dataclass(frozen=True, slots=True)
class TensorRange:
    """Where a tensor lies: ``path`` from byte ``offset`` on, ``shape`` outermost dimension first, in
    ``codec``'s blocks.

    name, path: for error messages. real: the path that is opened, on which no link is followed.
    """

    name: str
    path: Path
    offset: int
    shape: tuple[int, ...]
    codec: BlockCodec
    real: Path

    @property
    def elements(self) -> int:
        """How many values it has."""
        return math.prod(self.shape)

    def as_matrix(self) -> TensorRange:
        """Return matrices that are stacked along the first dimension as one, with their rows counted
        through.
        """
        return replace(self, shape=(self.shape[0] * self.shape[1], *self.shape[2:]))

    def rows(self, start: int, stop: int | None) -> TensorRange:
        """Return the part from row ``start`` to ``stop`` (None: to the end); rows must be made of whole
        blocks.
        """
        if start == 0 and stop is None:
            return self
        row_bytes = math.prod(self.shape[1:]) // self.codec.elements * self.codec.bytes
        count = (self.shape[0] if stop is None else stop) - start
        return replace(self, offset=self.offset + start * row_bytes, shape=(count, *self.shape[1:]))


def read_float32(
    source: TensorRange, row_order: npt.NDArray[np.intp] | None = None
) -> npt.NDArray[np.float32]:
    """Read a whole tensor; see :func:`read_rows`."""
    return read_rows(source, 0, source.shape[0], row_order=row_order)


def read_rows(
    source: TensorRange, start: int, stop: int, *, row_order: npt.NDArray[np.intp] | None = None
) -> npt.NDArray[np.float32]:
    """Read rows ``start`` to ``stop`` (excluded) along the first axis.

    row_order: stored row ``i`` is row ``row_order[i]`` of the tensor; absent: rows are stored in order.
    Raises ArtifactError if the file cannot be read, ends early, or the rows hold NaN or infinity.
    """
    shape = (stop - start, *source.shape[1:])
    if row_order is None:
        return _read_stored(source, start, stop).reshape(shape)
    # Rows move only within their head, so the stored rows that are wanted lie close together.
    stored = np.argsort(row_order)[start:stop]
    first = int(stored.min())
    return _read_stored(source, first, int(stored.max()) + 1)[stored - first].reshape(shape)


def _read_stored(source: TensorRange, first: int, last: int) -> npt.NDArray[np.float32]:
    """Read stored rows ``first`` to ``last`` (excluded) as [rows, columns]."""
    columns = math.prod(source.shape[1:])
    # A one-dimensional tensor is read as a column: only whole blocks can be decoded, so pieces end on them.
    granule = source.codec.elements if len(source.shape) == 1 else 1
    begin, end = first // granule * granule, -(-last // granule) * granule
    result = np.empty((end - begin, columns), dtype=np.float32)
    step = max(granule, _PIECE_ELEMENTS // columns // granule * granule)
    try:
        with open_real(source.real, buffering=0) as file:
            file.seek(source.offset + begin * columns // source.codec.elements * source.codec.bytes)
            for start in range(0, end - begin, step):
                stop = min(start + step, end - begin)
                size = (stop - start) * columns // source.codec.elements * source.codec.bytes
                piece = _decode(source, _read(file.read, size, source))
                result[start:stop] = piece.reshape(stop - start, columns)
    except OSError as error:
        raise ArtifactError(f"{source.path} cannot be read: {error.strerror or error}") from error
    return result[first - begin : last - begin]


def read_blocks(
    source: TensorRange, start: int, stop: int, *, row_order: npt.NDArray[np.intp] | None = None
) -> npt.NDArray[np.uint8]:
    """Read rows ``start`` to ``stop`` (excluded) of a matrix of whole blocks as they are stored, [rows, bytes
    of a row].

    row_order: as for :func:`read_rows`. Raises ArtifactError if the file cannot be read or ends early.
    """
    row_bytes = source.shape[-1] // source.codec.elements * source.codec.bytes
    if row_order is None:
        first, last, picked = start, stop, None
    else:
        # Rows move only within their head, so the stored rows that are wanted lie close together.
        stored = np.argsort(row_order)[start:stop]
        first, last = int(stored.min()), int(stored.max()) + 1
        picked = stored - first
    try:
        with open_real(source.real, buffering=0) as file:
            file.seek(source.offset + first * row_bytes)
            data = _read(file.read, (last - first) * row_bytes, source)
    except OSError as error:
        raise ArtifactError(f"{source.path} cannot be read: {error.strerror or error}") from error
    rows = np.frombuffer(data, np.uint8).reshape(last - first, row_bytes)
    return rows if picked is None else rows[picked]


def same_bytes(left: TensorRange, right: TensorRange) -> bool:
    """Tell whether two tensors of one storage type have equal shapes and bytes. Raises ArtifactError if
    unreadable.
    """
    if left.shape != right.shape:
        return False
    remaining = math.prod(left.shape) // left.codec.elements * left.codec.bytes
    try:
        with (
            open_real(left.real, buffering=0) as left_file,
            open_real(right.real, buffering=0) as right_file,
        ):
            left_file.seek(left.offset)
            right_file.seek(right.offset)
            while remaining:
                size = min(remaining, _PIECE_BYTES)
                if _read(left_file.read, size, left) != _read(right_file.read, size, right):
                    return False
                remaining -= size
    except OSError as error:
        raise ArtifactError(
            f"{left.path} or {right.path} cannot be read: {error.strerror or error}"
        ) from error
    return True


def _read(read: Callable[[int], bytes | None], size: int, source: TensorRange) -> bytearray:
    return read_exactly(read, size, source.path, source.name)


def read_exactly(read: Callable[[int], bytes | None], size: int, path: Path, name: str) -> bytearray:
    """Read ``size`` bytes of the tensor ``name``. Raises ArtifactError if the file ends before."""
    data = bytearray()
    while len(data) < size:
        chunk = read(size - len(data))
        if not chunk:
            raise ArtifactError(f"{path} ends inside tensor {name}; it is truncated, fetch it again")
        data += chunk
    return data


def _decode(source: TensorRange, data: bytearray) -> npt.NDArray[np.float32]:
    with np.errstate(all="ignore"):  # infinite scales are reported below, as an error instead of a warning
        values = source.codec.decode(np.frombuffer(data, dtype=np.uint8))
    require_finite(values, source)
    return values


def require_finite(values: npt.NDArray[np.float32], source: TensorRange) -> None:
    """Raise ArtifactError if some of ``values``, which came out of ``source``, are NaN or infinite."""
    # min and max both carry NaN through, and cost less than a mask of all elements.
    if not (np.isfinite(values.min()) and np.isfinite(values.max())):
        raise ArtifactError(
            f"{source.path}: tensor {source.name} holds NaN or infinity; the weights are damaged, fetch "
            f"them again"
        )
