"""Orthogonal bases of any size that spread each channel over all others, and cost little to apply.

A basis of size n is ``Q = diag(signs) (F1 x F2 x ...)``, a Kronecker product of small flat matrices:
Hadamard's for the powers of two in n, and for the odd rest the matrix of the discrete Hartley transform
(Bracewell 1983). Both are symmetric and orthogonal with entries of about equal size. Nothing of size n x n is
ever made.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from llorch_serve.errors import ArtifactError

_LARGEST_POWER: Final = 64  # factors of this size keep a product in the cache and the number of passes small
_LARGEST_ODD: Final = 1023

Array = npt.NDArray[np.float32]
Float64 = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True, eq=False)
class Basis:
    """An orthogonal matrix Q of ``size``, as its factors and signs of its rows [size]."""

    size: int
    signs: Float64
    factors: tuple[Float64, ...]

    def rotated(self, rows: npt.NDArray[np.floating]) -> Float64:
        """Return ``rows @ Q`` for rows [..., size]."""
        x = rows * self.signs
        right = self.size
        for factor in self.factors:
            count = len(factor)
            right //= count
            x = (
                x.reshape(-1, count) @ factor
                if right == 1
                else np.matmul(factor, x.reshape(-1, count, right))
            )
        return x.reshape(rows.shape)

    def restored(self, rows: npt.NDArray[np.floating]) -> Float64:
        """Return ``rows @ Q^T`` for rows [..., size]: what :meth:`rotated` has turned, turned back."""
        plain = Basis(
            self.size, np.ones(self.size), self.factors
        )  # the product of the factors is its own inverse
        return plain.rotated(rows) * self.signs


def random_basis(size: int, seed: int) -> Basis:
    """Return the basis with random signs, the same on every machine. Raises ArtifactError as
    :func:`plain_basis` does.
    """
    draws = np.random.PCG64(seed).random_raw(size)  # raw output is what numpy promises not to change
    return Basis(size, np.where(draws >> np.uint64(63), 1.0, -1.0), plain_basis(size).factors)


def plain_basis(size: int) -> Basis:
    """Return the basis without signs, which is symmetric. Raises ArtifactError if the odd part of ``size`` is
    too large.
    """
    odd, factors = size, []
    while odd % 2 == 0:
        odd //= 2
    if odd > _LARGEST_ODD:
        raise ArtifactError(
            f"a basis of size {size} needs a dense matrix of size {odd}, expected at most {_LARGEST_ODD}; "
            "export this model without rotate and hadamard"
        )
    power = size // odd
    while power > 1:
        part = min(power, _LARGEST_POWER)
        factors.append(_hadamard(part))
        power //= part
    if odd > 1 or not factors:
        factors.append(_hartley(odd))
    return Basis(size, np.ones(size), tuple(factors))


def _hadamard(size: int) -> Float64:
    """Return Sylvester's matrix over sqrt(size), made by doubling."""
    signs = np.ones((1, 1))
    while len(signs) < size:
        signs = np.block([[signs, signs], [signs, -signs]])
    return signs / math.sqrt(size)


def _hartley(size: int) -> Float64:
    """Return ``(cos + sin)(2 pi i j / size) / sqrt(size)``."""
    index = np.arange(size)
    angles = 2 * math.pi * (np.outer(index, index) % size) / size
    result: Float64 = (np.cos(angles) + np.sin(angles)) / math.sqrt(size)
    return result
