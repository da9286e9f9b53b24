"""Half-quadratic zero points: for each block, the one that leaves most weights a small error and a few a
large one.

After HQQ (Badri and Shaji 2023), which minimises ``sum |w - w'| ** p`` with ``p < 1``. The block's range
gives the scale, which stays. Errors are split into those taken for outliers, by a proximal step of the
p-norm, and the rest; the zero point that makes the rest zero on average is known, and the two take turns.
Errors count in steps, so that a matrix times a constant is quantised alike. The runtime takes whole zero
points alone, so the last one is rounded.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from llorch_export.quantize.layout import Matrix, reciprocal, storable
from llorch_serve.artifact.manifest import ScaleType

_POWER: Final = 0.7
_PENALTY: Final = 10.0  # what it costs to part the outliers from the errors; grows, so that the turns settle
_GROWTH: Final = 1.01
_TURNS: Final = 20


def half_quadratic(block: Matrix, bits: int, scale_type: ScaleType) -> tuple[Matrix, Matrix]:
    """Return scales and zero points [rows, blocks] of blocks [rows, blocks, block_size]."""
    top = np.float32(2**bits - 1)
    low, high = np.minimum(block.min(axis=2), 0), np.maximum(block.max(axis=2), 0)
    scale = storable((high - low) / top, scale_type)
    steps = block * reciprocal(scale)[:, :, None]
    zero = np.clip(-low * reciprocal(scale), 0, top)
    penalty = _PENALTY
    for _ in range(_TURNS):
        codes = np.clip(np.rint(steps + zero[:, :, None]), 0, top)
        inliers = steps - _outliers(steps - (codes - zero[:, :, None]), penalty)
        zero = np.clip((codes - inliers).mean(axis=2), 0, top)
        penalty *= _GROWTH
    return scale, np.rint(zero)


def _outliers(errors: Matrix, penalty: float) -> Matrix:
    """Return what the proximal step of the p-norm makes of errors in steps: small ones become zero."""
    size = np.abs(errors)
    threshold = np.power(np.maximum(size, np.float32(1e-6)), np.float32(_POWER - 1)) / np.float32(penalty)
    shrunk: Matrix = np.copysign(np.maximum(size - threshold, 0), errors)
    return shrunk
