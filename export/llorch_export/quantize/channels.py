"""Whole rows of a weight matrix on one grid: signed 8-bit codes and a scale for each output.

Integer kernels add up a whole row before they scale, so unlike blocks a row cannot have several scales.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

from llorch_export.quantize.layout import Matrix, reciprocal, row_chunks, storable

LARGEST: Final = 127
"""Codes are symmetric, -127 to 127: the grid needs no zero point."""

_CHUNK_ELEMENTS: Final = 2**21  # temporaries stay near 8 MiB each, whatever the matrix

Codes = npt.NDArray[np.int8]


def quantize_channels(weight: Matrix) -> tuple[Codes, Matrix]:
    """Quantise ``weight`` [rows, K], round to nearest; return codes [rows, K] and scales [rows].

    A row's largest magnitude falls on 127. A row too small to have a scale is all zeros.
    """
    rows, columns = weight.shape
    codes = np.empty((rows, columns), np.int8)
    scales = np.empty(rows, np.float32)
    for part in row_chunks(rows, columns, _CHUNK_ELEMENTS):
        found = storable(np.abs(weight[part]).max(axis=1) / np.float32(LARGEST), "float32")
        rounded = weight[part] * reciprocal(found)[:, None]
        np.rint(rounded, out=rounded)
        np.clip(rounded, -LARGEST, LARGEST, out=rounded)
        codes[part], scales[part] = rounded, found
    return codes, scales
