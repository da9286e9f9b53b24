"""Writes answers as JSON, long ones on a thread.

Every token of an answer may have twenty alternatives with their log-probabilities. Thousands of tokens take
half a second to write, and meanwhile the event loop would answer nobody. Input: how many tokens have
log-probabilities, and what makes the answer. Output: its JSON.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Final, TypeVar

import msgspec

from llorch_serve.requests import GenerationUpdate

MOST_AT_ONCE: Final = 256
"""Tokens with log-probabilities that the event loop writes itself: some ten milliseconds."""

T = TypeVar("T")


def places_of(updates: Sequence[GenerationUpdate]) -> int:
    """Return how many tokens of some updates have log-probabilities."""
    return sum(len(update.logprobs) + len(update.prompt_logprobs) for update in updates)


def as_json(value: object) -> msgspec.Raw:
    """Return the JSON of a value, to be a part of another."""
    return msgspec.Raw(msgspec.json.encode(value))


async def written(places: int, write: Callable[[], T]) -> T:
    """Return what ``write`` makes of so many tokens with log-probabilities."""
    return await asyncio.to_thread(write) if places > MOST_AT_ONCE else write()
