"""Rows drawn from their likeliest tokens alone, where the session finds those and the sum over all others.

Input: of each row the ``leading`` tokens with the largest logits, and what all tokens weigh together, the
likeliest weighing 1. Output: candidates from which the same token is drawn as from those that
``candidates.py`` would leave of the whole row, or that these do not suffice. A share of the total is the same
but for the rounding of the sum.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np

from llorch_serve.sampling.candidates import Candidates, weights_of
from llorch_serve.sampling.drawable import DrawableIds
from llorch_serve.sampling.filters import FEW
from llorch_serve.sampling.greedy import is_plain
from llorch_serve.sampling.params import ResolvedSampling
from llorch_serve.sampling.selection import FloatArray, IdArray

if TYPE_CHECKING:
    from llorch_serve.sampling.sampler import SamplingRow

_SLACK: Final = 2e-5
"""How far below min-p's limit the last leading token has to be, as part of the scores: twice what
``candidates.py`` takes in below it.
"""


@dataclass(frozen=True, slots=True)
class Leading:
    """One row's likeliest tokens.

    ids: [leading], in the order of scores; of equal ones any. scores: float32, the largest first.
    total: of all tokens' exp((score - the largest) / temperature); not finite where a logit is not, or the
        temperature is next to nothing.
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
    elif asked.top_p < 1:
        weights = weights_of(found.scores[:count], asked.temperature)
        outside = max(found.total - float(weights.sum(dtype=np.float64)), 0.0)
        if outside >= _spare(len(found.scores)) * (1 - asked.top_p) * found.total:
            return None
    else:
        best, last = float(found.scores[0]), float(found.scores[-1])
        reach = -asked.temperature * math.log(asked.min_p)
        if last >= best - reach - _SLACK * (abs(best) + reach):
            return None
    order = np.argsort(found.ids[:count])
    return Candidates(found.ids[:count][order], found.scores[:count][order], outside)


def _spare(leading: int) -> float:
    """Return the share of what top-p may leave out that the tokens which are not leading have to stay below.

    Of a whole row, candidates are narrowed down until nine tenths of n are kept, each of which weighs at
    least 0.999 / n of what may be left out. If more than FEW were kept, which are drawn from in another
    order, those of them that are not leading would weigh (0.9 - leading / n) * 0.999 of it, and n is above
    FEW.
    """
    return 0.99 * (0.9 - leading / (FEW + 1))
