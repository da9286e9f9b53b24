"""How busy a worker is: the figures that the scheduler counts and ``GetLoad`` returns, and the worker's
state.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final


class WorkerState(enum.Enum):
    """Where a worker is in its life, in the words that a pool manager reads."""

    STARTING = "starting"  # listening, loading its model
    READY = "ready"
    BUSY = "busy"  # serving, with every slot taken
    DRAINING = "draining"  # finishing what runs, taking nothing more
    STOPPED = "stopped"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class StageTimes:
    """What one stage of a model that is cut into stages has done so far, for all lanes.

    calls: of its graphs. busy_s: seconds in them. waiting_s: seconds that calls waited for others to end; the
        stage that all wait for is the bottleneck.
    """

    calls: int = 0
    busy_s: float = 0.0
    waiting_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Load:
    """Figures of one moment.

    running, waiting: requests with and without a slot, of which there are ``slots``.
    kv_tokens_running, kv_tokens_idle: tokens in the KV cache, of running requests and kept for reuse; at most
        ``kv_tokens_total`` together.
    prompt_tokens, cached_tokens: of all prompts started so far, and how many of them the cache already held.
    generated_tokens: generated so far. drafted_tokens, accepted_tokens: guessed so far, and how many were
        right.
    tokens_per_second: generated over the last seconds, all requests together.
    state, load_percent, loaded_bytes, total_bytes: where the worker is, and how far its model has been
        loaded.
    stages: what each stage has done, of a model that is cut into stages; else nothing.
    """

    running: int
    waiting: int
    slots: int
    kv_tokens_running: int
    kv_tokens_idle: int
    kv_tokens_total: int
    prompt_tokens: int
    cached_tokens: int
    generated_tokens: int
    drafted_tokens: int
    accepted_tokens: int
    tokens_per_second: float = 0.0
    state: WorkerState = WorkerState.READY
    load_percent: float = 100.0
    loaded_bytes: int = 0
    total_bytes: int = 0
    stages: tuple[StageTimes, ...] = ()


NOTHING: Final = Load(
    running=0,
    waiting=0,
    slots=0,
    kv_tokens_running=0,
    kv_tokens_idle=0,
    kv_tokens_total=0,
    prompt_tokens=0,
    cached_tokens=0,
    generated_tokens=0,
    drafted_tokens=0,
    accepted_tokens=0,
    state=WorkerState.STARTING,
)
"""The figures of a worker that has not loaded its model."""


def together(loads: Sequence[Load], stages: tuple[StageTimes, ...] = ()) -> Load:
    """Return the figures of one worker whose sequences are in several lanes. loads: of each lane."""
    if len(loads) == 1:
        return replace(loads[0], stages=stages)
    sums = {name: sum(getattr(load, name) for load in loads) for name in _SUMMED}
    return Load(**sums, stages=stages)


_SUMMED: Final = (
    "running", "waiting", "slots", "kv_tokens_running", "kv_tokens_idle", "kv_tokens_total", "prompt_tokens",
    "cached_tokens", "generated_tokens", "drafted_tokens", "accepted_tokens", "tokens_per_second",
)  # fmt: skip


class TokenRate:
    """Tokens per second over the last few whole seconds. Counted by one thread, read by any."""

    SECONDS: Final = 5

    def __init__(self) -> None:
        # A ring with one entry for each second: the second, and what was counted in it.
        self._seconds = [(-1, 0)] * (self.SECONDS + 1)

    def count(self, now_s: float, tokens: int) -> None:
        """Count tokens that came at ``now_s`` on any clock that does not go back."""
        second = int(now_s)
        place = second % len(self._seconds)
        known, sum_ = self._seconds[place]
        self._seconds[place] = (second, (sum_ if known == second else 0) + tokens)

    def per_second(self, now_s: float) -> float:
        """Return the rate of the last SECONDS whole seconds before ``now_s`` on the same clock."""
        current = int(now_s)
        counted = sum(
            tokens for second, tokens in self._seconds if current - self.SECONDS <= second < current
        )
        return counted / self.SECONDS
