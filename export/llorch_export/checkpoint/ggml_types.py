"""ggml's storage types in blocks: how large a block is, and which weights it stands for.

Sizes and dequantisation are gguf's own where it has them. It has neither for the newest types of one and two
bits, whose layouts are in ggml's ``ggml-common.h`` and whose reading is in its ``ggml-quants.c``.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

import gguf
import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class GgmlType:
    """A storage type. number: ggml's; elements: weights of a block; size: its bytes.

    decode: bytes of whole blocks, of any shape, to their weights in a row. Factors that are not finite stay
        so, with numpy's warning.
    """

    number: int
    elements: int
    size: int
    decode: Callable[[Bytes], Floats]


def halves(data: Bytes) -> Floats:
    """float16 values of bytes [n, 2]: [n, 1]."""
    return np.ascontiguousarray(data).view("<f2").astype(np.float32)


def _by_gguf(kind: gguf.GGMLQuantizationType, data: Bytes) -> Floats:
    # As one long row: gguf works in groups of 16 rows, which for short rows would cost mostly overhead.
    values: Floats = gguf.quants.dequantize(data.reshape(1, -1), kind).reshape(-1)
    return values


def _q1_0(data: Bytes) -> Floats:
    """float16 scale, 128 bits, lowest first: the scale where a bit is set, its negative elsewhere."""
    blocks = data.reshape(-1, 18)
    signs = np.unpackbits(blocks[:, 2:], axis=1, bitorder="little").astype(np.float32) * 2 - 1
    return (halves(blocks[:, :2]) * signs).reshape(-1)


def _q2_0(data: Bytes) -> Floats:
    """float16 scale, 64 pairs of bits, lowest first: -1, 0, 1 or 2 times the scale."""
    blocks = data.reshape(-1, 18)
    pairs = blocks[:, 2:, None] >> np.array([0, 2, 4, 6], np.uint8) & 3
    return (halves(blocks[:, :2]) * (pairs.reshape(len(blocks), 64).astype(np.float32) - 1)).reshape(-1)


def _types_of_gguf() -> dict[str, GgmlType]:
    names = (
        "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K",
        "IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "IQ4_NL", "IQ4_XS",
        "TQ1_0", "TQ2_0", "MXFP4", "NVFP4",
    )  # fmt: skip
    found = {}
    for name in names:
        if name in gguf.GGMLQuantizationType.__members__:  # older versions lack the newest
            kind = gguf.GGMLQuantizationType[name]
            elements, size = gguf.GGML_QUANT_SIZES[kind]
            found[name] = GgmlType(int(kind), elements, size, functools.partial(_by_gguf, kind))
    return found


_READ_HERE: Final = {
    "Q1_0": GgmlType(41, 128, 18, _q1_0),
    "Q2_0": GgmlType(42, 64, 18, _q2_0),
}
BLOCK_TYPES: Final[Mapping[str, GgmlType]] = _types_of_gguf() | _READ_HERE
NOT_IN_GGUF: Final = frozenset(_READ_HERE)
"""Types that the gguf package, and so transformers, cannot read."""

_NAMES: Final = {row.number: name for name, row in BLOCK_TYPES.items()}


def type_name(number: int) -> str:
    """Return the name of a storage type by ggml's number, or ``number 99`` for one that is not known."""
    if number in _NAMES:
        return _NAMES[number]
    try:
        return str(gguf.GGMLQuantizationType(number).name)
    except ValueError:
        return f"number {number}"


def block_size(number: int) -> tuple[int, int]:
    """Return the elements of a block of a storage type, and its bytes. Raises ValueError for an unknown
    number.
    """
    if number in _NAMES:
        row = BLOCK_TYPES[_NAMES[number]]
        return row.elements, row.size
    elements, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType(number)]
    return elements, size
