"""How busy an engine is: the figures that the scheduler counts and ``GetLoad`` returns."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Load:
    """Figures of one moment.

    running, waiting: requests with and without a slot, of which there are ``slots``.
    kv_tokens_running, kv_tokens_idle: tokens in the KV cache, of running requests and kept for reuse; at most
        ``kv_tokens_total`` together.
    prompt_tokens, cached_tokens: of all prompts started so far, and how many of them the cache already held.
    generated_tokens: generated so far. drafted_tokens, accepted_tokens: guessed so far, and how many were right.
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
