"""Which ids may be drawn: those that stand for a token. Tables of models have rows for more ids than that."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from llorch_serve.sampling.selection import FloatArray, IdArray


@dataclass(frozen=True, slots=True)
class DrawableIds:
    """The ids below ``size`` that are not among ``gaps``."""

    size: int
    gaps: frozenset[int]
    _gaps: IdArray

    @classmethod
    def of(cls, tokens: int, gaps: Iterable[int], *, vocab_size: int) -> DrawableIds | None:
        """Return the ids that stand for tokens; None if all of the model's do.

        tokens: one more than the tokenizer's largest id. gaps: ids below that stand for no token.
        vocab_size: rows of the model's table.
        """
        size = min(tokens, vocab_size)
        inside = frozenset(gap for gap in gaps if gap < size)
        if size == vocab_size and not inside:
            return None
        return cls(size, inside, np.array(sorted(inside), dtype=np.int64))

    def __contains__(self, token_id: int) -> bool:
        return 0 <= token_id < self.size and token_id not in self.gaps

    def only(self, scores: FloatArray) -> FloatArray:
        """Return the scores [vocabulary] of these ids: cut at ``size``, gaps at -inf. ``scores`` stay as they
        are.
        """
        scores = scores[: self.size]
        if self.gaps:
            scores = scores.copy()
            scores[self._gaps] = -np.inf
        return scores
