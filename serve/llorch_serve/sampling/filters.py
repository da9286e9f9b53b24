"""Top-k, top-p, min-p and typical-p, exactly, on the candidates of each row: :data:`FILTERS`, at the end.

Two forms of the same rules. Few candidates: rows are put under each other, sorted, and share every operation.
Many: a row by itself, where only the bin at a filter's edge is sorted. Which form a row gets depends on its
own candidates alone, and every sum runs from left to right along its own row, so that its bits do not depend
on the other rows of the batch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from llorch_serve.sampling.candidates import Candidates, weights_of
from llorch_serve.sampling.params import ResolvedSampling
from llorch_serve.sampling.selection import FloatArray, IdArray, Values, fewest_reaching

FEW: Final = 1024
"""Candidates up to which a row is sorted."""


@dataclass(slots=True)
class Table:
    """What may be drawn of several rows, each sorted: the likeliest token first, of equals the lower id.

    All arrays are [rows, width]; what may not be drawn weighs 0.

    scores, ids: of the tokens, -inf and 0 beyond the end of a row.
    distance: how far a score is below the row's largest one, over the temperature.
    weights: exp(-distance); the likeliest token weighs 1.
    outside: [rows, 1], weight of the tokens left out that top-p counts all the same.
    """

    scores: Values
    ids: IdArray
    distance: Values
    weights: Values
    outside: Values


@dataclass(slots=True)
class Row:
    """What may be drawn of one row with many candidates.

    ids: ascending; None: every token. scores, weights: float32, one for each.
    outside: as in :class:`llorch_serve.sampling.candidates.Candidates`.
    """

    ids: IdArray | None
    scores: FloatArray
    weights: FloatArray
    outside: float

    def keep(self, kept: IdArray) -> None:
        """Leave out all but the tokens at these places."""
        self.ids = kept if self.ids is None else self.ids[kept]
        self.scores, self.weights = self.scores[kept], self.weights[kept]


@dataclass(frozen=True, slots=True)
class Filter:
    """One filter in its two forms.

    applies: whether a row's settings ask for it.
    few: set the weights of what it leaves out to 0, in a table of which at least one row asks for it.
    many: return the places of what it keeps in a row that asks for it; None: ``candidates.py`` has kept no
        other token.
    """

    applies: Callable[[ResolvedSampling], bool]
    few: Callable[[Table, Sequence[ResolvedSampling]], None]
    many: Callable[[Row, ResolvedSampling], IdArray] | None


def filter_few(rows: Sequence[Candidates], params: Sequence[ResolvedSampling]) -> Table:
    """Return what is left of rows of at most FEW candidates each."""
    table = _sorted(rows, params)
    for each in FILTERS:
        for asked in params:
            if each.applies(asked):
                each.few(table, params)
                break
    return table


def filter_many(candidates: Candidates, params: ResolvedSampling) -> tuple[IdArray | None, FloatArray]:
    """Return what is left of a row of many candidates: ids, ascending (None: every token), and float32
    weights.
    """
    weights = weights_of(candidates.scores, params.temperature)
    row = Row(candidates.ids, candidates.scores, weights, candidates.outside)
    for each in FILTERS:
        if each.many is not None and each.applies(params):
            row.keep(each.many(row, params))
    return row.ids, row.weights


def _sorted(rows: Sequence[Candidates], params: Sequence[ResolvedSampling]) -> Table:
    """Return rows of candidates under each other, none filtered yet."""
    width = max(map(len, rows))
    scores = np.full((len(rows), width), -np.inf)
    ids = np.zeros((len(rows), width), dtype=np.int64)
    for index, row in enumerate(rows):
        assert row.ids is not None
        scores[index, : len(row)] = row.scores
        ids[index, : len(row)] = row.ids
    order = np.argsort(-scores, axis=1, kind="stable")
    scores, ids = np.take_along_axis(scores, order, axis=1), np.take_along_axis(ids, order, axis=1)
    with np.errstate(over="ignore"):  # infinitely far is right
        distance = (scores[:, :1] - scores) / _column([p.temperature for p in params])
    return Table(scores, ids, distance, np.exp(-distance), _column([row.outside for row in rows]))


def _top_k_few(table: Table, params: Sequence[ResolvedSampling]) -> None:
    height, width = table.scores.shape
    last = [min(p.top_k, width) - 1 if p.top_k else width - 1 for p in params]
    table.weights[table.scores < table.scores[np.arange(height), last][:, None]] = 0


def _top_p_few(table: Table, params: Sequence[ResolvedSampling]) -> None:
    sums = table.weights.cumsum(axis=1)
    # What a row without top-p has to reach is out of reach.
    shares = _column([p.top_p if p.top_p < 1 else np.inf for p in params])
    target = shares * (sums[:, -1:] + table.outside)
    table.weights[:, 1:][sums[:, :-1] >= target] = 0


def _top_p_many(row: Row, params: ResolvedSampling) -> IdArray:
    total = float(row.weights.sum(dtype=np.float64)) + row.outside
    keys = (row.scores.max() - row.scores).astype(np.float64)
    return fewest_reaching(keys, row.weights, params.top_p * total, with_ties=False)


def _min_p_few(table: Table, params: Sequence[ResolvedSampling]) -> None:
    table.weights[table.weights < _column([p.min_p for p in params])] = 0


def _min_p_many(row: Row, params: ResolvedSampling) -> IdArray:
    return np.flatnonzero(row.weights >= params.min_p)


def _typical_p_few(table: Table, params: Sequence[ResolvedSampling]) -> None:
    # A token's surprise is its distance and a constant of the row, which the difference from the expected one
    # is free of.
    weights, mass = table.weights, _column([p.typical_p for p in params])
    kept = weights > 0
    distance = np.where(kept, table.distance, 0)
    total = weights.cumsum(axis=1)[:, -1:]
    keys = np.abs(distance - (distance * weights).cumsum(axis=1)[:, -1:] / total)
    keys[~kept] = np.inf
    order = np.argsort(keys, axis=1, kind="stable")
    sums = np.take_along_axis(weights, order, axis=1).cumsum(axis=1)
    last = (sums < mass * total).sum(axis=1, keepdims=True).clip(max=weights.shape[1] - 1)
    limit = np.take_along_axis(np.take_along_axis(keys, order, axis=1), last, axis=1)
    weights[keys > np.where(mass < 1, limit, np.inf)] = 0


def _typical_p_many(row: Row, params: ResolvedSampling) -> IdArray:
    possible, scores, weights = None, row.scores, row.weights
    if not weights.all():
        possible = np.flatnonzero(weights)
        scores, weights = scores[possible], weights[possible]
    # In place, since at this size every further array costs as much as what is computed in it.
    keys = scores.astype(np.float64)
    np.subtract(keys.max(), keys, out=keys)
    keys /= params.temperature
    total = float(weights.sum(dtype=np.float64))
    keys -= float((keys * weights).sum()) / total
    np.abs(keys, out=keys)
    kept = fewest_reaching(keys, weights, params.typical_p * total, with_ties=True)
    return kept if possible is None else possible[kept]


def _column(numbers: Sequence[float]) -> Values:
    return np.array(numbers, dtype=np.float64)[:, None]


FILTERS: Final = (
    Filter(lambda p: p.top_k > 0, _top_k_few, None),
    Filter(lambda p: p.top_p < 1, _top_p_few, _top_p_many),
    Filter(lambda p: p.min_p > 0, _min_p_few, _min_p_many),
    Filter(lambda p: p.typical_p < 1, _typical_p_few, _typical_p_many),
)
"""All of them, in the order in which they are applied."""
