"""Cosine and sine tables of rotary position embedding (Su et al. 2021), with the scalings that checkpoints
use.

The arithmetic follows transformers, the reference: inverse frequencies and angles in float32. Cosine and sine
of the rounded angle are then taken in float64 and rounded once.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Final

import numpy as np
import numpy.typing as npt

from llorch_serve.artifact.manifest import LlamaConfig, RopeConfig

MAX_TABLE_BYTES: Final = 2**30
"""Of both tables together: four million positions of a head of 64, two of 128. A worker holds them beside the
weights.
"""

_CHUNK_ANGLES: Final = 2**19  # their cosines and sines with all temporaries take 20 MiB


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> npt.NDArray[np.float32]:
    """Return the angular step per position of each rotary pair, [rotary_dim / 2].

    For longrope those of short sequences, for dynamic the plain ones: see :attr:`RopeConfig.exact_positions`.
    """
    rotary_dim = head_dim if rope.rotary_dim is None else rope.rotary_dim
    exponents = np.arange(0, rotary_dim, 2, dtype=np.float32) / np.float32(rotary_dim)
    periods = np.power(np.float32(rope.theta), exponents).astype(np.float32)
    inverse: npt.NDArray[np.float32] = (1 / periods).astype(np.float32)
    if rope.kind == "linear":
        assert rope.factor is not None
        return (inverse / np.float32(rope.factor)).astype(np.float32)
    if rope.kind == "llama3":
        return _llama3(rope, inverse)
    if rope.kind == "yarn":
        return _yarn(rope, periods)
    if rope.kind == "longrope":
        assert rope.short_factor is not None
        inverse = (1 / (np.array(rope.short_factor, np.float32) * periods)).astype(np.float32)
    if rope.kind == "factors":
        assert rope.frequency_factors is not None
        return (inverse / np.array(rope.frequency_factors, np.float32)).astype(np.float32)
    return inverse


def _yarn(rope: RopeConfig, periods: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """YaRN (Peng et al. 2023): pairs that turn often over the original context are kept, slow ones are
    stretched.

    periods: positions per radian of each pair, [rotary_dim / 2].
    """
    assert rope.factor is not None
    assert rope.beta_fast is not None
    assert rope.beta_slow is not None
    assert rope.original_max_position_embeddings is not None
    original, rotary_dim = rope.original_max_position_embeddings, 2 * len(periods)

    def pair_that_turns(turns: float) -> float:
        return rotary_dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))

    first, last = pair_that_turns(rope.beta_fast), pair_that_turns(rope.beta_slow)
    if rope.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, rotary_dim - 1)
    if first == last:
        last += 0.001  # a ramp of no length would divide by zero; the reference widens it by as much
    ramp = np.arange(len(periods), dtype=np.float32) - np.float32(first)
    stretched = np.clip(ramp / np.float32(last - first), 0, 1)
    slow = 1 / (np.float32(rope.factor) * periods)
    result: npt.NDArray[np.float32] = (slow * stretched + (1 / periods) * (1 - stretched)).astype(np.float32)
    return result


def _llama3(rope: RopeConfig, inverse: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """Llama 3.1: long wavelengths are stretched by ``factor``, short ones kept, those between
    interpolated.
    """
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
    rope: RopeConfig, head_dim: int, positions: int, *, start: int = 0
) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]:
    """Return cosine and sine at ``start`` to ``positions`` (excluded), [rows, rotary_dim / 2] each, scaled by
    the attention factor.
    """
    rows = np.arange(start, positions).astype(np.float32)
    angles = rows[:, None] * inverse_frequencies(rope, head_dim)[None, :]
    wide, scale = angles.astype(np.float64), rope.attention_factor
    return (np.cos(wide) * scale).astype(np.float32), (np.sin(wide) * scale).astype(np.float32)


def table_chunks(
    rope: RopeConfig, head_dim: int, positions: int
) -> Iterator[tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]]:
    """Give :func:`rotary_tables` of all positions in chunks of rows."""
    rotary_dim = head_dim if rope.rotary_dim is None else rope.rotary_dim
    step = max(1, _CHUNK_ANGLES // (rotary_dim // 2))
    for start in range(0, positions, step):
        yield rotary_tables(rope, head_dim, min(start + step, positions), start=start)


def table_bytes(config: LlamaConfig, positions: int) -> int:
    """Return the bytes of all tables in float32."""
    return 2 * positions * (config.rotary_dim // 2) * 4 * len(config.ropes)
