"""Round to nearest follows its definition, whatever the matrix."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as st_numpy

import llorch_export.quantize.nearest as nearest_module
from llorch_export.quantize.layout import Blocks, block_count
from llorch_export.quantize.nearest import quantize_nearest
from llorch_export.recipes.storage_defaults import BLOCK_SIZES
from support.oracles.quantised_numpy import dequantise as dequantise_blocks
from support.oracles.quantised_numpy import unpack

Matrix = npt.NDArray[np.float32]


def quantize_blocks(weight: Matrix, *, bits: int, block_size: int) -> tuple[npt.NDArray[np.uint8], Matrix]:
    blocks = quantize_nearest(weight, bits=bits, block_size=block_size)
    assert blocks.zero_points is None
    assert blocks.scales.dtype == np.float32
    return blocks.packed, blocks.scales.astype(np.float32)


def dequantise(packed: npt.NDArray[np.uint8], scales: Matrix, *, bits: int, columns: int) -> Matrix:
    return dequantise_blocks(Blocks(packed, scales, None), bits=bits, columns=columns)


def drawn(rows: int, columns: int, seed: int = 0) -> Matrix:
    return np.random.default_rng(seed).standard_normal((rows, columns)).astype(np.float32)


def test_a_block_worked_out_by_hand() -> None:
    """Largest magnitude -8 gets code 0 and scale 1; the low nibble holds the earlier value."""
    row = np.array([[-8, 7, 1, -1] + [0] * 12], np.float32)
    packed, scales = quantize_blocks(row, bits=4, block_size=16)
    assert scales.tolist() == [[1.0]]
    assert packed[0, 0].tolist() == [0x0 | 0xF << 4, 0x9 | 0x7 << 4] + [0x88] * 6


def test_a_positive_extreme_gives_a_negative_scale_and_is_met_exactly() -> None:
    row = np.array([[12, -3, 6, 0] + [0] * 12], np.float32)
    packed, scales = quantize_blocks(row, bits=4, block_size=16)
    assert scales.tolist() == [[-1.5]]
    assert unpack(packed, 4)[0, 0, :4].tolist() == [0, 10, 4, 8]
    assert dequantise(packed, scales, bits=4, columns=16)[0, :4].tolist() == [12.0, -3.0, 6.0, 0.0]


def test_8_bit_codes_take_a_byte_each() -> None:
    row = np.array([[-128, 127, 0, 1] + [0] * 12], np.float32)
    packed, scales = quantize_blocks(row, bits=8, block_size=16)
    assert packed[0, 0, :4].tolist() == [0, 255, 128, 129]
    assert scales.tolist() == [[1.0]]


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("block_size", BLOCK_SIZES)
@pytest.mark.parametrize("columns", [16, 72, 88, 256, 300])
def test_error_is_at_most_half_a_step(bits: int, block_size: int, columns: int) -> None:
    """Only the far end of the range, which has no code, may be off by up to a whole step."""
    weight = drawn(9, columns)
    packed, scales = quantize_blocks(weight, bits=bits, block_size=block_size)
    blocks = block_count(columns, block_size)
    assert packed.shape == (9, blocks, block_size * bits // 8)
    assert scales.shape == (9, blocks)
    codes = unpack(packed, bits).reshape(9, -1)[:, :columns]
    step = np.abs(np.repeat(scales, block_size, axis=1)[:, :columns])
    error = np.abs(dequantise(packed, scales, bits=bits, columns=columns) - weight)
    allowed = np.where(codes == 2**bits - 1, step, step / 2) * (1 + 1e-5)
    assert (error <= allowed).all()
    wanted = (
        weight / np.repeat(scales, block_size, axis=1)[:, :columns]
    )  # in steps; beyond the last code is clipped
    assert (wanted[(codes == 2**bits - 1) & (error > step / 2 * (1 + 1e-5))] > 2 ** (bits - 1) - 1).all()


@pytest.mark.parametrize("bits", [4, 8])
def test_the_scale_is_that_of_the_largest_magnitude_with_opposite_sign(bits: int) -> None:
    weight = drawn(50, 64)
    packed, scales = quantize_blocks(weight, bits=bits, block_size=32)
    blocks = weight.reshape(50, 2, 32)
    where = np.abs(blocks).argmax(axis=2)[..., None]
    extreme = np.take_along_axis(blocks, where, axis=2)[..., 0]
    np.testing.assert_array_equal(scales, -extreme / 2 ** (bits - 1))
    assert (np.take_along_axis(unpack(packed, bits), where, axis=2) == 0).all()


@pytest.mark.parametrize("bits", [4, 8])
def test_zero_blocks_stay_zero(bits: int) -> None:
    weight = drawn(3, 96)
    weight[:, 32:64] = 0
    packed, scales = quantize_blocks(weight, bits=bits, block_size=32)
    assert not dequantise(packed, scales, bits=bits, columns=96)[:, 32:64].any()
    assert not scales[:, 1].any()


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("value", [1.0, -1.0, 3.7e-3, -6e4])
def test_constant_blocks_are_exact(bits: int, value: float) -> None:
    weight = np.full((2, 64), value, np.float32)
    packed, scales = quantize_blocks(weight, bits=bits, block_size=32)
    np.testing.assert_allclose(dequantise(packed, scales, bits=bits, columns=64), weight, rtol=1e-7)


@pytest.mark.parametrize("bits", [4, 8])
def test_padding_dequantises_to_zero(bits: int) -> None:
    packed, scales = quantize_blocks(drawn(5, 72) + 3, bits=bits, block_size=32)
    assert not dequantise(packed, scales, bits=bits, columns=96)[:, 72:].any()


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("chunk", [1, 100, 1000])
def test_the_result_does_not_depend_on_the_chunk(
    monkeypatch: pytest.MonkeyPatch, bits: int, chunk: int
) -> None:
    weight = drawn(37, 72)
    whole = quantize_blocks(weight, bits=bits, block_size=16)
    monkeypatch.setattr(nearest_module, "_CHUNK_ELEMENTS", chunk)
    parts = quantize_blocks(weight, bits=bits, block_size=16)
    np.testing.assert_array_equal(parts[0], whole[0])
    np.testing.assert_array_equal(parts[1], whole[1])


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("magnitude", [1e-45, 1e-40, 1e-38, 1e-36])
def test_values_near_the_smallest_float_give_finite_weights(bits: int, magnitude: float) -> None:
    """A scale whose reciprocal overflows must not turn zeros into NaN or into the largest code."""
    weight = (drawn(2, 32) * np.float32(magnitude)).astype(np.float32)
    weight[:, 5] = 0
    packed, scales = quantize_blocks(weight, bits=bits, block_size=16)
    found = dequantise(packed, scales, bits=bits, columns=32)
    assert (found[:, 5] == 0).all()
    assert (np.abs(found - weight) <= max(2e-36, magnitude / 2)).all()


@settings(max_examples=60, deadline=None)
@given(
    weight=st_numpy.arrays(
        np.float32,
        st.tuples(st.integers(1, 4), st.integers(1, 70)),
        elements=st.floats(-(2.0**99), 2.0**99, width=32),
    ),
    bits=st.sampled_from([4, 8]),
    block_size=st.sampled_from([16, 32]),
)
def test_any_finite_matrix_comes_back_within_a_step(weight: Matrix, bits: int, block_size: int) -> None:
    packed, scales = quantize_blocks(weight, bits=bits, block_size=block_size)
    columns = weight.shape[1]
    found = dequantise(packed, scales, bits=bits, columns=columns)
    step = np.abs(np.repeat(scales, block_size, axis=1)[:, :columns])
    assert np.isfinite(found).all()
    assert (np.abs(found - weight) <= step * (1 + 1e-5) + 1e-35).all()
