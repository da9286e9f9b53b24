"""A GGUF header is believed only as far as the file can back it."""

from __future__ import annotations

import struct
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from llorch_export.checkpoint.gguf_header import read_header
from llorch_export.source.open import open_checkpoint
from llorch_serve.errors import ArtifactError
from support.builders.checkpoints import write_gguf

UINT32, STRING, ARRAY, BOOL = 4, 8, 9, 7


def _u32(value: int) -> bytes:
    return struct.pack("<I", value)


def _u64(value: int) -> bytes:
    return struct.pack("<Q", value)


def _text(value: str | bytes) -> bytes:
    data = value.encode() if isinstance(value, str) else value
    return _u64(len(data)) + data


def _file(
    tensors: bytes = b"", keys: bytes = b"", *, tensor_count: int = 0, key_count: int = 0, version: int = 3
) -> bytes:
    return b"GGUF" + _u32(version) + _u64(tensor_count) + _u64(key_count) + keys + tensors


def _tensor(
    name: str = "t", dims: tuple[int, ...] = (32,), kind: int = 0, offset: int = 0, rank: int | None = None
) -> bytes:
    shape = b"".join(_u64(dim) for dim in dims)
    return _text(name) + _u32(len(dims) if rank is None else rank) + shape + _u32(kind) + _u64(offset)


HOSTILE = {
    "empty file": (b"", "ends inside the magic number"),
    "other format": (b"PK\3\4" + bytes(60), "not a GGUF file"),
    "version 1": (_file(version=1), "version 1; supported are versions 2 and 3"),
    "big-endian": (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "big-endian"),
    "2^60 tensors": (_file(tensor_count=2**60), "number of tensors is 1152921504606846976"),
    "2^60 keys": (_file(key_count=2**60), "number of metadata keys is"),
    "more tensors than bytes": (_file(tensor_count=60000), "ends inside a tensor name"),
    "a million dimensions": (_file(_tensor(rank=10**6), tensor_count=1), "number of dimensions of tensor "
        "'t' is "
        "1000000"),
    "no dimensions": (_file(_tensor(dims=()), tensor_count=1), r"has dimensions \[\]"),
    "dimension zero": (_file(_tensor(dims=(0,)), tensor_count=1), r"has dimensions \[0\]"),
    "wrapping dimensions": (_file(_tensor(dims=(2**33, 2**33)), tensor_count=1), "has dimensions"),
    "dimensions that wrap to 32": (_file(_tensor(dims=(2**63 + 16, 2)), tensor_count=1), "has dimensions"),
    "offset beyond the end": (_file(_tensor(offset=2**62), tensor_count=1), "starts at data offset"),
    "unaligned offset": (_file(_tensor(offset=3), tensor_count=1), "expected a multiple of 32"),
    "huge key": (_file(keys=_u64(2**62), key_count=1), "string of 4611686018427387904 bytes"),
    "huge string": (_file(keys=_text("k") + _u32(STRING) + _u64(2**62), key_count=1), "'k' has a string of"),
    "string past the end": (_file(keys=_text("k") + _u32(STRING) + _u64(2**20), key_count=1), "ends inside metadata key 'k'"),
    "huge array": (_file(keys=_text("k") + _u32(ARRAY) + _u32(UINT32) + _u64(2**62), key_count=1), "all arrays together"),
    "array past the end": (_file(keys=_text("k") + _u32(ARRAY) + _u32(UINT32) + _u64(2**20), key_count=1), "ends inside"),
    "array of arrays": (_file(keys=_text("k") + _u32(ARRAY) + _u32(ARRAY) + _u64(1), key_count=1), "array of value type 9"),
    "unknown value type": (_file(keys=_text("k") + _u32(77), key_count=1), "value type 77"),
    "boolean 7": (_file(keys=_text("k") + _u32(BOOL) + b"\7", key_count=1), "neither 0 nor 1"),
    "key twice": (_file(keys=(_text("k") + _u32(UINT32) + _u32(1)) * 2, key_count=2), "'k' occurs twice"),
    "tensor twice": (_file(_tensor() * 2, tensor_count=2), "tensor 't' occurs twice"),
    "not UTF-8": (_file(keys=_text("k") + _u32(STRING) + _text(b"\xff\xfe"), key_count=1), "not UTF-8"),
    "alignment 0": (_file(keys=_text("general.alignment") + _u32(UINT32) + _u32(0), key_count=1), "general.alignment is 0"),
}  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_headers_are_refused_at_once_and_without_memory(tmp_path: Path, name: str) -> None:
    data, found = HOSTILE[name]
    path = tmp_path / "hostile.gguf"
    path.write_bytes(data)
    tracemalloc.start()
    started = time.monotonic()
    try:
        with pytest.raises(ArtifactError, match=found) as caught:
            read_header(path)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert time.monotonic() - started < 1
    assert peak < 8 * 2**20
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_huge_sparse_file_does_not_make_a_huge_string_believable(tmp_path: Path) -> None:
    path = tmp_path / "sparse.gguf"
    path.write_bytes(_file(keys=_text("k") + _u32(STRING) + _u64(2**33), key_count=1))
    with path.open("r+b") as file:
        file.truncate(2**34)
    with pytest.raises(ArtifactError, match="string of 8589934592 bytes, expected at most"):
        read_header(path)


@pytest.mark.parametrize("fraction", [0.1, 0.4, 0.9, 0.999])
def test_a_truncated_file_is_refused(tmp_path: Path, fraction: float) -> None:
    path = write_gguf(tmp_path / "model.gguf")
    data = path.read_bytes()
    path.write_bytes(data[: int(len(data) * fraction)])
    with pytest.raises(ArtifactError, match="truncated"):
        open_checkpoint(str(path))


def test_values_of_every_type_are_read(tmp_path: Path) -> None:
    scalars: dict[str, tuple[int, bytes, object]] = {
        "u8": (0, b"\xff", 255),
        "i8": (1, b"\xff", -1),
        "u16": (2, b"\xff\xff", 65535),
        "i16": (3, b"\xfe\xff", -2),
        "u32": (4, b"\xff" * 4, 2**32 - 1),
        "i32": (5, b"\xfd" + b"\xff" * 3, -3),
        "f32": (6, struct.pack("<f", 1.5), 1.5),
        "bool": (7, b"\1", True),
        "string": (8, _text("täxt"), "täxt"),
        "u64": (10, b"\xff" * 8, 2**64 - 1),
        "i64": (11, b"\xff" * 8, -1),
        "f64": (12, struct.pack("<d", 0.1), 0.1),
        "strings": (9, _u32(8) + _u64(2) + _text("a") + _text(""), ("a", "")),
        "numbers": (9, _u32(5) + _u64(2) + struct.pack("<ii", -1, 7), (-1, 7)),
        "booleans": (9, _u32(7) + _u64(2) + b"\0\1", (False, True)),
    }
    keys = b"".join(_text(key) + _u32(kind) + data for key, (kind, data, _) in scalars.items())
    path = tmp_path / "values.gguf"
    path.write_bytes(_file(keys=keys, key_count=len(scalars)))
    found = read_header(path).metadata
    assert found == {key: value for key, (_, _, value) in scalars.items()}
    assert found["bool"] is True


def test_alignment_and_version_2_are_honoured(tmp_path: Path) -> None:
    alignment = _text("general.alignment") + _u32(UINT32) + _u32(128)
    header = _file(_tensor("x", dims=(4, 2), offset=128), alignment, tensor_count=1, key_count=1, version=2)
    path = tmp_path / "aligned.gguf"
    path.write_bytes(header + bytes(1024))
    tensor = read_header(path).tensors["x"]
    assert tensor.shape == (2, 4)
    assert tensor.offset == 128 * (len(header) // 128 + 1) + 128


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match=r"absent.gguf cannot be read: No such file"):
        read_header(tmp_path / "absent.gguf")


@pytest.fixture(scope="module")
def open_damaged(tmp_path_factory: pytest.TempPathFactory) -> Callable[[list[tuple[int, int]]], None]:
    folder = tmp_path_factory.mktemp("damaged")
    data = write_gguf(folder / "sound.gguf").read_bytes()

    def damage_and_open(changes: list[tuple[int, int]]) -> None:
        changed = bytearray(data)
        for position, value in changes:
            changed[position % 14000] = value  # the header, of about 14 kB
        path = folder / "damaged.gguf"
        path.write_bytes(changed)
        open_checkpoint(str(path))

    return damage_and_open


@settings(max_examples=150, deadline=2000, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@given(changes=st.lists(st.tuples(st.integers(0, 13999), st.integers(0, 255)), min_size=1, max_size=4))
def test_damage_anywhere_in_the_header_is_harmless_or_an_artifact_error(
    open_damaged: Callable[[list[tuple[int, int]]], None], changes: list[tuple[int, int]]
) -> None:
    try:
        open_damaged(changes)
    except ArtifactError as error:
        assert "\n" not in str(error)  # noqa: PT017 - an error is allowed here, not required
