"""Carries out a step plan on a session and returns the logits of the sequences that get tokens."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Protocol

import numpy as np
import numpy.typing as npt

from llorch_serve.engine.capabilities import Capabilities
from llorch_serve.engine.plan import SlotCopy, SlotEdit, SlotSwap, StepPlan

Logits = npt.NDArray[np.float32]


class Session(Protocol):
    """What the runner needs from :class:`llorch_serve.runtime.session.DecoderSession`; tests plug in a
    fake.
    """

    @property
    def capabilities(self) -> Capabilities:
        """What it can do."""

    def prefill(self, slot: int, token_ids: Seq[int], start: int, wanted: Seq[int] | None = None) -> Logits:
        """Run a chunk of a prompt; return logits [len(wanted), vocabulary], by default the last token's."""

    def verify(self, slot: int, token_ids: Seq[int], start: int) -> Logits:
        """Run some tokens of a running sequence; return logits [len(token_ids), vocabulary]."""

    def decode(self, token_ids: Seq[int], lengths: Seq[int]) -> Logits:
        """Run one token in each of the slots from 0; return logits [slots, vocabulary]."""

    def copy_slot(self, source: int, target: int, tokens: int) -> None:
        """Copy the first ``tokens`` positions of the KV cache."""

    def swap_slots(self, first: int, second: int, tokens: int) -> None:
        """Exchange the first ``tokens`` positions of two slots."""

    def release_slot(self, slot: int, keep: int) -> None:
        """Give the memory of a slot's positions from ``keep`` on back to the system."""


def apply_edit(session: Session, edit: SlotEdit) -> None:
    """Move what the KV cache's slots hold. Raises ProviderError, ResourceError or MemoryError."""
    if isinstance(edit, SlotCopy):
        session.copy_slot(edit.source, edit.target, edit.tokens)
    elif isinstance(edit, SlotSwap):
        session.swap_slots(edit.first, edit.second, edit.tokens)
    else:
        session.release_slot(edit.slot, edit.keep)


def run(session: Session, plan: StepPlan) -> Logits:
    """Make the model call of ``plan``; return logits [rows, vocabulary], valid until the next call.

    Rows: one for each of ``plan.sampled()``, or one for each token of ``plan.verify``. Logits that a prompt's
    scores need go there instead.
    Raises ProviderError, or NonFiniteLogitsError for a prompt that cannot be scored.
    """
    if plan.prefill is not None:
        chunk = plan.prefill
        # A prompt that is continued has no token after its last one to score, so no position is named twice.
        sampled = (len(chunk.token_ids) - 1,) if chunk.samples else ()
        wanted = (*chunk.scored, *sampled) if chunk.scored or not sampled else None
        logits = session.prefill(chunk.slot, chunk.token_ids, chunk.start, wanted)
        if chunk.scored:
            assert chunk.sequence.prompt_scores is not None
            chunk.sequence.prompt_scores.take(logits[: len(chunk.scored)])
            logits = logits[len(chunk.scored) :]
        shared = chunk.sequence.shared
        if chunk.samples and shared is not None and not shared.computed:
            shared.logits = logits[-1].copy()
        return logits
    if plan.start is not None:
        shared = plan.start.sequence.shared
        assert shared is not None
        assert shared.logits is not None
        return shared.logits[None]
    if plan.verify is not None:
        return session.verify(plan.verify.slot, plan.verify.token_ids, plan.verify.start)
    return session.decode([row.token_id for row in plan.decode], [row.length for row in plan.decode])
