"""Two answers of which only the ids are promised to agree: where they part, two logits must be next to
equal.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from llorch_serve.sampling.logprobs import TokenLogprobs

TIE: Final = 1e-4
"""Nats between the two candidates within which either may be chosen."""


@dataclass(frozen=True, slots=True)
class Tie:
    """Where two greedy answers parted, and by how little the first one's choice was the better."""

    position: int
    gap: float


def parting(ids: Sequence[int], logprobs: Sequence[TokenLogprobs], others: Sequence[int]) -> Tie | None:
    """Return the tie at which ``others`` leaves a greedy answer; None if it does not.

    logprobs: of ``ids``, with the likeliest tokens. Raises AssertionError if the two part elsewhere than at a
        tie.
    """
    assert len(ids) == len(others)
    for position, (token, other) in enumerate(zip(ids, others, strict=True)):
        if token == other:
            continue
        place = logprobs[position]
        candidates = {candidate.token_id: candidate.logprob for candidate in place.top}
        assert other in candidates, f"at {position}, {other} is not among the likeliest beside {token}"
        gap = place.chosen.logprob - candidates[other]
        assert gap <= TIE, f"at {position}, {token} is {gap:.2e} nats above {other}, more than a tie's {TIE}"
        return Tie(position, gap)
    return None
