"""What adapters do to one tensor, computed as its rows are read.

A weight of a linear layer becomes ``W + scaling B A`` (Hu et al. 2021), its rows rescaled to stored lengths
where the adapter is a DoRA (Liu et al. 2024). Sums are taken in float64 and rounded to float32 once.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from llorch_export.checkpoint.base import CHUNK_ELEMENTS, LazyTensor
from llorch_export.checkpoint.stream import TensorRange, read_float32, read_rows, require_finite

_Values = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Product:
    """``factor * b a``, with a [rank, in] and b [out, rank], which is added to a weight [out, in].

    transposed: of an embedding, whose weight is [in, out].
    """

    a: TensorRange
    b: TensorRange
    factor: float
    transposed: bool = False

    def rows(self, start: int, stop: int) -> _Values:
        """Return rows of what is added."""
        if self.transposed:
            left = _columns(self.a, start, stop).T.astype(np.float64) * self.factor
            return left @ read_float32(self.b).astype(np.float64).T
        left = read_rows(self.b, start, stop).astype(np.float64) * self.factor
        return left @ read_float32(self.a).astype(np.float64)


@dataclass(frozen=True, slots=True)
class TokenRows:
    """Rows ``ids`` of an embedding or a head are those of ``values`` [ids, hidden]."""

    ids: tuple[int, ...]
    values: TensorRange


@dataclass(frozen=True, slots=True)
class Change:
    """What happens to a tensor, in the order of the fields.

    replaced: its own values. products: are added to a matrix. added: are added to a bias, each multiplied by
    its factor. magnitude: the length of each row, of an embedding of each column. tokens: single rows.
    """

    replaced: TensorRange | None = None
    products: tuple[Product, ...] = ()
    added: tuple[tuple[TensorRange, float], ...] = ()
    magnitude: TensorRange | None = None
    tokens: TokenRows | None = None

    @property
    def only_adds(self) -> bool:
        """Whether it is a sum, so that it can be weighted, and others added to it."""
        return self.replaced is None and self.magnitude is None and self.tokens is None

    def weighted(self, weight: float) -> Change:
        """Return the change, of which :attr:`only_adds` is true, times a number."""
        return replace(
            self,
            products=tuple(replace(p, factor=p.factor * weight) for p in self.products),
            added=tuple((source, factor * weight) for source, factor in self.added),
        )

    def followed_by(self, other: Change) -> Change:
        """Return both changes as one; at most one of the two does more than add."""
        first, second = (self, other) if other.only_adds else (other, self)
        assert second.only_adds
        return replace(
            first, products=(*first.products, *second.products), added=(*first.added, *second.added)
        )


def changed(base: LazyTensor, change: Change) -> LazyTensor:
    """Return the tensor with the change, which is computed as rows are read."""
    source = base if change.replaced is None else _stored(base.name, change.replaced)
    origin = _origin(change)
    columns = _column_factors(source, change)

    def load_rows(start: int, stop: int) -> npt.NDArray[np.float32]:
        if change.products or change.added or change.magnitude is not None:
            values = _rounded(
                _rescaled(_sum(source, change, start, stop), change, columns, start, stop), origin
            )
        else:
            values = source.load_rows(start, stop)
        return values if change.tokens is None else _with_tokens(values, change.tokens, start, stop)

    # A tensor of its own, not a copy with changes: nothing that reads the stored weights past load_rows may
    # survive.
    return LazyTensor(name=base.name, shape=source.shape, dtype="F32", load_rows=load_rows)


def _sum(source: LazyTensor, change: Change, start: int, stop: int) -> _Values:
    """Return rows of the weight with all that is added, before they are rescaled."""
    total: _Values = source.load_rows(start, stop).astype(np.float64)
    for product in reversed(change.products):
        total += product.rows(start, stop)
    for added, factor in change.added:
        total += read_rows(added, start, stop).astype(np.float64) * factor
    return total


def _rescaled(
    total: _Values, change: Change, columns: Callable[[], _Values] | None, start: int, stop: int
) -> _Values:
    if change.magnitude is None:
        return total
    with np.errstate(divide="ignore", invalid="ignore"):  # a row of zeros; reported as not finite
        if columns is not None:
            total *= columns()
        else:
            lengths = np.sqrt(np.square(total).sum(axis=1))
            total *= (read_rows(change.magnitude, start, stop).astype(np.float64) / lengths)[:, None]
    return total


def _column_factors(source: LazyTensor, change: Change) -> Callable[[], _Values] | None:
    """Return what the columns of an embedding are multiplied by, from its whole table, read once."""
    magnitude = change.magnitude
    if magnitude is None or not change.products[0].transposed:
        return None

    @functools.cache
    def factors() -> _Values:
        rows, width = source.shape
        step = max(1, CHUNK_ELEMENTS // width)
        squares = np.zeros(width)
        for start in range(0, rows, step):
            squares += np.square(_sum(source, change, start, min(start + step, rows))).sum(axis=0)
        with np.errstate(divide="ignore", invalid="ignore"):
            lengths: _Values = read_float32(magnitude).astype(np.float64) / np.sqrt(squares)
        return lengths

    return factors


def _rounded(values: _Values, origin: TensorRange) -> npt.NDArray[np.float32]:
    with np.errstate(over="ignore"):  # reported below, as an error instead of a warning
        result = values.astype(np.float32)
    require_finite(result, origin)
    return result


def _with_tokens(
    values: npt.NDArray[np.float32], tokens: TokenRows, start: int, stop: int
) -> npt.NDArray[np.float32]:
    result = values.copy()
    for row, token in enumerate(tokens.ids):
        if start <= token < stop:
            result[token - start] = read_rows(tokens.values, row, row + 1)[0]
    return result


def _stored(name: str, source: TensorRange) -> LazyTensor:
    return LazyTensor(name, source.shape, "F32", functools.partial(read_rows, source))


def _origin(change: Change) -> TensorRange:
    """Return a tensor of the adapter to name where the result is not finite."""
    added = [product.b for product in change.products] + [source for source, _ in change.added]
    whole = [change.replaced, change.magnitude, None if change.tokens is None else change.tokens.values]
    return next(source for source in (*added, *whole) if source is not None)


def _columns(source: TensorRange, start: int, stop: int) -> npt.NDArray[np.float32]:
    """Read columns of a matrix, which is stored row by row."""
    rows, width = source.shape
    size = source.codec.bytes
    parts = [
        replace(source, offset=source.offset + (row * width + start) * size, shape=(stop - start,))
        for row in range(rows)
    ]
    return np.stack([read_float32(part) for part in parts])
