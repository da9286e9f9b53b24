"""Cutting texts: into pieces that are encoded one by one, and tokens into windows that a context holds."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

PIECE_CHARS: Final = 2**15
"""So much text has fewer tokens than a worker encodes in one call."""


@dataclass(frozen=True, slots=True)
class Window:
    """Part of a text: tokens to predict, and those that they are predicted from; none where the text
    begins.
    """

    context: tuple[int, ...]
    tokens: tuple[int, ...]


def windows(token_ids: Sequence[int], length: int, stride: int) -> Iterator[Window]:
    """Cut a text so that every token is predicted once.

    length: most tokens that the model reads at once. stride: tokens that each window but the first predicts;
        the others are context. With ``stride`` = ``length``, a window has one token of context, the last one
        more: so does lm-eval for its ``loglikelihood_rolling``.
    """
    assert 1 <= stride <= length
    end = min(length, len(token_ids))
    if end:
        yield Window((), tuple(token_ids[:end]))
    while end < len(token_ids):
        begin, end = end, min(end + stride, len(token_ids))
        yield Window(tuple(token_ids[end - length - 1 : begin]), tuple(token_ids[begin:end]))


def pieces(text: str, most: int = PIECE_CHARS) -> Iterator[str]:
    """Cut a long text, where it can be behind a line, so that pieces have as good as the same tokens."""
    start = 0
    while len(text) - start > most:
        end = _cut(text, start, start + most)
        yield text[start:end]
        start = end
    yield text[start:]


def _cut(text: str, start: int, end: int) -> int:
    """Return a place to cut before ``end``: behind a line that is not empty, else any, else before a word."""
    place = end
    while (place := text.rfind("\n", start + 1, place)) > 0:
        if not text[place - 1].isspace() and not text[place + 1].isspace():
            return place + 1
    behind = text.rfind("\n", start + 1, end) + 1
    before = text.rfind(" ", start + 1, end)
    return behind if behind > start else before if before > start else end


def own_tokens(token_ids: Sequence[int], around: Sequence[int]) -> tuple[int, ...]:
    """Return a text's ids without those that the tokenizer puts around every text.

    around: the ids of an empty text.
    """
    same = 0
    while same < len(around) and token_ids[same : same + 1] == around[same : same + 1]:
        same += 1
    behind = around[same:]
    end = len(token_ids) - (len(behind) if behind and token_ids[-len(behind) :] == behind else 0)
    return tuple(token_ids[same:end])
