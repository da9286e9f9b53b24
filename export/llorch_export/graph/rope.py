"""Cosine and sine tables of rotary position embedding (Su et al. 2021), with the scalings Llama checkpoints use.

The arithmetic follows transformers, the reference: inverse frequencies and angles in float32. Cosine and sine of
the rounded angle are then taken in float64 and rounded once.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from llorch_serve.manifest import RopeConfig


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> npt.NDArray[np.float32]:
    """Return the angular step per position of each rotary pair, [head_dim / 2]."""
    exponents = np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim)
    inverse: npt.NDArray[np.float32] = (1 / np.power(np.float32(rope.theta), exponents)).astype(np.float32)
    if rope.kind == "linear":
        assert rope.factor is not None
        return (inverse / np.float32(rope.factor)).astype(np.float32)
    if rope.kind == "llama3":
        return _llama3(rope, inverse)
    if rope.kind == "factors":
        assert rope.frequency_factors is not None
        return (inverse / np.array(rope.frequency_factors, np.float32)).astype(np.float32)
    return inverse


def _llama3(rope: RopeConfig, inverse: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """Llama 3.1: long wavelengths are stretched by ``factor``, short ones kept, those between interpolated."""
    assert rope.factor is not None
    assert rope.low_freq_factor is not None
    assert rope.high_freq_factor is not None
    assert rope.original_max_position_embeddings is not None
    original = rope.original_max_position_embeddings
    wavelength = 2 * math.pi / inverse
    stretched = inverse / np.float32(rope.factor)
    smooth = (original / wavelength - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    between = (1 - smooth) * stretched + smooth * inverse
    result = np.where(wavelength > original / rope.low_freq_factor, stretched, between)
    return np.where(wavelength < original / rope.high_freq_factor, inverse, result).astype(np.float32)


def rotary_tables(
    rope: RopeConfig, head_dim: int, positions: int
) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]:
    """Return cosine and sine tables, [positions, head_dim / 2] each."""
    angles = np.arange(positions, dtype=np.float32)[:, None] * inverse_frequencies(rope, head_dim)[None, :]
    wide = angles.astype(np.float64)
    return np.cos(wide).astype(np.float32), np.sin(wide).astype(np.float32)
