"""The hqq quantizer against the same splitting written out for one block, and its edge cases."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest

from llorch_export.quantize.half_quadratic import half_quadratic
from llorch_export.quantize.search import searched

Block = npt.NDArray[np.float32]


def random_blocks(rows: int, blocks: int, size: int, seed: int = 0) -> Block:
    return np.random.default_rng(seed).standard_t(4, (rows, blocks, size)).astype(np.float32)


def one_zero_point(block: npt.NDArray[np.float64], scale: float, top: int) -> int:
    """Alternate, in float64: shrink each error by |e|^(p-1) / beta, then take the mean of what makes the rest
    vanish.
    """
    zero, beta = -min(block.min(), 0) / scale, 10.0
    for _ in range(20):
        codes = [min(max(round(float(w / scale + zero)), 0), top) for w in block]
        wanted = []
        for w, q in zip(block, codes, strict=True):
            error = w / scale - (q - zero)
            outlier = np.sign(error) * max(abs(error) - abs(error) ** -0.3 / beta, 0) if error else 0.0
            wanted.append(q - (w / scale - outlier))
        zero = min(max(float(np.mean(wanted)), 0), top)
        beta *= 1.01
    return round(zero)


@pytest.mark.parametrize("bits", [4, 8])
def test_zero_points_are_those_of_the_splitting_written_out(bits: int) -> None:
    block = random_blocks(6, 5, 32)
    scale, zero = half_quadratic(block, bits, "float32")
    expected = [
        [one_zero_point(block[r, b].astype(np.float64), float(scale[r, b]), 2**bits - 1) for b in range(5)]
        for r in range(6)
    ]
    different = np.abs(zero - expected)
    assert different.max() <= 1
    assert (different > 0).mean() <= 0.05  # float32 rounds a code the other way now and then


def test_large_weights_are_cut_less_than_for_the_least_squares() -> None:
    block = random_blocks(64, 4, 64)

    def largest_error(scale: Block, zero: Block) -> float:
        codes = np.clip(np.rint(block / scale[..., None]) + zero[..., None], 0, 15)
        return float(np.abs(block - (codes - zero[..., None]) * scale[..., None]).max(axis=2).mean())

    least_squares = searched(block, 4, True, "float32")
    assert largest_error(*half_quadratic(block, 4, "float32")) < 0.9 * largest_error(*least_squares)


@pytest.mark.parametrize("factor", [1e-6, 64.0])
def test_the_size_of_the_weights_does_not_matter(factor: float) -> None:
    block = random_blocks(8, 2, 32)
    scale, zero = half_quadratic(block, 4, "float32")
    other, same = half_quadratic(block * np.float32(factor), 4, "float32")
    assert (zero == same).mean() > 0.95
    np.testing.assert_allclose(other, scale * factor, rtol=1e-5)


def test_blocks_of_one_value_or_sign_are_in_range() -> None:
    block = np.zeros((5, 1, 16), np.float32)
    block[1], block[2] = 3.0, -3.0
    block[3] = np.abs(random_blocks(1, 1, 16))
    block[4] = -block[3]
    scale, zero = half_quadratic(block, 4, "bfloat16")
    assert scale[0] == 0
    assert np.isfinite(scale).all()
    assert ((zero >= 0) & (zero <= 15) & (zero == np.rint(zero))).all()
    codes = np.clip(np.rint(block[1:3] / scale[1:3, :, None]) + zero[1:3, :, None], 0, 15)
    np.testing.assert_allclose((codes - zero[1:3, :, None]) * scale[1:3, :, None], block[1:3], rtol=0.01)
