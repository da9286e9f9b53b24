"""Top-k, top-p, min-p and typical-p, exactly, on the candidates of each row.

Two forms of the same rules. Few candidates: rows are put under each other, sorted, and share every operation.
Many: a row by itself, where only the bin at a filter's edge is sorted. Which form a row gets depends on its
own candidates alone, and every sum runs from left to right along its own row, so that its bits do not depend
on the rows beside it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from llorch_serve.sampling.candidates import Candidates, weights_of
from llorch_serve.sampling.params import ResolvedSampling
from llorch_serve.sampling.selection import FloatArray, IdArray, Values, fewest_reaching

FEW: Final = 1024
"""Candidates up to which a row is sorted."""


@dataclass(frozen=True, slots=True)
class Table:
    """What may be drawn of several rows: ids and float64 weights [rows, width]; what may not be drawn weighs
    0.
    """

    ids: IdArray
    weights: Values


def filter_few(rows: Sequence[Candidates], params: Sequence[ResolvedSampling]) -> Table:
    """Return what is left of rows of at most FEW candidates each, the likeliest first, of equals the lower
    id.
    """
    width = max(map(len, rows))
    scores = np.full((len(rows), width), -np.inf)
    ids = np.zeros((len(rows), width), dtype=np.int64)
    for index, row in enumerate(rows):
        assert row.ids is not None
        scores[index, : len(row)] = row.scores
        ids[index, : len(row)] = row.ids
    order = np.argsort(-scores, axis=1, kind="stable")
    scores, ids = np.take_along_axis(scores, order, axis=1), np.take_along_axis(ids, order, axis=1)
    temperatures = _column([p.temperature for p in params])
    with np.errstate(over="ignore"):  # infinitely far is right
        distance = (scores[:, :1] - scores) / temperatures
    weights = np.exp(-distance)
    if any(p.top_k for p in params):
        last = [min(p.top_k, width) - 1 if p.top_k else width - 1 for p in params]
        weights[scores < scores[np.arange(len(rows)), last][:, None]] = 0
    if any(p.top_p < 1 for p in params):
        sums = weights.cumsum(axis=1)
        # What a row without top-p has to reach is out of reach.
        shares = _column([p.top_p if p.top_p < 1 else np.inf for p in params])
        target = shares * (sums[:, -1:] + _column([row.outside for row in rows]))
        weights[:, 1:][sums[:, :-1] >= target] = 0
    if any(p.min_p > 0 for p in params):
        weights[weights < _column([p.min_p for p in params])] = 0
    if any(p.typical_p < 1 for p in params):
        _keep_typical(weights, distance, _column([p.typical_p for p in params]))
    return Table(ids, weights)


def _keep_typical(weights: Values, distance: Values, mass: Values) -> None:
    """Set to 0 what typical-p leaves out. distance: -log of the weights before any filter; mass: [rows, 1].

    A token's surprise is its distance and a constant of the row, which the difference from the expected one
    is free of.
    """
    kept = weights > 0
    distance = np.where(kept, distance, 0)
    total = weights.cumsum(axis=1)[:, -1:]
    keys = np.abs(distance - (distance * weights).cumsum(axis=1)[:, -1:] / total)
    keys[~kept] = np.inf
    order = np.argsort(keys, axis=1, kind="stable")
    sums = np.take_along_axis(weights, order, axis=1).cumsum(axis=1)
    last = (sums < mass * total).sum(axis=1, keepdims=True).clip(max=weights.shape[1] - 1)
    limit = np.take_along_axis(np.take_along_axis(keys, order, axis=1), last, axis=1)
    weights[keys > np.where(mass < 1, limit, np.inf)] = 0


def filter_many(row: Candidates, params: ResolvedSampling) -> tuple[IdArray | None, FloatArray]:
    """Return what is left of a row of many candidates: ids, ascending (None: every token), and float32
    weights.
    """
    ids, scores = row.ids, row.scores
    weights = weights_of(scores, params.temperature)

    def keep(kept: IdArray) -> None:
        nonlocal ids, scores, weights
        ids, scores, weights = kept if ids is None else ids[kept], scores[kept], weights[kept]

    if params.top_p < 1:
        total = float(weights.sum(dtype=np.float64)) + row.outside
        keys = (scores.max() - scores).astype(np.float64)
        keep(fewest_reaching(keys, weights, params.top_p * total, with_ties=False))
    if params.min_p > 0:
        keep(np.flatnonzero(weights >= params.min_p))
    if params.typical_p < 1:
        keep(_typical(scores, weights, params))
    return ids, weights


def _typical(scores: FloatArray, weights: FloatArray, params: ResolvedSampling) -> IdArray:
    possible = None
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
