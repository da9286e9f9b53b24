"""Affine blocks, ``step * code + offset``, on an 8-bit grid that has zero on it.

MatMulNBits multiplies fast only with whole zero points, while GGUF's affine types add an offset that is no
whole number of steps. So the grid is made finer: with ``k`` sub-steps to a step and the offset rounded to
``j`` sub-steps, ``step / k * (k * code + j)`` has whole codes, and eight bits leave room to choose the ``k``
whose ``j / k`` is nearest to the offset. Every weight keeps its code and its step; an offset moves by at most
half a sub-step.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

_LARGEST: Final = 255
MOST_SUB_STEPS: Final = 17  # 4-bit codes at their widest fill 8 bits: 15 * 17 = 255

Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]


def widen(
    codes: Bytes, steps: Floats, offsets: Floats, most: int = MOST_SUB_STEPS
) -> tuple[Bytes, Floats, Bytes]:
    """Return 8-bit codes [n, size], scales [n] and zero points [n] that stand for ``step * code + offset``.

    codes: [n, size]; steps, offsets: [n]. most: the largest number of sub-steps that is tried.
    An offset moves by at most ``|step| / 2k``, where ``k`` is the largest up to ``most`` with ``k`` times the
    block's span of steps, zero included, at most 255. Blocks wider than 255 steps, whose weights differ by
    less than 8 bits can tell, are rounded to the nearest of 256 levels. A step or offset that is not finite
    gives a scale that is not.
    """
    low, high = codes.min(axis=1).astype(np.float32), codes.max(axis=1).astype(np.float32)
    scales, shifts, factors = _sub_steps(low, high, steps, offsets, most)
    bottom = np.minimum(factors * low + shifts, 0)
    wide = codes * factors[:, None] + (shifts - bottom)[:, None]
    zero_points = -bottom
    (flat,) = np.nonzero((low == high) | (steps == 0))
    wide[flat], zero_points[flat] = 1, 0
    scales[flat] = steps[flat] * low[flat] + offsets[flat]
    (coarse,) = np.nonzero((factors == 0) & (low != high) & (steps != 0))
    if coarse.size:
        wide[coarse], scales[coarse], zero_points[coarse] = _rounded(
            steps[coarse, None] * codes[coarse] + offsets[coarse, None]
        )
    broken = ~(np.isfinite(steps) & np.isfinite(offsets))
    wide[broken], zero_points[broken], scales[broken] = 0, 0, np.nan
    return wide.astype(np.uint8), scales, zero_points.astype(np.uint8)


def _sub_steps(
    low: Floats, high: Floats, steps: Floats, offsets: Floats, most: int
) -> tuple[Floats, Floats, Floats]:
    """Return scales ``step / k``, shifts ``j`` and factors ``k`` [n]; ``k`` is 0 where none fits into 8
    bits.
    """
    ratios = np.divide(offsets, steps, out=np.zeros_like(steps), where=steps != 0)
    errors = np.full_like(steps, np.inf)
    shifts, factors = np.zeros_like(steps), np.zeros_like(steps)
    for k in range(1, most + 1):
        factor = np.float32(k)
        j = np.rint(ratios * factor)
        span = np.maximum(factor * high + j, 0) - np.minimum(factor * low + j, 0)
        error = np.abs(ratios - j / factor)
        better = (span <= _LARGEST) & (error < errors)
        errors[better], shifts[better], factors[better] = error[better], j[better], factor
    scales = np.divide(steps, factors, out=np.zeros_like(steps), where=factors != 0)
    return scales, shifts, factors


def _rounded(values: Floats) -> tuple[Floats, Floats, Floats]:
    """Return codes [n, size], scales [n] and zero points [n] of the nearest of 256 levels from zero to the
    extremes.
    """
    bottom, top = np.minimum(values.min(axis=1), 0), np.maximum(values.max(axis=1), 0)
    scales = (top - bottom) / np.float32(_LARGEST)
    inverse = np.divide(np.float32(1), scales, out=np.zeros_like(scales), where=scales != 0)
    zero_points = np.rint(-bottom * inverse)
    codes = np.clip(np.rint(values * inverse[:, None]) + zero_points[:, None], 0, _LARGEST)
    return codes, scales, zero_points
