"""Error feedback against a plain loop in float64, and against round-to-nearest on correlated inputs."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import pytest

from llorch_export.quantize import threads
from llorch_export.quantize.error_factor import error_factor
from llorch_export.quantize.feedback import quantize_feedback
from llorch_export.quantize.layout import Blocks
from llorch_export.quantize.nearest import quantize_nearest
from llorch_export.quantize.search import quantize_search
from support.oracles.quantised_numpy import dequantise, unpack, zero_points

Matrix = npt.NDArray[np.float32]


def drawn(rows: int, columns: int, seed: int = 0) -> Matrix:
    return np.random.default_rng(seed).standard_t(6, (rows, columns)).astype(np.float32)


def moments_of(columns: int, *, rank: int, seed: int = 1) -> Matrix:
    """Of inputs that lie near ``rank`` directions, as activations do."""
    rng = np.random.default_rng(seed)
    inputs = rng.normal(size=(4000, rank)) @ rng.normal(size=(rank, columns)) + 0.1 * rng.normal(
        size=(4000, columns)
    )
    moments: Matrix = (inputs.T @ inputs / len(inputs)).astype(np.float32)
    return moments


def output_error(weight: Matrix, blocks: Blocks, moments: Matrix, bits: int = 4) -> float:
    """Return the mean squared error of the layer's outputs, by definition."""
    error = dequantise(blocks, bits=bits, columns=weight.shape[1]).astype(np.float64) - weight
    return float(np.einsum("ri,ij,rj->", error, moments.astype(np.float64), error) / len(weight))


@pytest.mark.parametrize(("columns", "block_size"), [(64, 16), (96, 32), (72, 32), (128, 64)])
def test_outputs_err_less_than_with_any_quantiser_that_sees_weights_alone(
    columns: int, block_size: int
) -> None:
    weight, moments = drawn(40, columns), moments_of(columns, rank=12)
    found = quantize_feedback(weight, error_factor(moments), bits=4, block_size=block_size)
    nearest = quantize_nearest(weight, bits=4, block_size=block_size)
    affine = quantize_search(weight, bits=4, block_size=block_size, zero_points=True)
    errors = [output_error(weight, blocks, moments) for blocks in (found, affine, nearest)]
    assert errors[0] < 0.5 * errors[1] < 0.5 * errors[2]


@pytest.mark.parametrize(("columns", "block_size"), [(64, 16), (96, 32), (72, 32), (128, 64)])
def test_blocks_of_8_bits_have_no_zero_points_and_err_less_than_rounded_to_nearest(
    columns: int, block_size: int
) -> None:
    weight, moments = drawn(40, columns), moments_of(columns, rank=12)
    how = {"bits": 8, "block_size": block_size}
    found = quantize_feedback(weight, error_factor(moments), zero_points=False, **how)
    nearest = quantize_nearest(weight, **how)
    assert found.zero_points is None
    assert found.packed.shape == nearest.packed.shape
    errors = [output_error(weight, blocks, moments, bits=8) for blocks in (found, nearest)]
    assert errors[0] < 0.5 * errors[1]


def test_8_bits_over_inputs_without_correlation_are_rounded_to_nearest() -> None:
    weight = drawn(30, 96)
    moments = np.diag(np.random.default_rng(2).uniform(0.1, 3, 96)).astype(np.float32)
    found = quantize_feedback(weight, error_factor(moments), bits=8, block_size=32, zero_points=False)
    for ours, theirs in zip(
        found.arrays, quantize_nearest(weight, bits=8, block_size=32).arrays, strict=True
    ):
        np.testing.assert_array_equal(ours, theirs)


def test_inputs_without_correlation_leave_the_search_as_it_is() -> None:
    weight = drawn(30, 96)
    moments = np.diag(np.random.default_rng(2).uniform(0.1, 3, 96)).astype(np.float32)
    found = quantize_feedback(weight, error_factor(moments), bits=4, block_size=32, scale_type="bfloat16")
    alone = quantize_search(weight, bits=4, block_size=32, zero_points=True, scale_type="bfloat16")
    for ours, theirs in zip(found.arrays, alone.arrays, strict=True):
        np.testing.assert_array_equal(ours, theirs)


def test_columns_are_rounded_as_a_plain_loop_does() -> None:
    """The loop knows the scales, and solves for the best change of the later columns at every step."""
    columns, block_size = 48, 16
    weight, moments = drawn(6, columns), moments_of(columns, rank=8)
    found = quantize_feedback(weight, error_factor(moments), bits=4, block_size=block_size)
    scales = np.repeat(found.scales.astype(np.float64), block_size, axis=1)
    zeros = np.repeat(zero_points(found, 4), block_size, axis=1)
    hessian = moments.astype(np.float64)
    hessian += 0.01 * np.trace(hessian) / columns * np.eye(columns)
    left = weight.astype(np.float64)
    codes = unpack(found.packed, 4).reshape(6, -1)
    for column in range(columns):
        wanted = np.rint(left[:, column] / scales[:, column]) + zeros[:, column]
        assert (
            codes[:, column] == np.clip(wanted, 0, 15)
        ).mean() > 0.8  # a quotient near a half may go either way
        error = (codes[:, column] - zeros[:, column]) * scales[:, column] - left[:, column]
        later = slice(column + 1, None)
        change = np.linalg.solve(hessian[later, later], np.outer(hessian[later, column], error))
        left[:, later] -= change.T


EDGES: dict[str, Callable[[], Matrix]] = {
    "zero": lambda: np.zeros((3, 64), np.float32),
    "constant": lambda: np.full((3, 64), -3.7e-3, np.float32),
    "negative": lambda: -np.abs(drawn(3, 64)),
    "tiny": lambda: np.full((3, 64), 1e-42, np.float32),
    "one outlier": lambda: (
        np.where(np.arange(64) == 5, np.float32(1e4), np.float32(1e-3)) * np.ones((3, 1), np.float32)
    ),
}


@pytest.mark.parametrize("edge", EDGES)
@pytest.mark.parametrize("silent", [False, True])
def test_edge_blocks_come_back_finite(edge: str, silent: bool) -> None:
    """silent: nothing went through the layer."""
    weight = EDGES[edge]()
    moments = np.zeros((64, 64), np.float32) if silent else moments_of(64, rank=8)
    found = quantize_feedback(weight, error_factor(moments), bits=4, block_size=32, scale_type="bfloat16")
    values = dequantise(found, bits=4, columns=64)
    assert np.isfinite(values).all()
    if edge in ("zero", "tiny"):
        np.testing.assert_allclose(values, 0, atol=1e-40)
    if silent:
        alone = quantize_search(weight, bits=4, block_size=32, zero_points=True, scale_type="bfloat16")
        np.testing.assert_array_equal(values, dequantise(alone, bits=4, columns=64))


def test_padding_stands_for_zero_and_rows_do_not_depend_on_each_other() -> None:
    weight, factor = drawn(20, 72), error_factor(moments_of(72, rank=9))
    whole = quantize_feedback(weight, factor, bits=4, block_size=32)
    assert not dequantise(whole, bits=4, columns=96)[:, 72:].any()
    part = quantize_feedback(weight[5:9], factor, bits=4, block_size=32)
    assert (part.packed == whole.packed[5:9]).mean() > 0.98  # sums of another shape, in another order


@pytest.mark.parametrize("size", [1, 40, 256, 257, 1300])  # panels of 256, parts of 1024
def test_the_factor_is_that_of_the_damped_inverse(size: int) -> None:
    moments = moments_of(size, rank=min(size, 5))
    damped = moments.astype(np.float64) + 0.01 * np.trace(moments, dtype=np.float64) / size * np.eye(size)
    expected = np.linalg.cholesky(np.linalg.inv(damped)).T
    found = error_factor(moments)
    assert not np.tril(found, -1).any()
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6 * expected.max())


def test_bits_do_not_depend_on_the_number_of_processors(monkeypatch: pytest.MonkeyPatch) -> None:
    moments, found = moments_of(1300, rank=9), set()
    for processors in (1, 2, 5):
        monkeypatch.setattr(threads, "usable_cpus", lambda processors=processors: processors)
        found.add(error_factor(moments).tobytes())
    assert len(found) == 1
