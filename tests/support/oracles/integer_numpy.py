"""Layers in per-channel int8 from their definition, in numpy: the oracle of rows rounded one by one.

Sums are of 64-bit integers, so they are exact; each float32 operation is the one that the graph's definition
names.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Matrix = npt.NDArray[np.float32]
Whole = npt.NDArray[np.int64]


def weight_codes(weight: Matrix) -> tuple[Whole, Matrix]:
    """Return codes [outputs, inputs], -127 to 127, and scales [outputs]."""
    scales = np.array([max(abs(float(v)) for v in row) for row in weight], np.float32) / np.float32(127)
    inverse = np.float32(1) / np.where(scales == 0, np.float32(1), scales)
    return np.rint(weight * inverse[:, None]).astype(np.int64), scales


def row_codes(x: Matrix) -> tuple[Whole, Matrix]:
    """Return codes like ``x`` [..., inputs], -127 to 127, and scales [..., 1]."""
    largest = np.maximum(np.abs(x).max(axis=-1, keepdims=True), np.float32(1e-30))
    scales = largest * np.float32(1 / 127)
    return np.rint(x / scales).astype(np.int64), scales


def quarter_product(x: Matrix, weight: Matrix) -> Matrix:
    """Return ``x W^T`` [..., outputs] where each quarter of a row has a scale of its own."""
    weights, weight_scales = weight_codes(weight)
    total: Matrix | None = None
    for part, columns in zip(np.split(x, 4, axis=-1), np.split(weights, 4, axis=1), strict=True):
        codes, scales = row_codes(part)
        product = (codes @ columns.T).astype(np.float32) * weight_scales * scales
        total = product if total is None else total + product
    assert total is not None
    return total


def row_product(x: Matrix, weight: Matrix) -> Matrix:
    """Return ``x W^T`` [..., outputs] as the layer computes it."""
    (codes, scales), (weights, weight_scales) = row_codes(x), weight_codes(weight)
    sums = (codes @ weights.T).astype(np.float32)
    product: Matrix = sums * weight_scales * scales
    return product
