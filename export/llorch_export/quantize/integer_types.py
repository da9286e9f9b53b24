"""GGUF's small types as whole numbers times a scale, so that an 8-bit or 4-bit block holds them exactly.

Input is stored bytes of one ggml type; output are signed codes and float32 scales. Each of these types looks
its values up in a table of integers (or of eighths, whose eighth goes into the scale) and multiplies them by
the scale of 16 to 256 neighbours, which lies in the block in a way of its own. The tables are gguf's: a
code is the value that gguf reads, divided by the scale. Both are exact in float32. Layouts: ggml's
``ggml-common.h``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from llorch_export.checkpoint.ggml_types import BLOCK_TYPES, halves

Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]
Codes = npt.NDArray[np.int8]

_LARGEST: Final = 127


@dataclass(frozen=True, slots=True)
class IntegerType:
    """A ggml type. bits: that its codes need, which reach from ``-middle`` up; group: how many neighbours
    share a scale.

    scales: of the bytes of blocks [n, bytes of a block], as [n, groups of a block].
    off_middle: codes reach one further up than a signed number of so many bits.
    """

    bits: int
    group: int
    scales: Callable[[Bytes], Floats]
    off_middle: bool = False

    @property
    def middle(self) -> int:
        """What is added to a code so that it is not negative."""
        signed: int = 2 ** (self.bits - 1)
        return signed - self.off_middle


def integer_blocks(kind: str, data: Bytes) -> tuple[Codes, Floats]:
    """Return codes [n, groups, group] and scales [n, groups] of blocks [n, bytes of a block].

    kind: one of ``INTEGER_TYPES``. A group whose weights are not all finite gets a scale that is not.
    """
    row = INTEGER_TYPES[kind]
    with np.errstate(all="ignore"):  # of values that are not finite, which the scales tell
        values = BLOCK_TYPES[kind].decode(data)
        scales = np.ascontiguousarray(row.scales(data), np.float32)
    weights: Floats = values.reshape(*scales.shape, row.group)
    known = np.isfinite(scales) & np.isfinite(weights).all(axis=-1)
    scales[~known] = np.nan
    usable = known & (scales != 0)
    ratios = np.divide(weights, scales[..., None], out=np.zeros_like(weights), where=usable[..., None])
    codes = np.rint(ratios)
    assert np.abs(codes).max() <= _LARGEST, kind
    return codes.astype(np.int8), scales


def _q3_k(data: Bytes) -> Floats:
    """float16 factor at the end; before it 16 six-bit integers around 32, their upper pairs in 4 bytes."""
    low = _shifted(data[:, 96:104], (0, 4)) & 15
    high = _shifted(data[:, 104:108], (0, 2, 4, 6)) & 3
    return halves(data[:, 108:]) * ((low | high << 4).astype(np.float32) - 32)


def _iq4_xs(data: Bytes) -> Floats:
    """float16 factor; 8 six-bit integers around 32: upper pairs in 2 bytes, lower halves in 4."""
    high = data[:, 2:4].copy().view("<u2") >> np.arange(0, 16, 2, dtype=np.uint16) & 3
    return halves(data[:, :2]) * ((_nibble_pairs(data[:, 4:8]) | high << 4).astype(np.float32) - 32)


def _first_half(data: Bytes) -> Floats:
    return halves(data[:, :2])


def _last_half(data: Bytes) -> Floats:
    return halves(data[:, -2:])


def _mxfp4(data: Bytes) -> Floats:
    """A power of two (E8M0), halved because the table holds doubled values."""
    return np.ldexp(np.float32(1), data[:, :1].astype(np.int32) - 128)


def _nvfp4(data: Bytes) -> Floats:
    """4 unsigned E4M3 numbers, halved because the table holds doubled values; 127 is no number and counts as
    zero.
    """
    exponent, mantissa = (data[:, :4] >> 3 & 15).astype(np.int32), (data[:, :4] & 7).astype(np.float32)
    normal = np.ldexp(1 + mantissa / 8, exponent - 8)
    scales = np.where(exponent == 0, np.ldexp(mantissa, -10), normal)
    return np.where(data[:, :4] == 127, 0, scales)


def _iq2_xxs(data: Bytes) -> Floats:
    """float16 factor; the upper four bits of every second 32-bit word."""
    words = data[:, 2:].copy().view("<u4")[:, 1::2]
    return halves(data[:, :2]) * ((words >> 28).astype(np.float32) + np.float32(0.5)) * np.float32(0.25)


def _iq2_xs(data: Bytes) -> Floats:
    """float16 factor; 16 four-bit integers at the end. IQ2_S has them there too."""
    fine = _nibble_pairs(data[:, -8:]).astype(np.float32)
    return halves(data[:, :2]) * (fine + np.float32(0.5)) * np.float32(0.25)


def _iq3_xxs(data: Bytes) -> Floats:
    """float16 factor; the upper four bits of 8 32-bit words at the end."""
    words = data[:, -32:].copy().view("<u4")
    return halves(data[:, :2]) * ((words >> 28).astype(np.float32) + np.float32(0.5)) * np.float32(0.5)


def _iq3_s(data: Bytes) -> Floats:
    """float16 factor; 8 four-bit integers at the end, doubled plus one."""
    return halves(data[:, :2]) * (1 + 2 * _nibble_pairs(data[:, -4:]).astype(np.float32))


def _iq1_s(data: Bytes) -> Floats:
    """float16 factor; three bits of each of 8 16-bit words at the end. Codes are eighths."""
    words = data[:, -16:].copy().view("<u2")
    return halves(data[:, :2]) * (2 * (words >> 12 & 7).astype(np.float32) + 1) * np.float32(0.125)


def _iq1_m(data: Bytes) -> Floats:
    """4 16-bit words at the end: each four upper bits of a float16 factor and four 3-bit integers."""
    words = data[:, -8:].copy().view("<u2")
    factor = (words >> 12) << np.array([0, 4, 8, 12], np.uint16)
    half: Floats = np.bitwise_or.reduce(factor, axis=1).astype("<u2").view("<f2").astype(np.float32)
    fine = (words[:, :, None] >> np.array([0, 3, 6, 9], np.uint16) & 7).reshape(len(data), 16)
    return half[:, None] * (2 * fine.astype(np.float32) + 1) * np.float32(0.125)


def _shifted(data: Bytes, shifts: tuple[int, ...]) -> Bytes:
    """All bytes of a row shifted by the first number, then all by the second, and so on."""
    moved: Bytes = data[:, None] >> np.array(shifts, np.uint8)[:, None]
    return moved.reshape(len(data), -1)


def _nibble_pairs(data: Bytes) -> Bytes:
    """The lower and the upper half of each byte in turn."""
    halves: Bytes = data[:, :, None] >> np.array([0, 4], np.uint8) & np.uint8(15)
    return halves.reshape(len(data), -1)


_KNOWN: Final = {
    "Q1_0": IntegerType(2, 128, _first_half),
    "Q2_0": IntegerType(2, 64, _first_half, off_middle=True),
    "Q3_K": IntegerType(4, 16, _q3_k),
    "IQ1_S": IntegerType(8, 32, _iq1_s),
    "IQ1_M": IntegerType(8, 16, _iq1_m),
    "IQ2_XXS": IntegerType(8, 32, _iq2_xxs),
    "IQ2_XS": IntegerType(8, 16, _iq2_xs),
    "IQ2_S": IntegerType(8, 16, _iq2_xs),
    "IQ3_XXS": IntegerType(8, 32, _iq3_xxs),
    "IQ3_S": IntegerType(8, 32, _iq3_s),
    "IQ4_NL": IntegerType(8, 32, _first_half),
    "IQ4_XS": IntegerType(8, 32, _iq4_xs),
    "TQ1_0": IntegerType(2, 256, _last_half),
    "TQ2_0": IntegerType(2, 256, _last_half, off_middle=True),
    "MXFP4": IntegerType(8, 32, _mxfp4),
    "NVFP4": IntegerType(8, 16, _nvfp4),
}
# Older versions of gguf lack the newest types.
INTEGER_TYPES: Final = {kind: row for kind, row in _KNOWN.items() if kind in BLOCK_TYPES}
