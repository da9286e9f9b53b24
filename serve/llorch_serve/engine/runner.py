"""Carries out a step's edits and its call on a session, and returns the logits of the call."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from llorch_serve.engine.capabilities import Capabilities
from llorch_serve.engine.plan import (
    DecodeBatch,
    DecodeRow,
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
from llorch_serve.sampling.candidates import Candidates
from llorch_serve.sampling.greedy import accepts, takes_best
from llorch_serve.sampling.leading import Leading, leading_candidates, takes_leading

Logits = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Chosen:
    """What came of a batch of which the session has chosen tokens.

    token_ids: the next token of each row; None: it is still to be chosen.
    candidates: of each row, what it is drawn from; None: it is not drawn, or from its logits.
    logits: of the rows that have neither token nor candidates, in their order; None: there are none.
    """

    token_ids: tuple[int | None, ...]
    candidates: tuple[Candidates | None, ...]
    logits: Logits | None


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


@runtime_checkable
class GreedySession(Protocol):
    """What a session has besides where its capabilities say ``greedy_decode``."""

    def decode_greedy(self, token_ids: Seq[int], lengths: Seq[int]) -> npt.NDArray[np.int64]:
        """Run one token in each of the slots from 0; return the most likely next ones, [slots]; -1 where a
        logit is not finite.
        """

    def step_logits(self, rows: Seq[int]) -> Logits:
        """Return the logits of some rows of that call, which is the last one: [len(rows), vocabulary]."""


@runtime_checkable
class LeadingSession(GreedySession, Protocol):
    """What a session has besides where its capabilities have ``leading_decode``."""

    def decode_leading(
        self, token_ids: Seq[int], lengths: Seq[int], temperatures: Seq[float]
    ) -> tuple[npt.NDArray[np.int64], Logits, npt.NDArray[np.float64]]:
        """Run one token in each of the slots from 0; return the ids of the likeliest next ones, the likeliest
        first, and their logits, [slots, leading], and the sums over all tokens of
        exp((logit - the largest) / temperature), [slots]; not finite where a logit is not.
        """


def apply_edit(session: Session, edit: SlotEdit) -> None:
    """Move what the KV cache's slots hold. Raises ProviderError, ResourceError or MemoryError."""
    match edit:
        case SlotCopy(source, target, tokens):
            session.copy_slot(source, target, tokens)
        case SlotSwap(first, second, tokens):
            session.swap_slots(first, second, tokens)
        case SlotRelease(slot, keep):
            session.release_slot(slot, keep)


def run(session: Session, call: StepCall) -> Logits | Chosen:
    """Make a call; return logits [rows, vocabulary], valid until the next call, or tokens where the session
    has chosen some of a batch. Raises what the session raises.

    Rows: one for each row of a batch or token of a verify chunk; of a prefill chunk one for each scored
    position, then one for the last token if the next token follows from it.
    """
    match call:
        case DecodeBatch(rows=rows):
            return _decode(session, rows)
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


def _decode(session: Session, rows: tuple[DecodeRow, ...]) -> Logits | Chosen:
    token_ids, lengths = [row.token_id for row in rows], [row.length for row in rows]
    able = session.capabilities
    # Of a sequence whose log-probabilities are asked for, all logits are needed.
    free = [row.sequence.sampling if row.sequence.logprobs is None else None for row in rows]
    greedy = [able.greedy_decode and row is not None and takes_best(row) for row in free]
    drawn = [row is not None and takes_leading(row, able.leading_decode) for row in free]
    tokens: list[int | None] = [None] * len(rows)
    candidates: list[Candidates | None] = [None] * len(rows)
    if any(drawn):
        assert isinstance(session, LeadingSession)
        temperatures = [row.params.temperature or 1.0 if row is not None else 1.0 for row in free]
        found = session.decode_leading(token_ids, lengths, temperatures)
        for index, (row, ids, scores, total) in enumerate(zip(free, *found, strict=True)):
            leading = Leading(ids, scores, float(total))
            if greedy[index]:
                tokens[index] = leading.best()
            elif drawn[index] and row is not None:
                candidates[index] = leading_candidates(leading, row.params, row.drawable)
    elif any(greedy):
        assert isinstance(session, GreedySession)
        best = session.decode_greedy(token_ids, lengths).tolist()
        tokens = [token if some else None for token, some in zip(best, greedy, strict=True)]
    else:
        return session.decode(token_ids, lengths)
    for index, (row, token) in enumerate(zip(free, tokens, strict=True)):
        if token is not None and row is not None and not accepts(row, token):
            tokens[index] = None
    left = [
        index
        for index, (token, few) in enumerate(zip(tokens, candidates, strict=True))
        if token is None and few is None
    ]
    return Chosen(tuple(tokens), tuple(candidates), session.step_logits(left) if left else None)


def _run_chunk(session: Session, chunk: PrefillChunk) -> Logits:
    # A prompt that is continued has no token after its last one to score, so no position is named twice.
    sampled = (len(chunk.token_ids) - 1,) if chunk.samples else ()
    wanted = (*chunk.scored, *sampled) if chunk.scored or not sampled else None
    logits = session.prefill(chunk.slot, chunk.token_ids, chunk.start, wanted)
    shared = chunk.sequence.shared
    if chunk.samples and shared is not None and not shared.computed:
        shared.logits = logits[-1].copy()
    return logits
