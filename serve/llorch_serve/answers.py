"""The answers to one request: their seeds, which of them still go on, and with best_of which of them are returned.

The worker makes an :class:`Answers` for each request, puts every update of its answers through :meth:`Answers.take` on the
engine's thread, and sends on what comes back.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from typing import Final

from llorch_serve.requests import GenerationUpdate, UpdateSink
from llorch_serve.sampling import MAX_SEED
from llorch_serve.sequence import Sequence

_SEED_STEP: Final = 0x9E3779B97F4A7C15
"""Odd, so that the seeds of one request differ; 2**64 over the golden ratio, so that they are far from those of seeds nearby."""


def answer_seed(seed: int, index: int) -> int:
    """Return the seed of a request's answer: the request's own for the first, (seed + index * step) mod 2**63 for others."""
    return (seed + index * _SEED_STEP) % (MAX_SEED + 1)


@dataclass(slots=True, eq=False)
class Answers:
    """What the answers to one request, or the scores of one, have in common.

    sequences: theirs, in the order of their index. open: how many of them go on.
    """

    request_id: str
    sink: UpdateSink
    sequences: Seq[Sequence]
    open: int

    def take(self, update: GenerationUpdate) -> GenerationUpdate:
        """Count an update of one answer; return it with how many go on after it."""
        self.open -= update.completion is not None
        return replace(update, open_answers=self.open)
