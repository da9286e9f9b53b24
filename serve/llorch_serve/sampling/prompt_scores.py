"""Log-probabilities of a prompt's own tokens, taken chunk by chunk while the prompt is computed.

The intake gives a sequence a :class:`PromptScores` where a request wants them; the scheduler plans for which
positions of a chunk logits are computed, the runner brings them here, and when the prompt is done its answer
reads what was found.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from llorch_serve.errors import NonFiniteLogitsError
from llorch_serve.sampling.logprobs import TokenScores, score_token
from llorch_serve.sampling.selection import FloatArray

_MOST_LOGITS: Final = 2**23
"""Logits that one call may return: 32 MiB, which the session's buffer keeps once it has grown to it."""

_ROW_STEP: Final = 32


def most_rows(vocab_size: int) -> int:
    """Return for how many positions one call may compute logits."""
    return max(_ROW_STEP, _MOST_LOGITS // vocab_size // _ROW_STEP * _ROW_STEP)


@dataclass(slots=True, eq=False)
class PromptScores:
    """Scores of ``tokens[first:]``, each given all tokens before it.

    tokens: the prompt; where its last token is only to be scored, the sequence does not hold that one.
    first: at least 1, since nothing comes before the first token.
    top: how many of the likeliest tokens of each place are kept with it.
    rows: most positions of one call that have logits; None: any number.
    found: scores so far.
    """

    tokens: Sequence[int]
    first: int
    top: int
    rows: int | None
    found: list[TokenScores] = field(default_factory=list)

    @property
    def complete(self) -> bool:
        """Whether every token has been scored."""
        return len(self.found) == len(self.tokens) - self.first

    def wanted(self, start: int, count: int) -> range:
        """Return which of ``count`` positions from ``start`` on, counted from there, tell of a token that is
        still to score.
        """
        following = self.first + len(self.found) - 1
        return range(max(following - start, 0), max(min(count, len(self.tokens) - 1 - start), 0))

    def limit(self, start: int, count: int) -> int:
        """Return how many of ``count`` positions from ``start`` on one call may have."""
        unscored = max(self.first - 1 - start, 0)
        return count if self.rows is None else min(count, unscored + self.rows)

    def take(self, logits: FloatArray) -> None:
        """Score the next tokens from float32 logits [positions, vocabulary]. Raises NonFiniteLogitsError."""
        for row in logits:
            place = self.first + len(self.found)
            if not (np.isfinite(row.max()) and np.isfinite(row.min())):
                raise NonFiniteLogitsError(
                    f"the model gave logits that are not finite for token {place} of the prompt; expected "
                    f"numbers. "
                    "Run llorch verify on the artifact, or export it in fp32 or, for a provider that has "
                    "it, bf16."
                )
            self.found.append(score_token(row, self.tokens[place], top=self.top))
