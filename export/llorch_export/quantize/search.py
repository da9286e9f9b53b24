"""Scale search: for each block, the scale and zero point with the least squared error of the weights.

For codes ``d`` (relative to the zero point) the best scale is known, ``s = sum(w d) / sum(d d)``, and leaves
``sum(w w) - sum(w d) ** 2 / sum(d d)``. So a candidate, a scale and a zero point, is tried by rounding to it
and is worth what its codes explain, ``sum(w d) ** 2 / sum(d d)``. Candidates are ranges of the block cut by
some percent (clipping a few large weights lets all others round finer), each with zero points around the one
that fits the range. The winner is then refined by rounding and fitting in turns, and gives way to
round-to-nearest where that is still better.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import numpy as np

from llorch_export.quantize.layout import (
    SCALE_DTYPES,
    Blocks,
    Matrix,
    block_count,
    grouped,
    pack,
    reciprocal,
    row_chunks,
    storable,
    zero_point_bytes,
)
from llorch_export.quantize.nearest import nearest_scales
from llorch_export.quantize.threads import in_threads
from llorch_serve.artifact.manifest import ScaleType

_CHUNK_ELEMENTS: Final = 2**16  # temporaries of 256 KiB stay in the cache; each is passed over many times
_SHARES: Final = (1.0, 0.94, 0.88, 0.82, 0.76)
_REFINEMENTS: Final = 2

Search = Callable[[Matrix], tuple[Matrix, Matrix]]
"""Gives scales and whole zero points [rows, blocks] of blocks [rows, blocks, block_size]."""


def quantize_search(
    weight: Matrix, *, bits: int, block_size: int, zero_points: bool, scale_type: ScaleType = "float32"
) -> Blocks:
    """Quantise ``weight`` [rows, K]; the squared error of a block is never above round-to-nearest's.

    zero_points: whether each block has one of its own; otherwise all are ``2 ** (bits - 1)``.
    """
    return quantize_blocks(
        weight,
        lambda block: searched(block, bits, zero_points, scale_type),
        bits=bits,
        block_size=block_size,
        zero_points=zero_points,
        scale_type=scale_type,
    )


def quantize_blocks(
    weight: Matrix,
    search: Search,
    *,
    bits: int,
    block_size: int,
    zero_points: bool,
    scale_type: ScaleType = "float32",
) -> Blocks:
    """Quantise ``weight`` [rows, K] to the nearest codes of what ``search`` gives; it is called from several
    threads.
    """
    rows, columns = weight.shape
    blocks = block_count(columns, block_size)
    packed = np.empty((rows, blocks, block_size * bits // 8), np.uint8)
    scales = np.empty((rows, blocks), SCALE_DTYPES[scale_type])
    zeros = np.empty((rows, zero_point_bytes(columns, block_size, bits)), np.uint8)

    def quantize(part: slice) -> None:
        block = grouped(weight[part], block_size)
        scale, zero = search(block)
        codes = _rounded(block, scale, zero, bits) + zero[:, :, None]
        packed[part], scales[part], zeros[part] = pack(codes, bits), scale, pack(zero, bits)

    in_threads(quantize, list(row_chunks(rows, columns, _CHUNK_ELEMENTS)))
    return Blocks(packed, scales, zeros if zero_points else None)


def searched(block: Matrix, bits: int, zero_points: bool, scale_type: ScaleType) -> tuple[Matrix, Matrix]:
    """Return scales and zero points [rows, blocks] of blocks [rows, blocks, block_size]."""
    half, top = np.float32(2 ** (bits - 1)), np.float32(2**bits - 1)
    plain = nearest_scales(block, bits, scale_type)
    middle = np.full_like(plain, half)
    best = _Best(plain, middle)
    for share in _SHARES:
        best.offer(block, plain * np.float32(share), middle, bits)
    if zero_points:
        low, high = np.minimum(block.min(axis=2), 0), np.maximum(block.max(axis=2), 0)
        for share in _SHARES:
            scale = (high - low) * np.float32(share) / top
            fitting = -low * np.float32(share) * reciprocal(scale)
            for zero in (np.floor(fitting), np.ceil(fitting)):
                best.offer(block, scale, np.clip(zero, 0, top), bits)
    for _ in range(_REFINEMENTS):
        best.offer(block, best.scale, best.zero, bits)
    scale, zero = storable(best.scale, scale_type), best.zero
    worse = _error(block, scale, zero, bits) > _error(block, plain, middle, bits)
    return np.where(worse, plain, scale), np.where(worse, middle, zero)


class _Best:
    """The best candidate of each block so far, with the scale that fits its codes."""

    def __init__(self, scale: Matrix, zero: Matrix) -> None:
        self.scale, self.zero = scale.copy(), zero.copy()
        self._explained = np.zeros_like(scale)

    def offer(self, block: Matrix, scale: Matrix, zero: Matrix, bits: int) -> None:
        """Round to a candidate and keep it where its codes explain more."""
        codes = _rounded(block, scale, zero, bits)
        along = np.einsum("rbi,rbi->rb", block, codes)
        length = np.einsum("rbi,rbi->rb", codes, codes)
        fitted = along * reciprocal(length)
        explained = along * fitted
        better = explained > self._explained
        np.copyto(self._explained, explained, where=better)
        np.copyto(self.scale, fitted, where=better)
        np.copyto(self.zero, zero, where=better)


def _rounded(block: Matrix, scale: Matrix, zero: Matrix, bits: int) -> Matrix:
    """Return the codes of a candidate relative to its zero point."""
    codes = block * reciprocal(scale)[:, :, None]
    np.rint(codes, out=codes)
    np.maximum(codes, -zero[:, :, None], out=codes)
    np.minimum(codes, (np.float32(2**bits - 1) - zero)[:, :, None], out=codes)
    return codes


def _error(block: Matrix, scale: Matrix, zero: Matrix, bits: int) -> Matrix:
    left = _rounded(block, scale, zero, bits)
    left *= scale[:, :, None]
    left -= block
    error: Matrix = np.einsum("rbi,rbi->rb", left, left)
    return error
