"""Scale search keeps its promises: the layout, an error never above round-to-nearest's, scales as they are
stored.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as st_numpy

import llorch_export.quantize.search as search_module
from llorch_export.quantize.layout import Blocks, block_count, storable
from llorch_export.quantize.nearest import quantize_nearest
from llorch_export.quantize.search import quantize_search
from llorch_serve.artifact.manifest import ScaleType
from support.oracles.quantised_numpy import as_stored, dequantise, unpack, zero_points

Matrix = npt.NDArray[np.float32]


def drawn(rows: int, columns: int, seed: int = 0) -> Matrix:
    """Heavy-tailed, as trained weights are."""
    return np.random.default_rng(seed).standard_t(6, (rows, columns)).astype(np.float32)


def block_errors(weight: Matrix, blocks: Blocks, bits: int, block_size: int) -> npt.NDArray[np.float64]:
    """Return the squared error of each block, by the layout's definition."""
    columns = weight.shape[1]
    left = dequantise(blocks, bits=bits, columns=columns).astype(np.float64) - weight
    padding = block_count(columns, block_size) * block_size - columns
    squares = np.pad(left**2, ((0, 0), (0, padding)))
    return squares.reshape(len(weight), -1, block_size).sum(axis=2)


@pytest.mark.parametrize("scale_type", ["float32", "bfloat16"])
@pytest.mark.parametrize("affine", [False, True])
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize(("columns", "block_size"), [(16, 16), (72, 32), (88, 16), (300, 128)])
def test_no_block_is_worse_than_rounded_to_nearest(
    columns: int, block_size: int, bits: int, affine: bool, scale_type: ScaleType
) -> None:
    weight = drawn(40, columns)
    nearest = quantize_nearest(weight, bits=bits, block_size=block_size, scale_type=scale_type)
    found = quantize_search(
        weight, bits=bits, block_size=block_size, zero_points=affine, scale_type=scale_type
    )
    blocks = block_count(columns, block_size)
    assert found.packed.shape == (40, blocks, block_size * bits // 8)
    assert found.scales.shape == (40, blocks)
    if affine:
        assert found.zero_points is not None
        assert found.zero_points.shape == (40, -(-blocks * bits // 8))
    else:
        assert found.zero_points is None
    before = block_errors(weight, nearest, bits, block_size)
    after = block_errors(weight, found, bits, block_size)
    assert (after <= before * (1 + 1e-3) + 1e-12).all()


@pytest.mark.parametrize(("affine", "share"), [(False, 0.95), (True, 0.75)])
@pytest.mark.parametrize("block_size", [16, 32, 64])
def test_search_takes_away_a_share_of_the_error(block_size: int, affine: bool, share: float) -> None:
    weight = drawn(200, 256)
    nearest = quantize_nearest(weight, bits=4, block_size=block_size)
    found = quantize_search(weight, bits=4, block_size=block_size, zero_points=affine)
    errors = [block_errors(weight, blocks, 4, block_size).sum() for blocks in (nearest, found)]
    assert errors[1] < share * errors[0]


@pytest.mark.parametrize("bits", [4, 8])
def test_codes_are_the_nearest_for_the_scale_and_zero_point(bits: int) -> None:
    weight = drawn(30, 64)
    found = quantize_search(weight, bits=bits, block_size=32, zero_points=True)
    scales = found.scales.astype(np.float64)[..., None]
    zero = zero_points(found, bits)[..., None]
    wanted = np.clip(np.rint(weight.reshape(30, 2, 32) / scales) + zero, 0, 2**bits - 1)
    # A quotient within a rounding error of a half may go either way.
    assert (np.abs(unpack(found.packed, bits) - wanted) <= 1).all()
    assert (unpack(found.packed, bits) != wanted).mean() < 1e-3


def test_an_affine_grid_is_found_again() -> None:
    """Weights that lie on a 4-bit grid off the middle, as dequantised Q4_1 does, come back nearly as they
    were.
    """
    rng = np.random.default_rng(3)
    codes = rng.integers(0, 16, (20, 4, 32))
    codes[..., 0], codes[..., 1] = 0, 15
    zero = rng.integers(2, 14, (20, 4, 1))
    weight = ((codes - zero) * rng.uniform(0.01, 0.1, (20, 4, 1))).astype(np.float32).reshape(20, 128)
    found = quantize_search(weight, bits=4, block_size=32, zero_points=True)
    np.testing.assert_allclose(dequantise(found, bits=4, columns=128), weight, atol=1e-6)


@pytest.mark.parametrize("affine", [False, True])
@pytest.mark.parametrize("value", [0.0, 1.0, -3.7e-3])
def test_constant_blocks_and_padding_are_met(affine: bool, value: float) -> None:
    weight = np.full((3, 72), value, np.float32)
    found = quantize_search(weight, bits=4, block_size=32, zero_points=affine)
    np.testing.assert_allclose(dequantise(found, bits=4, columns=72), weight, rtol=1e-6)
    assert not dequantise(found, bits=4, columns=96)[:, 72:].any()


@pytest.mark.parametrize("chunk", [1, 100, 1000])
def test_the_result_does_not_depend_on_the_chunk(monkeypatch: pytest.MonkeyPatch, chunk: int) -> None:
    weight = drawn(37, 72)
    whole = quantize_search(weight, bits=4, block_size=16, zero_points=True)
    monkeypatch.setattr(search_module, "_CHUNK_ELEMENTS", chunk)
    parts = quantize_search(weight, bits=4, block_size=16, zero_points=True)
    for found, expected in zip(parts.arrays, whole.arrays, strict=True):
        np.testing.assert_array_equal(found, expected)


@given(scale=st.floats(-(2.0**99), 2.0**99, width=32))
def test_stored_scales_are_rounded_as_the_type_does(scale: float) -> None:
    for scale_type in ("float32", "bfloat16"):
        (found,) = storable(np.array([scale], np.float32), scale_type)
        expected = as_stored(scale, scale_type)
        assert found == (expected if abs(expected) >= np.finfo(np.float32).tiny else 0)


@settings(max_examples=60, deadline=None)
@given(
    weight=st_numpy.arrays(
        np.float32,
        st.tuples(st.integers(1, 4), st.integers(1, 70)),
        elements=st.floats(-(2.0**50), 2.0**50, width=32),
    ),
    affine=st.booleans(),
)
def test_any_finite_matrix_comes_back_finite_and_no_worse(weight: Matrix, affine: bool) -> None:
    columns = weight.shape[1]
    found = quantize_search(weight, bits=4, block_size=16, zero_points=affine, scale_type="bfloat16")
    nearest = quantize_nearest(weight, bits=4, block_size=16, scale_type="bfloat16")
    assert np.isfinite(dequantise(found, bits=4, columns=columns)).all()
    before, after = (block_errors(weight, blocks, 4, 16) for blocks in (nearest, found))
    assert (after <= before * (1 + 1e-3) + 1e-30).all()
