"""Bases are orthogonal and flat at any size; lazy tensors compute what matrices in numpy do, in any
chunks.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest

from llorch_export.checkpoint import base
from llorch_export.checkpoint.base import LazyTensor
from llorch_export.transform.basis import Basis, plain_basis, random_basis
from llorch_export.transform.lazy import (
    balance,
    constant,
    rotated_columns,
    rotated_rows,
    scaled_columns,
    scaled_rows,
)
from llorch_serve.errors import ArtifactError

SIZES = [1, 2, 3, 8, 24, 40, 64, 72, 96, 128, 576]


def matrix(basis: Basis) -> npt.NDArray[np.float64]:
    return basis.rotated(np.eye(basis.size))


def stored(array: npt.NDArray[np.float64], reads: list[tuple[int, int]] | None = None) -> LazyTensor:
    """Return a lazy tensor over an array, which notes the rows that are read."""

    def load(start: int, stop: int) -> npt.NDArray[np.float32]:
        if reads is not None:
            reads.append((start, stop))
        return array[start:stop].astype(np.float32)

    return LazyTensor(
        "w", array.shape, "F32", load, read_blocks=lambda start, stop: np.zeros((1, 1), np.uint8)
    )


@pytest.mark.parametrize("size", SIZES)
def test_a_basis_is_orthogonal_and_restores_what_it_rotates(size: int) -> None:
    for basis in (plain_basis(size), random_basis(size, 3)):
        q = matrix(basis)
        np.testing.assert_allclose(q @ q.T, np.eye(size), atol=1e-12)
        x = np.random.default_rng(0).standard_normal((2, 5, size))
        np.testing.assert_allclose(basis.rotated(x), x @ q, atol=1e-12)
        np.testing.assert_allclose(basis.restored(basis.rotated(x)), x, atol=1e-12)


@pytest.mark.parametrize("size", [64, 128, 576, 1536])
def test_a_single_channel_is_spread_over_all(size: int) -> None:
    assert np.abs(matrix(plain_basis(size))).max() <= np.sqrt(2 / size) * 1.0001


def test_a_seed_names_one_basis() -> None:
    one, again, other = (matrix(random_basis(64, seed)) for seed in (0, 0, 1))
    np.testing.assert_array_equal(one, again)
    assert np.abs(one - other).max() > 0.1
    assert 16 < (random_basis(64, 0).signs > 0).sum() < 48


def test_a_plain_basis_of_a_power_of_two_is_hadamards() -> None:
    two = np.array([[1, 1], [1, -1]])
    np.testing.assert_allclose(matrix(plain_basis(4)), np.kron(two, two) / 2)


def test_an_odd_part_that_is_too_large_is_refused() -> None:
    with pytest.raises(ArtifactError, match="size 2050 needs a dense matrix of size 1025"):
        plain_basis(2050)


@pytest.mark.parametrize("chunk", [1, 7, 2**21])
def test_lazy_tensors_compute_what_numpy_does(chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(base, "CHUNK_ELEMENTS", chunk)
    rng = np.random.default_rng(0)
    w, bias = rng.standard_normal((24, 12)), rng.standard_normal(24)
    tall, wide, small = rng.standard_normal(24), rng.standard_normal(12), random_basis(6, 1)
    whole, heads = random_basis(24, 2), random_basis(8, 3)
    blocks = np.kron(np.eye(2), matrix(small)), np.kron(np.eye(3), matrix(heads))
    cases = [
        (scaled_rows(stored(w), constant(tall)), tall[:, None] * w),
        (scaled_rows(stored(bias), constant(tall)), tall * bias),
        (scaled_columns(stored(w), constant(wide)), w * wide),
        (rotated_columns(stored(w), small), w @ blocks[0]),
        (rotated_rows(stored(w), heads), blocks[1].T @ w),
        (rotated_rows(stored(w), whole), matrix(whole).T @ w),
        (rotated_rows(stored(bias), heads), bias @ blocks[1]),
        (rotated_rows(stored(bias), whole), bias @ matrix(whole)),
    ]
    for tensor, expected in cases:
        np.testing.assert_allclose(np.concatenate(list(tensor.row_chunks())), expected, atol=1e-5)
        np.testing.assert_allclose(tensor.load_rows(5, 14), expected[5:14], atol=1e-5)
        assert tensor.read_blocks is None, "stored blocks are those of the old weights"


def test_a_matrix_that_is_turned_as_a_whole_is_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """And heads are read no further than the chunk's own."""
    monkeypatch.setattr(base, "CHUNK_ELEMENTS", 12)
    reads: list[tuple[int, int]] = []
    w = np.ones((24, 12))
    list(rotated_rows(stored(w, reads), random_basis(24, 0)).row_chunks())
    assert reads == [(row, row + 1) for row in range(24)]
    reads.clear()
    rotated_rows(stored(w, reads), random_basis(8, 0)).load_rows(9, 11)
    assert reads == [(8, 16)]


def test_scales_are_even_about_one_and_bounded() -> None:
    found = balance(np.array([1.0, 4.0, 2.0, 0.0]))
    np.testing.assert_allclose(found, [0.5, 2.0, 1.0, 1.0])
    assert balance(np.array([1e-30, 1e30])).tolist() == [2.0**-10, 2.0**10]
    assert balance(np.zeros(3)).tolist() == [1, 1, 1]


def test_the_last_bits_of_what_was_measured_do_not_count() -> None:
    measured = np.random.default_rng(0).uniform(0.1, 10, 50)
    np.testing.assert_array_equal(balance(measured), balance(measured * (1 + 1e-7)))
