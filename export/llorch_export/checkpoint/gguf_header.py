"""Read the header of a GGUF file: metadata, and where each tensor lies.

Input is an untrusted file; output is a :class:`GgufHeader` whose every count, length and offset has been
checked against the file's size before anything was allocated for it. Format: ggml's ``docs/gguf.md``,
versions 2 and 3, little-endian.
"""

from __future__ import annotations

import dataclasses
import math
import os
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Final

from llorch_export.checkpoint.folder import require_content
from llorch_export.config.fields import quoted
from llorch_serve.artifact.links import open_real
from llorch_serve.errors import ArtifactError

MAGIC: Final = b"GGUF"

MetadataValue = (
    bool | int | float | str | tuple[bool, ...] | tuple[int, ...] | tuple[float, ...] | tuple[str, ...]
)

_VERSIONS: Final = (2, 3)
_MAX_KEYS: Final = 2**14
MAX_TENSORS: Final = 2**16
_MAX_DIMS: Final = 4
_MAX_DIM: Final = 2**40
_MAX_NAME_BYTES: Final = 2**16 - 1
_MAX_STRING_BYTES: Final = 2**26
_MAX_ELEMENT_BYTES: Final = 2**16  # a string of an array; the longest tokens have 2**10
_MAX_ARRAY_ELEMENTS: Final = 2**22  # over all arrays of a file; the largest vocabularies need about 2**20
_MAX_ALIGNMENT: Final = 2**16
_DEFAULT_ALIGNMENT: Final = 32

# Value types by number: struct code. 7 is bool, 8 string, 9 array.
_SCALARS: Final = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "B", 10: "Q", 11: "q", 12: "d"}
_BOOL: Final = 7
_STRING: Final = 8
_ARRAY: Final = 9


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """A tensor's entry.

    path, real, file_size: the file that holds it, where that really lies, and its size in bytes.
    shape: outermost dimension first (the file stores them innermost first).
    type_id: ggml's number of the storage type.
    offset: bytes from the start of the file, not yet compared with its size, which needs the type's block
        size.
    """

    name: str
    path: Path
    real: Path
    file_size: int
    shape: tuple[int, ...]
    type_id: int
    offset: int


@dataclass(frozen=True, slots=True)
class GgufHeader:
    """What a GGUF file says before its tensor data; of a split model, ``path`` is the first part."""

    path: Path
    metadata: Mapping[str, MetadataValue]
    tensors: Mapping[str, GgufTensor]


def read_header(path: Path) -> GgufHeader:
    """Read and check the header of a GGUF file, which may be given by a link.

    Raises ArtifactError if the file cannot be read, is no GGUF file, is truncated, or has counts or lengths
    that no such file can have.
    """
    try:
        real = Path(os.path.realpath(path))
        require_content(path, real)
        with open_real(real, buffering=2**20) as file:
            return _Parser(path, real, file, os.fstat(file.fileno()).st_size).parse()
    except OSError as error:
        raise ArtifactError(f"{path} cannot be read: {error.strerror or error}") from error


class _Parser:
    """Reads forward through one file; every method leaves the position behind what it returned."""

    def __init__(self, path: Path, real: Path, file: BinaryIO, size: int) -> None:
        self._path = path
        self._real = real
        self._file = file
        self._size = size
        self._left = size
        self._elements_left = _MAX_ARRAY_ELEMENTS

    def parse(self) -> GgufHeader:
        if self._take(4, "the magic number") != MAGIC:
            raise ArtifactError(f"{self._path} is not a GGUF file: it does not start with {MAGIC.decode()}")
        version = self._unsigned(4, "the version")
        if version not in _VERSIONS:
            byte_order = " (a big-endian file)" if version & 0xFFFF == 0 else ""
            raise ArtifactError(
                f"{self._path} has GGUF version {version}{byte_order}; supported are versions 2 and 3, "
                f"little-endian. "
                "Convert the model again with a current llama.cpp"
            )
        tensor_count = self._count(8, MAX_TENSORS, "the number of tensors")
        key_count = self._count(8, _MAX_KEYS, "the number of metadata keys")
        metadata: dict[str, MetadataValue] = {}
        for _ in range(key_count):
            key = self._string(_MAX_NAME_BYTES, "a metadata key")
            if key in metadata:
                raise self._damaged(f"metadata key {quoted(key)} occurs twice")
            metadata[key] = self._value(key)
        alignment = self._alignment(metadata)
        entries = [self._tensor(alignment) for _ in range(tensor_count)]
        data_start = -(-(self._size - self._left) // alignment) * alignment
        tensors: dict[str, GgufTensor] = {}
        for entry in entries:
            if entry.name in tensors:
                raise self._damaged(f"tensor {quoted(entry.name)} occurs twice")
            tensors[entry.name] = dataclasses.replace(entry, offset=data_start + entry.offset)
        return GgufHeader(self._path, metadata, tensors)

    def _alignment(self, metadata: Mapping[str, MetadataValue]) -> int:
        value = metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
        if (
            isinstance(value, bool)
            or not isinstance(value, int)
            or not 8 <= value <= _MAX_ALIGNMENT
            or value % 8
        ):
            raise self._damaged(
                f"general.alignment is {value!r}, expected a multiple of 8 up to {_MAX_ALIGNMENT}"
            )
        return value

    def _tensor(self, alignment: int) -> GgufTensor:
        name = self._string(_MAX_NAME_BYTES, "a tensor name")
        rank = self._count(4, _MAX_DIMS, f"the number of dimensions of tensor {quoted(name)}")
        dims = tuple(self._unsigned(8, f"the shape of tensor {quoted(name)}") for _ in range(rank))
        # Python's integers do not wrap, so a product that overflows 64 bits elsewhere is simply too large
        # here.
        if rank == 0 or min(dims) < 1 or math.prod(dims) > _MAX_DIM:
            raise self._damaged(
                f"tensor {quoted(name)} has dimensions {list(dims)}, expected 1 to {_MAX_DIMS} of "
                "sensible size"
            )
        type_id = self._unsigned(4, f"the type of tensor {quoted(name)}")
        offset = self._unsigned(8, f"the offset of tensor {quoted(name)}")
        if offset % alignment or offset > self._size:
            raise self._damaged(
                f"tensor {quoted(name)} starts at data offset {offset}, expected a multiple of "
                f"{alignment} inside the file"
            )
        return GgufTensor(name, self._path, self._real, self._size, dims[::-1], type_id, offset)

    def _value(self, key: str) -> MetadataValue:
        what = f"metadata key {quoted(key)}"
        kind = self._unsigned(4, what)
        if kind == _STRING:
            return self._string(_MAX_STRING_BYTES, what)
        if kind == _ARRAY:
            return self._array(what)
        if kind not in _SCALARS:
            raise self._damaged(f"{what} has value type {kind}, expected 0 to 12")
        return self._scalars(kind, 1, what)[0]

    def _array(self, what: str) -> MetadataValue:
        kind = self._unsigned(4, what)
        length = self._unsigned(8, what)
        if length > self._elements_left:
            raise self._damaged(
                f"{what} has {length} elements; all arrays together may have {_MAX_ARRAY_ELEMENTS}"
            )
        self._elements_left -= length
        if kind == _STRING:
            return tuple(self._string(_MAX_ELEMENT_BYTES, what) for _ in range(length))
        if kind not in _SCALARS:
            raise self._damaged(
                f"{what} is an array of value type {kind}, expected numbers, booleans or strings"
            )
        return self._scalars(kind, length, what)

    def _scalars(
        self, kind: int, count: int, what: str
    ) -> tuple[bool, ...] | tuple[int, ...] | tuple[float, ...]:
        layout = struct.Struct(f"<{count}{_SCALARS[kind]}")
        values = layout.unpack(self._take(layout.size, what))
        if kind != _BOOL:
            return values
        if any(value > 1 for value in values):
            raise self._damaged(f"{what} has a boolean that is neither 0 nor 1")
        return tuple(value == 1 for value in values)

    def _string(self, limit: int, what: str) -> str:
        length = self._unsigned(8, what)
        if length > limit:
            raise self._damaged(f"{what} has a string of {length} bytes, expected at most {limit}")
        data = self._take(length, what)
        try:
            return data.decode("utf-8")
        except UnicodeDecodeError as error:
            raise self._damaged(f"{what} has a string that is not UTF-8: {data[:40]!r}") from error

    def _count(self, width: int, limit: int, what: str) -> int:
        value = self._unsigned(width, what)
        if value > limit:
            raise self._damaged(f"{what} is {value}, expected at most {limit}")
        return value

    def _unsigned(self, width: int, what: str) -> int:
        return int.from_bytes(self._take(width, what), "little")

    def _take(self, size: int, what: str) -> bytes:
        # Compared with what the file still holds before anything is read, so that no length is believed.
        if size > self._left:
            raise ArtifactError(
                f"{self._path} ends inside {what}: {size} bytes are due and {self._left} are left; "
                "it is truncated or damaged, fetch it again"
            )
        data = self._file.read(size)
        if len(data) != size:
            raise ArtifactError(f"{self._path} changed while it was read; try again")
        self._left -= size
        return data

    def _damaged(self, finding: str) -> ArtifactError:
        return ArtifactError(
            f"{self._path} is damaged or not a usable GGUF file: {finding}; fetch or convert it again"
        )
