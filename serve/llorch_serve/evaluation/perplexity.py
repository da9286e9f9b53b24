"""How well a model predicts texts: perplexity by token, word and byte, and bits per byte.

Texts come from the command line as bytes; the figures go into the document. All follow from the sum of the
tokens' log-probabilities ``ll``: perplexity is ``exp(-ll / tokens)``, by word and byte likewise, and bits per
byte ``-ll / (bytes * ln 2)``. Words are counted as lm-eval counts them for its perplexities.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from llorch_serve.errors import UsageError
from llorch_serve.evaluation.schema import TextResult
from llorch_serve.evaluation.scores import ModelScores

BLOCK_TOKENS: Final = 64
MOST_BLOCKS: Final = 2000
_SPACE: Final = re.compile(r"\s+")


@dataclass(frozen=True, slots=True)
class NamedText:
    """A text to predict."""

    name: str
    text: str


def measure_texts(
    scores: ModelScores, texts: Sequence[NamedText], *, window: int, stride: int
) -> tuple[TextResult, ...]:
    """Return each text's figures, and those of all together, ``all``, where there are several.

    Raises UsageError for a text without tokens.
    """
    found = []
    for one in texts:
        ids = scores.tokens(one.text)
        if not ids:
            raise UsageError(f"--text {one.name} has no tokens; expected a text that the model can predict")
        logprobs = scores.token_logprobs(ids, window, stride)
        found.append(text_result(one, logprobs, window=window, stride=stride))
    return (*found, together(found)) if len(found) > 1 else tuple(found)


def text_result(one: NamedText, logprobs: Sequence[float], *, window: int, stride: int) -> TextResult:
    """Return the figures of a text whose tokens have these log-probabilities."""
    size = block_size(len(logprobs))
    blocks = [math.fsum(logprobs[i : i + size]) for i in range(0, len(logprobs), size)]
    raw = one.text.encode("utf-8")
    return _result(
        name=one.name,
        sha256=hashlib.sha256(raw).hexdigest(),
        sizes=(len(logprobs), len(_SPACE.split(one.text)), len(raw)),
        windows=(window, stride),
        block_tokens=size,
        blocks=blocks,
    )


def together(parts: Sequence[TextResult]) -> TextResult:
    """Return the figures of several texts as one: all log-probabilities over all tokens, words or bytes."""
    digest = hashlib.sha256("".join(part.sha256 for part in parts).encode()).hexdigest()
    size = min(part.block_tokens for part in parts)
    sizes = tuple(sum(getattr(part, name) for part in parts) for name in ("tokens", "words", "bytes"))
    return _result(
        name="all",
        sha256=digest,
        sizes=(sizes[0], sizes[1], sizes[2]),
        windows=(parts[0].window, parts[0].stride),
        block_tokens=size,
        blocks=[block for part in parts for block in part.blocks],
    )


def block_size(tokens: int) -> int:
    """Return how many tokens a block has: BLOCK_TOKENS, or more where that would be too many blocks."""
    return BLOCK_TOKENS * math.ceil(max(tokens, 1) / (BLOCK_TOKENS * MOST_BLOCKS))


def sum_error(blocks: Sequence[float]) -> float | None:
    """Return the standard error of a sum of blocks, each a draw of its own; None: one block tells none, nor
    do blocks that are no numbers.
    """
    count = len(blocks)
    if count < 2 or not all(map(math.isfinite, blocks)):
        return None
    return float(np.std(blocks, ddof=1)) * math.sqrt(count)


def _result(
    *,
    name: str,
    sha256: str,
    sizes: tuple[int, int, int],
    windows: tuple[int, int],
    block_tokens: int,
    blocks: Sequence[float],
) -> TextResult:
    tokens, words, size = sizes
    total = math.fsum(blocks)
    error = sum_error(blocks)
    bits = size * math.log(2)
    return TextResult(
        name=name,
        sha256=sha256,
        bytes=size,
        words=words,
        tokens=tokens,
        window=windows[0],
        stride=windows[1],
        log_likelihood=total,
        perplexity=_exp(-total / tokens),
        word_perplexity=_exp(-total / words),
        byte_perplexity=_exp(-total / size),
        bits_per_byte=-total / bits,
        stderr=None if error is None else error / bits,
        block_tokens=block_tokens,
        blocks=tuple(blocks),
    )


def _exp(value: float) -> float | None:
    """Return the exponential, or None beyond every float, as JSON has no infinity."""
    try:
        return math.exp(value)
    except OverflowError:
        return None
