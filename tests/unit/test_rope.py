"""Rotary tables for every scaling, against the definition in float64 and published constants."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from llorch_export.graph import rope
from llorch_export.graph.rope import inverse_frequencies, rotary_tables, table_chunks
from llorch_serve.artifact.manifest import RopeConfig
from support.builders.checkpoints import llama3_frequency_factors, tiny_llama_config
from support.oracles import numpy_llama
from tolerances import ROTARY_TABLE

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
SCALINGS: dict[str, dict[str, Any]] = {
    "default": {},
    "theta": {"rope_theta": 500000.0},
    "linear": {"rope_scaling": {"rope_type": "linear", "factor": 4.0}},
    "llama3": {"rope_scaling": LLAMA3},
    "llama3 and theta": {"rope_theta": 500000.0, "rope_scaling": {**LLAMA3, "factor": 32.0}},
}


@pytest.mark.parametrize("head_dim", [16, 64, 128])
@pytest.mark.parametrize("name", SCALINGS)
def test_frequencies_follow_the_definition(name: str, head_dim: int) -> None:
    overrides = {"head_dim": head_dim, **SCALINGS[name]}
    config = tiny_llama_config(**overrides)
    expected = numpy_llama.inverse_frequencies(overrides, head_dim)
    np.testing.assert_allclose(inverse_frequencies(config.rope, head_dim), expected, rtol=1e-6)


@pytest.mark.parametrize("name", SCALINGS)
def test_tables_hold_cosine_and_sine_of_position_times_frequency(name: str) -> None:
    config = tiny_llama_config(**SCALINGS[name])
    angles = np.arange(128)[:, None] * numpy_llama.inverse_frequencies(SCALINGS[name], 16)
    cos, sin = rotary_tables(config.rope, 16, 128)
    assert cos.shape == sin.shape == (128, 8)
    assert cos.dtype == sin.dtype == np.float32
    np.testing.assert_allclose(cos, np.cos(angles), atol=ROTARY_TABLE)
    np.testing.assert_allclose(sin, np.sin(angles), atol=ROTARY_TABLE)


@pytest.mark.parametrize("name", SCALINGS)
def test_chunks_of_the_tables_hold_the_same_bits(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    config = tiny_llama_config(**SCALINGS[name])
    monkeypatch.setattr(rope, "_CHUNK_ANGLES", 8 * 7)
    chunks = list(table_chunks(config.rope, 16, 128))
    assert [len(cos) for cos, _ in chunks] == [7] * 18 + [2]
    for whole, parts in zip(rotary_tables(config.rope, 16, 128), zip(*chunks, strict=True), strict=True):
        assert np.concatenate(parts).tobytes() == whole.tobytes()


def test_positions_beyond_what_float32_holds_are_rounded_as_the_reference_rounds_them() -> None:
    config, start = RopeConfig(theta=10000.0), 2**24 - 1
    cos, _ = rotary_tables(config, 4, start + 4, start=start)
    angles = np.arange(start, start + 4).astype(np.float32)[:, None] * inverse_frequencies(config, 4)
    assert cos.tobytes() == np.cos(angles.astype(np.float64)).astype(np.float32).tobytes()


def test_position_zero_turns_nothing() -> None:
    cos, sin = rotary_tables(RopeConfig(theta=10000.0), 32, 1)
    assert cos.tolist() == [[1.0] * 16]
    assert sin.tolist() == [[0.0] * 16]


def test_llama3_has_three_ranges_and_each_is_reached() -> None:
    """Original 64: wavelengths below 16 stay, above 64 are stretched 8 times, those between are blended."""
    plain = 10000.0 ** (-np.arange(0, 16, 2) / 16)
    ratio = plain / inverse_frequencies(tiny_llama_config(rope_scaling=LLAMA3).rope, 16)
    wavelength = 2 * math.pi / plain
    np.testing.assert_allclose(ratio[wavelength < 16], 1, rtol=1e-6)
    np.testing.assert_allclose(ratio[wavelength > 64], 8, rtol=1e-6)
    between = ratio[(wavelength >= 16) & (wavelength <= 64)]
    assert between.size
    assert ((between > 1.01) & (between < 7.99)).all()


def test_frequency_factors_of_a_gguf_divide_pair_by_pair() -> None:
    config = tiny_llama_config(rope_scaling=LLAMA3)
    factors = tuple(float(f) for f in llama3_frequency_factors(config))
    by_factors = inverse_frequencies(RopeConfig(theta=10000.0, kind="factors", frequency_factors=factors), 16)
    np.testing.assert_allclose(by_factors, inverse_frequencies(config.rope, 16), rtol=1e-6)
