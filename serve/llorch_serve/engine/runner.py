"""Carries out a step's edits and its call on a session, and returns the logits of the call."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Protocol

import numpy as np
import numpy.typing as npt

from llorch_serve.engine.capabilities import Capabilities
from llorch_serve.engine.plan import (
    DecodeBatch,
    DraftBatch,
    PrefillChunk,
    SharedStart,
    SlotCopy,
    SlotEdit,
    SlotRelease,
    SlotSwap,
    StepCall,
    VerifyChunk,
)

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
    match edit:
        case SlotCopy(source, target, tokens):
            session.copy_slot(source, target, tokens)
        case SlotSwap(first, second, tokens):
            session.swap_slots(first, second, tokens)
        case SlotRelease(slot, keep):
            session.release_slot(slot, keep)


def run(session: Session, call: StepCall) -> Logits:
    """Make a call; return logits [rows, vocabulary], valid until the next call. Raises what the session
    raises.

    Rows: one for each row of a batch or token of a verify chunk; of a prefill chunk one for each scored
    position, then one for the last token if the next token follows from it.
    """
    match call:
        case DecodeBatch(rows=rows):
            return session.decode([row.token_id for row in rows], [row.length for row in rows])
        case PrefillChunk():
            return _run_chunk(session, call)
        case VerifyChunk(slot=slot, token_ids=token_ids, start=start):
            return session.verify(slot, token_ids, start)
        case SharedStart(sequence=sequence):
            assert sequence.shared is not None
            assert sequence.shared.logits is not None
            return sequence.shared.logits[None]
        case DraftBatch():
            raise AssertionError("guesses are a drafter's, which has a session of its own")


def _run_chunk(session: Session, chunk: PrefillChunk) -> Logits:
    # A prompt that is continued has no token after its last one to score, so no position is named twice.
    sampled = (len(chunk.token_ids) - 1,) if chunk.samples else ()
    wanted = (*chunk.scored, *sampled) if chunk.scored or not sampled else None
    logits = session.prefill(chunk.slot, chunk.token_ids, chunk.start, wanted)
    shared = chunk.sequence.shared
    if chunk.samples and shared is not None and not shared.computed:
        shared.logits = logits[-1].copy()
    return logits
