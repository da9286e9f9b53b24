"""Tables of sixteen values that 4-bit codes of bitsandbytes stand for, and whole numbers that come near them.

The runtime multiplies whole numbers with scales alone. NF4 and FP4 are no whole numbers of any step that
8 bits hold, so a step is chosen by which the table is closest.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

# QLoRA (arXiv 2305.14314), appendix E: quantiles of the normal distribution, scaled to end at 1.
_NF4: Final = (
    -1.0,
    -0.6961928009986877,
    -0.5250730514526367,
    -0.39491748809814453,
    -0.28444138169288635,
    -0.18477343022823334,
    -0.09105003625154495,
    0.0,
    0.07958029955625534,
    0.16093020141124725,
    0.24611230194568634,
    0.33791524171829224,
    0.44070982933044434,
    0.5626170039176941,
    0.7229568362236023,
    1.0,
)
# A sign, two bits of exponent and one of mantissa, divided by the largest, 12; the smallest is not zero.
_FP4_POSITIVE: Final = (0.0, 0.0625 / 12, 8 / 12, 12 / 12, 4 / 12, 6 / 12, 2 / 12, 3 / 12)

TABLES: Final = {"nf4": _NF4, "fp4": (*_FP4_POSITIVE, *(-value for value in _FP4_POSITIVE))}
"""By bitsandbytes' name of the table; the position is the code."""

_MIDDLE: Final = 128


@dataclass(frozen=True, slots=True)
class NearestCodes:
    """Codes of 8 bits around 128 for each of sixteen values: ``step * (codes - 128)`` comes near them.

    codes: uint8 [16]. values: float32 [16], the table over ``step``. rounding: the largest difference, where
        the largest value is 1.
    """

    codes: npt.NDArray[np.uint8]
    values: npt.NDArray[np.float32]
    step: float
    rounding: float


@functools.cache
def nearest_codes(table: str) -> NearestCodes:
    """Return the codes whose squared differences from the table have the smallest sum."""
    values = np.array(TABLES[table], np.float64)
    best = NearestCodes(np.zeros(16, np.uint8), np.zeros(16, np.float32), 1.0, np.inf)
    least = np.inf
    for levels in np.arange(64, 127, 0.25):
        numbers = np.rint(values * levels)
        step = float(numbers @ values / (numbers @ numbers))
        differences = numbers * step - values
        if (total := float(differences @ differences)) < least:
            codes = (numbers + _MIDDLE).astype(np.uint8)
            exact = (values / step).astype(np.float32)
            least, best = total, NearestCodes(codes, exact, step, float(np.abs(differences).max()))
    return best
