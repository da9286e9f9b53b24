"""Which tokens of a row can still be drawn, before the exact filters look at them.

Top-k, top-p and min-p nearly always leave few of a vocabulary's tokens. Here a row's scores are looked at as
a whole, in a handful of passes at memory speed that sort nothing, and what no filter can keep is dropped. Row
by row: a row fits the processor's cache where a batch does not.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from llorch_serve.sampling.params import ResolvedSampling
from llorch_serve.sampling.selection import FloatArray, IdArray, at_least_kth

_TINY = float(np.finfo(np.float32).tiny)


@dataclass(frozen=True, slots=True)
class Candidates:
    """Tokens of one row that may be drawn.

    ids: ascending; None: every token.
    scores: float32, one for each.
    outside: weight of the tokens left out that top-p counts all the same; the likeliest token weighs 1.
    """

    ids: IdArray | None
    scores: FloatArray
    outside: float = 0.0

    def __len__(self) -> int:
        return len(self.scores)


def find_candidates(scores: FloatArray, params: ResolvedSampling) -> Candidates:
    """Return all tokens that the row's filters can keep, and few others.

    scores: float32 [vocabulary]; -inf is impossible, anything else finite.
    """
    if 0 < params.top_k < len(scores):
        ids = at_least_kth(scores, params.top_k)
        return Candidates(ids, scores[ids])
    if params.top_p < 1:
        return _heavy(scores, params)
    if params.min_p > 0:
        # A little lower than the limit, so that rounding cannot take a token; the exact comparison follows.
        best = float(scores.max())
        reach = -params.temperature * math.log(params.min_p)
        ids = np.flatnonzero(scores >= np.float32(best - reach - 1e-5 * (abs(best) + reach)))
        return Candidates(ids, scores[ids])
    return Candidates(None, scores)


def weights_of(scores: FloatArray, temperature: float) -> FloatArray:
    """Return exp(score / temperature) for each, scaled so that the largest is 1."""
    with np.errstate(over="ignore"):  # beyond float32 is as good as infinitely far: it weighs nothing
        weights: FloatArray = scores - scores.max()
        # Below the smallest normal float32 the division would be by zero; there it picks the maximum, as it
        # should.
        weights /= np.float32(max(temperature, _TINY))
    np.exp(weights, out=weights)
    return weights


def _heavy(scores: FloatArray, params: ResolvedSampling) -> Candidates:
    """Return the tokens that top-p may keep.

    Whatever weighs less than a share 1 - top_p of the whole, spread evenly over the tokens, can all be left
    out without the rest falling short of top_p. What is left has fewer tokens, so the same reasoning drops
    more.
    """
    weights = weights_of(scores, params.temperature)
    total = float(weights.sum(dtype=np.float64))
    spare = (1 - params.top_p) * total
    ids: IdArray | None = None
    outside = 0.0
    while True:
        # Not quite the even share, so that a rounded sum cannot take a token that is needed.
        limit = (1 - 1e-3) * (spare - outside) / len(weights)
        kept = np.flatnonzero(weights >= limit)
        if 10 * len(kept) > 9 * len(weights):
            break
        ids = kept if ids is None else ids[kept]
        weights = weights[kept]
        outside = max(total - float(weights.sum(dtype=np.float64)), 0.0)
    return Candidates(ids, scores if ids is None else scores[ids], outside)
