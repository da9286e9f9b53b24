"""Codes in the width that a checkpoint has them in, which the runtime widens when it loads the graph.

Some formats have codes or scales that no kernel takes as they are: levels that are no even steps, three bits,
scales in bytes, zero points that are no whole numbers. The data file keeps these. Nodes whose inputs are all
constants make the blocks of MatMulNBits of them, or a matrix of values, and the runtime runs such nodes once,
when it opens the graph. Input is a packed matrix as :class:`Codes`; output are the arrays of the file.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
import numpy.typing as npt

from llorch_export.checkpoint.codes import Codes, Levels
from llorch_export.quantize.carried import Arrays, bits_of, carried_form, packed_codes, scale_bits
from llorch_export.quantize.layout import SCALE_DTYPES, Bytes, Matrix, block_count, pack
from llorch_export.quantize.repack import BlockForm

WORD_VALUES: Final = 2**16
"""Of the words of 16 bits that codes are stored in."""
LEVEL_BITS: Final = 4
CODES_AT_A_TIME: Final = 2**22
"""Packed files are read in strips, which want to be wide."""
_PLANES: Final = 3  # bits of codes that are stored as two planes
_PAIR: Final = 2  # bits of codes that are widened to 4

Words = npt.NDArray[np.uint16]


@dataclass(frozen=True, slots=True)
class FoldedForm:
    """Blocks whose codes or scales are narrower in the file.

    form: the blocks that the operator takes. bits: of a code in the file.
    levels: codes are numbers of levels. planes: the two lower bits of codes lie together, and the upper ones.
    pairs: codes have 2 bits in the file and 4 in the operator, which is fast there without rounding inputs.
    offsets: zero points are no whole numbers; what they add to an output is computed beside the blocks.
    """

    form: BlockForm
    bits: int
    levels: bool
    planes: bool
    offsets: bool
    pairs: bool = False


@dataclass(frozen=True, slots=True)
class FoldedValues:
    """A matrix of float32 values that is codes in the file, ``bits`` each.

    group: columns that share a scale in the file, which divides the columns. across: as of :class:`Codes`.
    """

    bits: int
    group: int
    across: int = 0


def folded_form(
    codes: Codes, widths: Sequence[int], finest: int, *, widen_pairs: bool = False
) -> FoldedForm | None:
    """Return the form that keeps what is narrower than blocks are; None if nothing is, or if no blocks hold
    it.

    widths, finest: as for :func:`carried_form`. widen_pairs: codes of 2 bits are narrower too.
    """
    offsets, planes = codes.zero_type is not None, codes.bits == _PLANES
    pairs = widen_pairs and codes.bits <= _PAIR
    if not (offsets or planes or pairs or codes.levels or codes.scale_table):
        return None
    if pairs:
        widths = [width for width in widths if width > _PAIR]
    if offsets and codes.columns % codes.group:
        return None
    whole = replace(codes, zero_type=None, symmetric=codes.symmetric or offsets)
    form = carried_form(whole, widths, finest)
    if form is None:
        return None
    bits = LEVEL_BITS if codes.levels else codes.bits if planes else _PAIR if pairs else form.bits
    return FoldedForm(form, bits, codes.levels is not None, planes, offsets, pairs)


def folded_values(codes: Codes) -> FoldedValues | None:
    """Return the form that holds levels as values, where 8 bits do not, and codes with scales for each
    column; None if blocks of 8 bits hold them.
    """
    levels = codes.levels
    if codes.input_scales is not None:  # products of values take inputs as they are
        return None
    if codes.across:
        each = 8 if codes.bits == _PLANES else 8 // codes.bits
        return None if codes.columns % each else FoldedValues(codes.bits, 1, codes.across)
    if levels is None or (levels.codes is not None and not codes.rounding):
        return None
    bits = LEVEL_BITS if len(levels.values) == 2**LEVEL_BITS else 8
    group = codes.columns if codes.groups == 1 else math.gcd(codes.columns, codes.group)
    return None if bits == LEVEL_BITS and group % 2 else FoldedValues(bits, group)


def folded_bits(codes: Codes, folded: FoldedForm | FoldedValues) -> int:
    """Return the bits that a row takes in the file, scales and zero points included."""
    scales = codes.groups * scale_bits(codes)
    if isinstance(folded, FoldedValues):
        zeros = codes.groups * bits_of(codes.zero_type) if codes.zero_type else 0
        return codes.columns * folded.bits + (scales + zeros) // (folded.across or 1)
    blocks = block_count(codes.columns, folded.form.block_size)
    zeros = blocks * folded.form.bits if folded.form.zero_points else 0
    if codes.zero_type is not None:
        zeros = codes.groups * bits_of(codes.zero_type)
    return blocks * folded.form.block_size * folded.bits + scales + zeros


def loaded_bits(codes: Codes, folded: FoldedForm | FoldedValues) -> int:
    """Return the bits that a row takes once the runtime has loaded it."""
    if isinstance(folded, FoldedValues):
        return codes.columns * 32
    form = folded.form
    blocks = block_count(codes.columns, form.block_size)
    zeros = form.bits if form.zero_points else 0
    offsets = 32 * codes.groups if folded.offsets else 0
    return blocks * (form.block_size * form.bits + 32 + zeros) + offsets


def folded(codes: Codes, how: FoldedForm, start: int, stop: int) -> Arrays:
    """Return rows ``start`` to ``stop`` (excluded): the codes, [rows, blocks, words] of 16 bits each, of both
    planes if there are two, or packed bytes; scales [rows, groups], unless they are bytes; zero points, if
    any.

    how: from :func:`folded_form`. Raises ArtifactError if the rows cannot be read.
    """
    rows, form = codes.read(start, stop), how.form
    blocks = block_count(codes.columns, form.block_size)
    wide = np.zeros((stop - start, blocks * form.block_size), np.uint8)
    arrays: list[npt.NDArray[np.generic]]
    if how.levels:
        wide[:, : codes.columns] = rows.codes
        wide[:, codes.columns :] = _nothing(codes.levels)
        arrays = [_words(pack(wide, LEVEL_BITS), blocks)]
    elif how.planes:
        wide[:, : codes.columns] = rows.codes
        wide[:, codes.columns :] = 2 ** (codes.bits - 1)
        upper = np.packbits(wide >> 2, axis=-1, bitorder="little")
        arrays = [_words(pack(wide & np.uint8(3), 2), blocks), _words(upper, blocks)]
    elif how.pairs:
        arrays = [_words(packed_codes(codes, rows.codes, replace(form, bits=_PAIR)), blocks)]
    else:
        arrays = [packed_codes(codes, rows.codes, form)]
    if codes.scale_table is None:
        arrays.append(rows.scales.astype(SCALE_DTYPES[codes.scale_type]))
    if codes.zero_type is not None:
        assert rows.zero_points is not None
        arrays.append(rows.zero_points.astype(SCALE_DTYPES[codes.zero_type]))
    elif rows.zero_points is not None:
        group_of = np.arange(blocks) * form.block_size // codes.group
        arrays.append(pack(rows.zero_points[:, group_of], form.bits))
    return tuple(arrays)


def levels_in_bytes(codes: Codes, how: FoldedValues, start: int, stop: int) -> Arrays:
    """Return rows ``start`` to ``stop`` (excluded): numbers of levels [rows, groups, bytes of a group], two
    in a byte where there are sixteen, and scales [rows, groups], unless they are bytes.
    """
    rows = codes.read(start, stop)
    numbers = pack(rows.codes, how.bits).reshape(stop - start, codes.columns // how.group, -1)
    if codes.scale_table is not None:
        return (numbers,)
    return numbers, rows.scales.astype(SCALE_DTYPES[codes.scale_type])


def codes_in_bytes(codes: Codes, start: int, stop: int) -> Arrays:
    """Return the codes of rows ``start`` to ``stop`` (excluded) in bytes [rows, bytes]; of three bits the two
    lower ones, and the upper ones by themselves.
    """
    found = codes.read(start, stop).codes
    if codes.bits != _PLANES:
        return (_packed_bits(found, codes.bits),)
    return _packed_bits(found & np.uint8(3), 2), _packed_bits(found >> np.uint8(2), 1)


def _packed_bits(codes: Bytes, bits: int) -> Bytes:
    return np.packbits(codes, axis=-1, bitorder="little") if bits == 1 else pack(codes, bits)


def numbers_in_bytes(bits: int, factor: int = 1) -> Matrix:
    """Return the codes that each byte holds, times ``factor``: float32 [256, codes]."""
    found: Matrix = _numbers(bits, 256)[:, : 8 // bits].astype(np.float32) * np.float32(factor)
    return found


def scale_bytes(codes: Codes, rows: int) -> Bytes:
    """Return the bytes that stand for all scales of a matrix of so many rows: [rows, groups], or [blocks of
    scales, scales of a block], what is left of the last filled with zeros, where such blocks have factors.
    """
    table = codes.scale_table
    assert table is not None
    found = table.read(0, rows)
    if table.factors is None:
        return found
    left = len(table.factors) * table.block - found.size
    return np.pad(found.reshape(-1), (0, left)).reshape(-1, table.block)


def _words(data: Bytes, blocks: int) -> Words:
    """Return bytes [rows, bytes] as words [rows, blocks, words]."""
    words: Words = np.ascontiguousarray(data).view("<u2").reshape(len(data), blocks, -1)
    return words


def _nothing(levels: Levels | None) -> int:
    """Return the number of a level that stands for 0, or nearest to it, for columns that no input has."""
    assert levels is not None
    return int(np.abs(levels.values).argmin())


@functools.cache
def _numbers(bits: int, words: int) -> Bytes:
    """Return the codes of so many bits that each word of 16 bits holds: [words, codes], the lowest first."""
    places = np.arange(0, 16, bits)
    found: Bytes = (np.arange(words)[:, None] >> places & (2**bits - 1)).astype(np.uint8)
    return found


def level_codes(levels: Levels) -> Bytes:
    """Return the codes of 8 bits of the four levels of each word: [words, 4]."""
    assert levels.codes is not None
    found: Bytes = levels.codes[_numbers(LEVEL_BITS, WORD_VALUES)]
    return found


def level_values(levels: Levels) -> Matrix:
    """Return the values of the levels of each byte: [256, 2] of sixteen levels, else [256]."""
    if len(levels.values) != 2**LEVEL_BITS:
        return levels.values
    found: Matrix = levels.values[_numbers(LEVEL_BITS, 256)[:, :2]]
    return found


def lower_plane() -> Bytes:
    """Return, of each word of eight lower pairs of bits, four bytes of two codes of 4 bits."""
    return pack(_numbers(2, WORD_VALUES), 4)


def two_bit_words(*, symmetric: bool) -> Bytes:
    """Return, of each word of eight codes of 2 bits, four bytes of two codes of 4 bits. symmetric: codes
    around 2 are moved to be around 8.
    """
    return pack(_numbers(_PAIR, WORD_VALUES) + np.uint8(6 if symmetric else 0), 4)


def upper_plane(*, symmetric: bool) -> Bytes:
    """Return, of each word of sixteen upper bits, eight bytes of two codes of 4 bits. symmetric: codes around
    4 are moved to be around 8.
    """
    upper = _numbers(1, WORD_VALUES)
    return pack(np.where(upper, 8, 4).astype(np.uint8) if symmetric else upper << np.uint8(2), 4)
