"""Round to nearest: the scale of a block is that of its largest magnitude, with nothing to search."""

from __future__ import annotations

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
)
from llorch_serve.artifact.manifest import ScaleType

_CHUNK_ELEMENTS: Final = 2**21  # temporaries stay near 8 MiB each, whatever the matrix


def quantize_nearest(
    weight: Matrix, *, bits: int, block_size: int, scale_type: ScaleType = "float32"
) -> Blocks:
    """Quantise ``weight`` [rows, K] symmetrically, round to nearest.

    The scale carries the sign of the block's largest magnitude, so that this weight falls on the one code,
    ``-2 ** (bits - 1)``, that has no positive counterpart and is met exactly.
    """
    rows, columns = weight.shape
    blocks = block_count(columns, block_size)
    packed = np.empty((rows, blocks, block_size * bits // 8), np.uint8)
    scales = np.empty((rows, blocks), SCALE_DTYPES[scale_type])
    half = 2 ** (bits - 1)
    for part in row_chunks(rows, columns, _CHUNK_ELEMENTS):
        block = grouped(weight[part], block_size)
        found = nearest_scales(block, bits, scale_type)
        codes = block * reciprocal(found)[:, :, None]
        np.rint(codes, out=codes)
        codes += half
        np.clip(codes, 0, 2 * half - 1, out=codes)
        packed[part], scales[part] = pack(codes, bits), found
    return Blocks(packed, scales, None)


def nearest_scales(block: Matrix, bits: int, scale_type: ScaleType) -> Matrix:
    """Return the scales of blocks [rows, blocks, block_size]."""
    low, high = block.min(axis=2), block.max(axis=2)
    extreme = np.where(-low >= high, low, high)
    return storable((extreme / np.float32(-(2 ** (bits - 1)))).astype(np.float32), scale_type)
