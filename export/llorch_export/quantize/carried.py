"""Codes that a tool has found, in the layout of ONNX Runtime's MatMulNBits, as they are.

Input is a packed matrix as :class:`Codes`; output are packed codes, scales and zero points. Codes are widened
to a width that the operator has, and a scale is repeated where its group is wider than a block: neither
changes a value.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

from llorch_export.checkpoint.codes import Codes
from llorch_export.quantize.layout import SCALE_DTYPES, Bytes, block_count, pack
from llorch_export.quantize.repack import BLOCK_OF_2_BITS, BlockForm
from llorch_serve.artifact.manifest import ScaleType

BLOCK_SIZES: Final = (16, 32, 64, 128, 256)
"""For which the runtime's kernels are right."""

Arrays = tuple[npt.NDArray[np.generic], ...]


def carried_form(codes: Codes, widths: Sequence[int], finest: int) -> BlockForm | None:
    """Return the form that holds a matrix as it is, or None if there is none.

    widths: of codes that the operator has. finest: the smallest block wanted; groups are cut into blocks that
        are not smaller, where they can be.
    """
    if codes.zero_type is not None or (codes.levels is not None and codes.levels.codes is None):
        return None
    wide_enough = [width for width in sorted(widths) if width >= codes.bits]
    fitting = [size for size in BLOCK_SIZES if codes.groups == 1 or codes.group % size == 0]
    if not wide_enough or not fitting:
        return None
    width = wide_enough[0]
    smallest = max(finest, BLOCK_OF_2_BITS) if width == 2 else finest
    size = next((size for size in fitting if size >= smallest), fitting[-1])
    return BlockForm(width, size, zero_points=not codes.symmetric)


def carried_bits(codes: Codes, form: BlockForm) -> int:
    """Return the bits that a row takes in a form, scales and zero points included."""
    blocks = block_count(codes.columns, form.block_size)
    return blocks * (form.block_size * form.bits + _scale_bits(codes, form.bits))


def stored_bits(codes: Codes) -> int:
    """Return the bits that a row takes in a file."""
    width = codes.bits if codes.levels is None else int(math.log2(len(codes.levels.values)))
    zeros = 0 if codes.symmetric else codes.bits
    if codes.zero_type is not None:
        zeros = bits_of(codes.zero_type)
    return codes.columns * width + codes.groups * (scale_bits(codes) + zeros) // (codes.across or 1)


def scale_bits(codes: Codes) -> int:
    """Return the bits that a scale takes in a file."""
    return 8 if codes.scale_table else bits_of(codes.scale_type)


def bits_of(kind: ScaleType) -> int:
    """Return the bits of a number of a type."""
    return 8 * np.dtype(SCALE_DTYPES[kind]).itemsize


def _scale_bits(codes: Codes, bits: int) -> int:
    return bits_of(codes.scale_type) + (0 if codes.symmetric else bits)


def carried(codes: Codes, form: BlockForm, start: int, stop: int) -> Arrays:
    """Return rows ``start`` to ``stop`` (excluded): packed codes [rows, blocks, block_size * bits / 8],
    scales [rows, blocks] in ``codes.scale_type``, and, if the form has them, packed zero points.

    form: from :func:`carried_form`. Raises ArtifactError if the rows cannot be read.
    """
    rows = codes.read(start, stop)
    blocks = block_count(codes.columns, form.block_size)
    group_of = np.arange(blocks) * form.block_size // codes.group
    packed = packed_codes(codes, rows.codes, form)
    scales = rows.scales[:, group_of].astype(SCALE_DTYPES[codes.scale_type])
    if rows.zero_points is None:
        return packed, scales
    return packed, scales, pack(rows.zero_points[:, group_of], form.bits)


def packed_codes(codes: Codes, found: Bytes, form: BlockForm) -> Bytes:
    """Return the codes of some rows as the operator takes them: [rows, blocks, block_size * bits / 8].

    found: uint8 [rows, columns], as they were read.
    """
    blocks = block_count(codes.columns, form.block_size)
    if codes.levels is not None:
        assert codes.levels.codes is not None
        found = codes.levels.codes[found]
    shift = 0 if form.zero_points else 2 ** (form.bits - 1) - 2 ** (codes.bits - 1)
    wide = np.full((len(found), blocks * form.block_size), 2 ** (form.bits - 1), np.uint8)
    np.add(found, np.uint8(shift), out=wide[:, : codes.columns])
    return pack(wide, form.bits).reshape(len(found), blocks, -1)
