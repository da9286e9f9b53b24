"""GGUF's quantised blocks in the layout of ONNX Runtime's MatMulNBits, with their own codes and scales.

Input is stored bytes, one row of blocks of one ggml type; output are codes, scales and zero points. Layouts
of the blocks: ggml's ``ggml-common.h``. Types without an offset (Q4_0, Q5_0, Q8_0, Q6_K and those of
:mod:`llorch_export.quantize.integer_types`) come over exactly: a scale is a float16 times at most an 8-bit
integer, which float32 holds. Types with one go through :mod:`llorch_export.quantize.affine`.
"""

from __future__ import annotations

import collections
import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from llorch_export.checkpoint.ggml_types import BLOCK_TYPES, halves
from llorch_export.quantize.affine import MOST_SUB_STEPS, widen
from llorch_export.quantize.integer_types import INTEGER_TYPES, IntegerType, integer_blocks
from llorch_export.quantize.layout import pack

_SUB_STEPS_OF_2_BITS: Final = 85  # 3 * 85 = 255

Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class BlockForm:
    """How a matrix lies in the graph: ``bits`` a code, ``block_size`` codes a scale.

    zero_points: one a block; without them it is ``2 ** (bits - 1)`` everywhere.
    """

    bits: int
    block_size: int
    zero_points: bool


@dataclass(frozen=True, slots=True)
class Blocks:
    """Weights ``scales * (codes - zero_points)``: codes [n, groups, size]; scales and zero points [n,
    groups].
    """

    codes: Bytes
    scales: Floats
    zero_points: Bytes


def _q4_0(data: Bytes) -> Blocks:
    """float16 scale, 16 bytes of nibbles: codes 0 to 15 around 8."""
    return _symmetric(_nibbles(data[:, 2:]), halves(data[:, :2]), 8)


def _q4_1(data: Bytes) -> Blocks:
    """float16 step and offset, 16 bytes of nibbles."""
    steps, offsets = halves(data[:, :2]), halves(data[:, 2:4])
    return _affine(_nibbles(data[:, 4:])[:, None], steps, offsets)


def _q5_0(data: Bytes) -> Blocks:
    """float16 scale, 32 fifth bits, 16 bytes of nibbles: codes 0 to 31 around 16, moved to be around 128."""
    return _symmetric(_nibbles(data[:, 6:]) + _fifth_bits(data[:, 2:6]) + 112, halves(data[:, :2]), 128)


def _q5_1(data: Bytes) -> Blocks:
    """float16 step and offset, 32 fifth bits, 16 bytes of nibbles."""
    steps, offsets = halves(data[:, :2]), halves(data[:, 2:4])
    return _affine((_nibbles(data[:, 8:]) + _fifth_bits(data[:, 4:8]))[:, None], steps, offsets)


def _q8_0(data: Bytes) -> Blocks:
    """float16 scale, 32 signed bytes."""
    return _symmetric(data[:, 2:] ^ np.uint8(128), halves(data[:, :2]), 128)


def _q2_k(data: Bytes) -> Blocks:
    """16 bytes of a four-bit step and offset each, 64 bytes of bit pairs, float16 factors of both."""
    pairs = data[:, 16:80].reshape(-1, 2, 1, 32) >> np.array([0, 2, 4, 6], np.uint8)[:, None]
    codes: Bytes = (pairs & np.uint8(3)).reshape(-1, 16, 16)
    steps = halves(data[:, 80:82]) * (data[:, :16] & 15)
    offsets = -(halves(data[:, 82:84]) * (data[:, :16] >> 4))
    return _affine(codes, steps, offsets, most=_SUB_STEPS_OF_2_BITS)


def _q4_k(data: Bytes) -> Blocks:
    """float16 factors of steps and offsets, 8 + 8 six-bit integers, 4 times 32 bytes of nibbles."""
    return _affine(_super_nibbles(data[:, 16:]), *_super_scales(data))


def _q5_k(data: Bytes) -> Blocks:
    """As Q4_K, with 32 bytes between whose bit ``i`` is the fifth bit in sub-block ``i``."""
    fifth = (data[:, None, 16:48] >> np.arange(8, dtype=np.uint8)[:, None]) & 1
    return _affine(_super_nibbles(data[:, 48:]) + (fifth << 4), *_super_scales(data))


def _q6_k(data: Bytes) -> Blocks:
    """128 bytes of nibbles, 64 bytes of upper bit pairs, 16 signed scales, float16 factor: codes 0 to 63
    around 32.
    """
    n = len(data)
    nibbles = data[:, :128].reshape(n, 2, 1, 64) >> np.array([0, 4], np.uint8)[:, None] & 15
    pairs = data[:, 128:192].reshape(n, 2, 1, 32) >> np.array([0, 2, 4, 6], np.uint8)[:, None] & 3
    codes = nibbles.reshape(n, 16, 16) + (pairs.reshape(n, 16, 16) << 4) + 96
    scales = halves(data[:, 208:]) * data[:, 192:208].view(np.int8).astype(np.float32)
    return Blocks(codes, scales, np.full(scales.shape, 128, np.uint8))


def _integers(kind: str, data: Bytes) -> Blocks:
    """Codes around the middle of their bits; a block that shares one scale widely has it repeated."""
    row = INTEGER_TYPES[kind]
    codes, scales = integer_blocks(kind, data)
    size = _block_size(row)
    scales = scales.repeat(row.group // size, axis=1)
    moved = (codes.astype(np.int16) + row.middle).astype(np.uint8).reshape(*scales.shape, size)
    return Blocks(moved, scales, np.full(scales.shape, row.middle, np.uint8))


@dataclass(frozen=True, slots=True)
class _Type:
    """A ggml type: the form it takes, and how blocks [n, bytes of a block] are read."""

    form: BlockForm
    read: Callable[[Bytes], Blocks]


_WIDEST: Final = 32  # activations are rounded with the weights' blocks, so theirs are no wider
BLOCK_OF_2_BITS: Final = 64
"""For smaller ones the CPU's kernel takes ten times as long from some rows on."""


def _block_size(row: IntegerType) -> int:
    return min(row.group, BLOCK_OF_2_BITS if row.bits == 2 else _WIDEST)


_WIDENED: Final = BlockForm(8, 32, zero_points=True)
_TYPES: Final = {
    "Q4_0": _Type(BlockForm(4, 32, zero_points=False), _q4_0),
    "Q4_1": _Type(_WIDENED, _q4_1),
    "Q5_0": _Type(BlockForm(8, 32, zero_points=False), _q5_0),
    "Q5_1": _Type(_WIDENED, _q5_1),
    "Q8_0": _Type(BlockForm(8, 32, zero_points=False), _q8_0),
    "Q2_K": _Type(BlockForm(8, 16, zero_points=True), _q2_k),
    "Q4_K": _Type(_WIDENED, _q4_k),
    "Q5_K": _Type(_WIDENED, _q5_k),
    "Q6_K": _Type(BlockForm(8, 16, zero_points=False), _q6_k),
    **{
        kind: _Type(
            BlockForm(row.bits, _block_size(row), zero_points=row.off_middle),
            functools.partial(_integers, kind),
        )
        for kind, row in INTEGER_TYPES.items()
    },
}
REPACKED_TYPES: Final = tuple(_TYPES)
_WITH_OFFSETS: Final = ("Q4_1", "Q5_1", "Q2_K", "Q4_K", "Q5_K")
COMMON_WIDTHS: Final = (4, 8)
"""Widths of codes that every operator has which takes blocks at all."""


def carried_form(kind: str, widths: Sequence[int] = COMMON_WIDTHS) -> str:
    """Say in words what a ggml type becomes: ``8 bits, block 32, exactly``. widths: as for
    :func:`common_form`.
    """
    form = common_form([kind], widths)
    exact = "offsets rounded to part of a step" if kind in _WITH_OFFSETS else "exactly"
    return f"{form.bits} bits, block {form.block_size}, {exact}"


def carried_notice(matrices: Iterable[tuple[str, Sequence[int]]]) -> str:
    """Say what becomes of the matrices of a GGUF file at precision ``source``.

    matrices: the type of each, and the widths that its codes may have in the graph.
    """
    counts = collections.Counter(
        (kind, carried_form(kind, widths) if kind in _TYPES else "whole, in the compute type")
        for kind, widths in matrices
    )
    forms = (f"{count} of {kind} ({form})" for (kind, form), count in sorted(counts.items()))
    return (
        f"matrices as the graph has them: {', '.join(forms)}; where several types share one matrix, all have "
        "the widest form"
    )


def common_form(types: Iterable[str], widths: Sequence[int] = COMMON_WIDTHS) -> BlockForm:
    """Return the narrowest form that holds matrices of all these types as they are.

    widths: of codes that the runtime has an operator for, 8 among them.
    """
    forms = [_TYPES[kind].form for kind in types]
    bits = max(form.bits for form in forms)
    width = min(width for width in widths if width >= bits)
    size = min(form.block_size for form in forms)
    return BlockForm(
        bits=width,
        block_size=size if width == 2 else min(size, _WIDEST),
        zero_points=any(form.zero_points for form in forms),
    )


def repack(kind: str, data: Bytes, form: BlockForm) -> tuple[Bytes, Floats, Bytes]:
    """Return packed codes [rows, blocks, block_size * bits / 8], scales and zero points [rows, blocks].

    kind: one of ``REPACKED_TYPES``; data: stored bytes [rows, bytes of a row]; form: from
        :func:`common_form`.
    A scale that is not finite in the file stays so.
    """
    rows, source = len(data), _TYPES[kind]
    with np.errstate(all="ignore"):  # of scales that are not finite, which whoever writes the weights reports
        found = source.read(data.reshape(-1, BLOCK_TYPES[kind].size))
    repeats = source.form.block_size // form.block_size
    shift = np.uint8(2 ** (form.bits - 1) - 2 ** (source.form.bits - 1))
    codes: Bytes = found.codes.reshape(rows, -1, form.block_size) + shift
    scales = found.scales.reshape(rows, -1).repeat(repeats, axis=1)
    zero_points = found.zero_points.reshape(rows, -1).repeat(repeats, axis=1) + shift
    return pack(codes, form.bits), scales, zero_points


def _symmetric(codes: Bytes, scales: Floats, zero_point: int) -> Blocks:
    """Take codes [n, size] and scales [n, 1]."""
    return Blocks(codes[:, None], scales, np.full(scales.shape, zero_point, np.uint8))


def _affine(codes: Bytes, steps: Floats, offsets: Floats, most: int = MOST_SUB_STEPS) -> Blocks:
    """Take codes [n, groups, size], steps and offsets [n, groups]; most: as for :func:`widen`."""
    wide, scales, zero_points = widen(
        codes.reshape(-1, codes.shape[-1]), steps.reshape(-1), offsets.reshape(-1), most
    )
    return Blocks(wide.reshape(codes.shape), scales.reshape(steps.shape), zero_points.reshape(steps.shape))


def _nibbles(data: Bytes) -> Bytes:
    """The lower halves of bytes [n, size], then the upper ones: [n, 2 * size]."""
    return np.concatenate([data & 15, data >> 4], axis=1)


def _fifth_bits(data: Bytes) -> Bytes:
    """16 times the bits of 4 bytes [n, 4], lowest first: [n, 32]."""
    return np.unpackbits(data, axis=1, bitorder="little") << np.uint8(4)


def _super_nibbles(data: Bytes) -> Bytes:
    """Codes [n, 8, 32] of 128 bytes [n, 128]: 32 bytes hold one sub-block in their lower halves, the next in
    the upper.
    """
    quarters = data.reshape(-1, 4, 1, 32)
    return np.concatenate([quarters & 15, quarters >> 4], axis=2).reshape(-1, 8, 32)


def _super_scales(data: Bytes) -> tuple[Floats, Floats]:
    """Steps and offsets [n, 8] of a Q4_K or Q5_K block: two float16, then twelve bytes with 8 + 8 six-bit
    integers.

    The first four of each kind lie in bytes 0-3 and 4-7; the upper two bits of these bytes, over the nibbles
    of bytes 8-11, make the last four. The offset is subtracted.
    """
    first, second, nibbles = data[:, 4:8], data[:, 8:12], data[:, 12:16]
    steps = np.concatenate([first & 63, nibbles & 15 | (first >> 6) << 4], axis=1)
    offsets = np.concatenate([second & 63, nibbles >> 4 | (second >> 6) << 4], axis=1)
    return halves(data[:, :2]) * steps, -(halves(data[:, 2:4]) * offsets)
