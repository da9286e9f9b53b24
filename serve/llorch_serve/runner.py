"""Carries out a step plan on a session and returns the logits of the sequences that get a token."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Protocol

import numpy as np
import numpy.typing as npt

from llorch_serve.capabilities import Capabilities
from llorch_serve.scheduler import StepPlan

Logits = npt.NDArray[np.float32]


class Session(Protocol):
    """What the runner needs from :class:`llorch_serve.session.DecoderSession`; tests plug in a fake."""

    @property
    def capabilities(self) -> Capabilities:
        """What it can do."""

    def prefill(self, slot: int, token_ids: Seq[int], start: int, wanted: Seq[int] | None = None) -> Logits:
        """Run a chunk of a prompt; return logits [len(wanted), vocabulary], by default the last token's."""

    def decode(self, token_ids: Seq[int], lengths: Seq[int]) -> Logits:
        """Run one token in each of the slots from 0; return logits [slots, vocabulary]."""

    def copy_slot(self, source: int, target: int, tokens: int) -> None:
        """Copy part of the KV cache."""


def run(session: Session, plan: StepPlan) -> Logits:
    """Run ``plan``; return logits [len(plan.sampled()), vocabulary], valid until the next call."""
    for move in plan.moves:
        session.copy_slot(move.source, move.target, move.tokens)
    if plan.prefill is not None:
        chunk = plan.prefill
        return session.prefill(chunk.slot, chunk.token_ids, chunk.start, None if chunk.samples else ())
    live = [index for index, row in enumerate(plan.decode) if row.sequence is not None]
    if (
        not session.capabilities.batched_decode
    ):  # a call for each row, and none for a slot that would ride along
        rows = [(index, plan.decode[index]) for index in live]
        return np.concatenate(
            [session.prefill(slot, (row.token_id,), row.length - 1).copy() for slot, row in rows]
        )
    logits = session.decode([row.token_id for row in plan.decode], [row.length for row in plan.decode])
    return logits if len(live) == len(plan.decode) else logits[live]
