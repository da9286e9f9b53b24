"""Rows drawn from their likeliest tokens alone, where the session finds those and the sum over all others.

Input: of each row the ``leading`` tokens with the largest logits, and what all tokens weigh together, the
likeliest weighing 1. Output: the same candidates that ``candidates.py`` would leave of the whole row, or that
these do not suffice.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np

from llorch_serve.sampling.candidates import Candidates, weights_of
from llorch_serve.sampling.drawable import DrawableIds
from llorch_serve.sampling.greedy import is_plain
from llorch_serve.sampling.params import ResolvedSampling
from llorch_serve.sampling.selection import FloatArray, IdArray

if TYPE_CHECKING:
    from llorch_serve.sampling.sampler import SamplingRow

_SURE: Final = 1e-5
"""By how much of itself a share is overfulfilled before the tokens beyond the leading ones are left out: more
than exponentials in float32 differ from one processor to the next.
"""


@dataclass(frozen=True, slots=True)
class Leading:
    """One row's likeliest tokens.

    ids: [leading], in the order of scores; of equal ones any. scores: float32, the largest first.
    total: of all tokens' exp((score - the largest) / temperature); not finite where a logit is not.
    """

    ids: IdArray
    scores: FloatArray
    total: float

    def best(self) -> int | None:
        """Return the first id of the largest score; None: it may be another, or a logit is not finite."""
        if not math.isfinite(self.total) or self.scores[-1] == self.scores[0]:
            return None
        return int(self.ids[self.scores == self.scores[0]].min())


def takes_leading(row: SamplingRow, leading: int) -> bool:
    """Return whether a row may well be drawn from so many of its likeliest tokens (0: none are known), as a
    filter leaves few and no processor or grammar changes what is likely.
    """
    asked = row.params
    if not (leading and asked.temperature and is_plain(row)):
        return False
    if asked.top_k:
        return asked.top_k < leading
    # Ids that stand for no token count in the total, of which top-p takes a share.
    shares = asked.top_p < 1 and row.drawable is None
    return asked.typical_p >= 1 and (shares or (asked.top_p >= 1 and asked.min_p > 0))


def leading_candidates(
    found: Leading, asked: ResolvedSampling, drawable: DrawableIds | None
) -> Candidates | None:
    """Return what may be drawn of a row that :func:`takes_leading`; None: it takes all logits to tell.

    Tokens as unlikely as the last one here are left out, as others like it may not be here.
    """
    if not math.isfinite(found.total):
        return None
    if drawable is not None and not all(id_ in drawable for id_ in found.ids.tolist()):
        return None
    count = int((found.scores > found.scores[-1]).sum())
    outside = 0.0
    if asked.top_k:
        if count < asked.top_k:
            return None
        count = int((found.scores >= found.scores[asked.top_k - 1]).sum())
    else:
        weights = weights_of(found.scores, asked.temperature).astype(np.float64)
        inside = float(weights[:count].sum())
        if asked.top_p < 1:
            if inside < asked.top_p * found.total * (1 + _SURE):
                return None
            outside = max(found.total - inside, 0.0)
        elif weights[-1] >= asked.min_p * (1 - _SURE):
            return None
    order = np.argsort(found.ids[:count])
    return Candidates(found.ids[:count][order], found.scores[:count][order], outside)
