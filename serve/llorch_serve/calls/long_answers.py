"""Writes long answers on a thread, whatever front they leave by.

Every token of an answer may have twenty alternatives with their log-probabilities. Thousands of tokens take
half a second to write, and meanwhile the event loop would answer nobody. Input: how many tokens have
log-probabilities, and what writes the answer in a front's dialect. Output: what that returns.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Final, TypeVar

from llorch_serve.requests import GenerationUpdate

MOST_AT_ONCE: Final = 256
"""Tokens with log-probabilities that the event loop writes itself: some ten milliseconds."""

T = TypeVar("T")


def places_of(updates: Sequence[GenerationUpdate]) -> int:
    """Return how many tokens of some updates have log-probabilities."""
    scores = (update.score.logprobs for update in updates if update.score is not None)
    answers = (len(update.logprobs) + len(update.prompt_logprobs) for update in updates)
    return sum(answers) + sum(map(len, scores))


async def written(places: int, write: Callable[[], T]) -> T:
    """Return what ``write`` makes of so many tokens with log-probabilities."""
    return await asyncio.to_thread(write) if places > MOST_AT_ONCE else write()
