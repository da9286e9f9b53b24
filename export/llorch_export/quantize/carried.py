"""Codes that a tool has found, in the layout of ONNX Runtime's MatMulNBits, as they are.

Input is a packed matrix as :class:`Codes`; output are packed codes, scales and zero points. Codes are widened
to a width that the operator has, and a scale is repeated where its group is wider than a block: neither
changes a value.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

from llorch_export.checkpoint.codes import Codes
from llorch_export.quantize.layout import SCALE_DTYPES, block_count
from llorch_export.quantize.repack import BlockForm

_BLOCK_SIZES: Final = (256, 128, 64, 32, 16)  # for which the runtime's kernels are right

Arrays = tuple[npt.NDArray[np.generic], ...]


def carried_form(
    codes: Codes, widths: Sequence[int], *, looked_up: bool = False, fine: bool = False
) -> BlockForm | None:
    """Return the form that holds a matrix as it is, or None if there is none.

    widths: of codes that the operator has. looked_up: rows are taken from the matrix, so columns stay in
    their order. fine: blocks are small whatever the groups, for the sake of inputs that are rounded by them.
    """
    wide_enough = [width for width in sorted(widths) if width >= codes.bits]
    size = _block_size(codes, wide_enough[0], fine=fine) if wide_enough else None
    if size is None or (looked_up and codes.input_order is not None):
        return None
    return BlockForm(wide_enough[0], size, zero_points=not codes.symmetric)


def _block_size(codes: Codes, bits: int, *, fine: bool) -> int | None:
    """Return the group, or a part of it that is not too small."""
    most = _largest(codes, bits, fine=fine)
    fitting = [
        size for size in _BLOCK_SIZES if size <= most and (codes.groups == 1 or codes.group % size == 0)
    ]
    if codes.group in fitting:
        return codes.group

    def nbytes(size: int) -> int:
        return block_count(codes.columns, size) * (size * bits // 8 + _scale_bytes(codes))

    return min(fitting, key=nbytes, default=None)


def _largest(codes: Codes, bits: int, *, fine: bool) -> int:
    """Return how many codes may share a scale: inputs are rounded by the blocks of weights, so blocks are not
    as wide as they could be, and repeated scales may make an artifact a twentieth larger than its source.
    """
    if codes.group <= _BLOCK_SIZES[0]:
        return 16 * _scale_bytes(codes) if fine else _BLOCK_SIZES[0]
    return (16 if fine else 32) * _scale_bytes(codes) * 8 // bits


def _scale_bytes(codes: Codes) -> int:
    return np.dtype(SCALE_DTYPES[codes.scale_type]).itemsize


def carried(codes: Codes, form: BlockForm, start: int, stop: int) -> Arrays:
    """Return rows ``start`` to ``stop`` (excluded): packed codes [rows, blocks, block_size * bits / 8],
    scales [rows, blocks] in ``codes.scale_type``, and, if the form has them, packed zero points.

    form: from :func:`carried_form`. Raises ArtifactError if the rows cannot be read.
    """
    rows = codes.read(start, stop)
    blocks = block_count(codes.columns, form.block_size)
    group_of = np.arange(blocks) * form.block_size // codes.group
    shift = 2 ** (form.bits - 1) - 2 ** (codes.bits - 1) if codes.symmetric else 0
    wide = np.full((stop - start, blocks * form.block_size), 2 ** (form.bits - 1), np.uint8)
    np.add(rows.codes, np.uint8(shift), out=wide[:, : codes.columns])
    packed = _packed(wide, form.bits).reshape(stop - start, blocks, -1)
    scales = rows.scales[:, group_of].astype(SCALE_DTYPES[codes.scale_type])
    if rows.zero_points is None:
        return packed, scales
    return packed, scales, _packed(rows.zero_points[:, group_of], form.bits)


def _packed(codes: npt.NDArray[np.uint8], bits: int) -> npt.NDArray[np.uint8]:
    """Return codes [rows, count] as bytes [rows, ceil(count * bits / 8)], the lowest bits first."""
    each = 8 // bits
    padded = np.pad(codes, ((0, 0), (0, -codes.shape[1] % each)))
    found = padded[:, 0::each].copy()
    for place in range(1, each):
        found |= padded[:, place::each] << np.uint8(place * bits)
    return found
