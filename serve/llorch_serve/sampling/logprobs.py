"""Log-probabilities of tokens, as the model gave them: computed from a row of logits, and told with the
tokens' text.

:func:`score_token` runs between sampling and detokenising, on the logits before any penalty, bias, mask or
temperature has touched them, and only for requests that ask. Its :class:`TokenScores` become
:class:`TokenLogprobs` where the tokenizer is at hand.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final, Protocol

import numpy as np

from llorch_serve.sampling.selection import FloatArray, largest

LOWEST_LOGPROB: Final = -9999.0
"""What stands for everything less likely, so that every value is a finite number wherever it is sent."""

MAX_LOGPROBS: Final = 20
"""Most alternatives of a token that a request may ask for."""


@dataclass(frozen=True, slots=True)
class TokenScores:
    """One place of a text, as numbers.

    token_id, logprob: the token there, and its natural log-probability, at most 0 and at least
        LOWEST_LOGPROB.
    top: the likeliest tokens of that place with theirs, the likeliest first; of equals, the lower id.
    """

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """A token and its natural log-probability.

    text: what the token stands for, with replacement characters where its bytes are part of a character.
    raw: its bytes; those of successive tokens make up the text exactly. Both are empty for an id without a
        token.
    """

    token_id: int
    logprob: float
    text: str
    raw: bytes


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """One place of a text: the token there, and the likeliest ones, the likeliest first (it may be among
    them).
    """

    chosen: TokenLogprob
    top: tuple[TokenLogprob, ...] = ()


class TokenBytes(Protocol):
    """What names tokens: :class:`llorch_serve.text.tokenizer.Tokenizer`."""

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes that a token stands for; none for an id without a token."""


def score_token(logits: FloatArray, token_id: int, *, top: int) -> TokenScores:
    """Return the log-softmax of float32 logits [vocabulary], all finite, at ``token_id`` and at the ``top``
    largest.
    """
    best = logits.max()
    with np.errstate(over="ignore"):  # a difference beyond float32 is as good as infinite: it weighs nothing
        weights = np.exp(logits - best)
    # Float32 is exact enough for terms, not for their sum.
    normalizer = float(best) + math.log(float(weights.sum(dtype=np.float64)))

    def logprob(index: int) -> float:
        return min(max(float(logits[index]) - normalizer, LOWEST_LOGPROB), 0.0)

    likeliest = tuple((int(index), logprob(int(index))) for index in largest(logits, top))
    return TokenScores(token_id, logprob(token_id), likeliest)


def name_tokens(scores: TokenScores, tokens: TokenBytes) -> TokenLogprobs:
    """Return the same with the text of every token."""

    def named(token_id: int, logprob: float) -> TokenLogprob:
        raw = tokens.token_bytes(token_id)
        return TokenLogprob(token_id, logprob, raw.decode("utf-8", "replace"), raw)

    return TokenLogprobs(named(scores.token_id, scores.logprob), tuple(named(*pair) for pair in scores.top))
