"""Decides what each step computes, as plain data: no numpy, no runtime, no clock.

A step is one call of the model: either a chunk of one prompt, or one token of every running sequence. Where both
are due they take turns, so a long prompt delays running streams by one chunk at a time. Requests start in the order
they came.

Running sequences are kept in the lowest slots, because a decode call runs over slots 0 to n-1; a slot in that range
without a running sequence rides along, and what the call writes there is overwritten or never read.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence as Seq
from dataclasses import dataclass

from llorch_serve.errors import QueueFullError
from llorch_serve.sequence import FinishReason, Sequence, SequenceStatus, TokenEvent


@dataclass(frozen=True, slots=True)
class SlotMove:
    """Copy the first ``tokens`` positions of the KV cache from one slot to another."""

    source: int
    target: int
    tokens: int


@dataclass(frozen=True, slots=True)
class PrefillChunk:
    """Run ``token_ids`` at positions ``start`` and on; samples: whether the next token follows from the last one."""

    sequence: Sequence
    slot: int
    token_ids: tuple[int, ...]
    start: int
    samples: bool


@dataclass(frozen=True, slots=True)
class DecodeRow:
    """Run one token in a slot. length: tokens of the slot including this one.

    sequence: None for a slot that only rides along.
    """

    sequence: Sequence | None
    token_id: int
    length: int


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One step: the moves first, then either the chunk or the rows (row i runs in slot i)."""

    moves: tuple[SlotMove, ...] = ()
    prefill: PrefillChunk | None = None
    decode: tuple[DecodeRow, ...] = ()

    def sampled(self) -> list[Sequence]:
        """Return the sequences that get a token in this step, in the order of the logits."""
        if self.prefill is not None:
            return [self.prefill.sequence] if self.prefill.samples else []
        return [row.sequence for row in self.decode if row.sequence is not None]


class Scheduler:
    """Owns the waiting queue and the slots.

    kv_cache: False forgets the cache after every token and computes the whole sequence anew.
    """

    def __init__(self, *, slots: int, prefill_chunk: int, max_waiting: int, kv_cache: bool = True) -> None:
        self._slots: list[Sequence | None] = [None] * slots
        self._waiting: deque[Sequence] = deque()
        self._prefill_chunk = prefill_chunk
        self._max_waiting = max_waiting
        self._kv_cache = kv_cache
        self._prefilled_last = False

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence. Raises QueueFullError."""
        if len(self._waiting) >= self._max_waiting:
            raise QueueFullError(
                f"{len(self._waiting)} requests are waiting, the most this worker queues; try again later",
                retry_after_s=1.0,
            )
        self._waiting.append(sequence)

    def remove(self, sequence: Sequence) -> None:
        """Forget a sequence, wherever it is; its slot is free at once."""
        if sequence.slot is not None:
            self._slots[sequence.slot] = None
            sequence.slot = None
        elif sequence.status is SequenceStatus.WAITING:
            self._waiting.remove(sequence)
        sequence.status = SequenceStatus.FINISHED

    @property
    def waiting(self) -> int:
        """Sequences without a slot."""
        return len(self._waiting)

    @property
    def running(self) -> int:
        """Sequences with a slot."""
        return sum(sequence is not None for sequence in self._slots)

    def schedule(self) -> StepPlan | None:
        """Return the next step, or None if there is nothing to do."""
        prefilling = self._prefilling()
        decoding = any(s is not None and s.status is SequenceStatus.DECODE for s in self._slots)
        if prefilling is not None and not (decoding and self._prefilled_last):
            self._prefilled_last = True
            return StepPlan(prefill=self._chunk(prefilling))
        self._prefilled_last = False
        if not decoding:
            return None
        moves = self._compact()
        return StepPlan(moves=moves, decode=self._decode_rows())

    def update(self, plan: StepPlan, results: Seq[int | Exception]) -> list[TokenEvent]:
        """Take the sampled tokens of ``plan.sampled()``, or each one's error; return what happened."""
        if plan.prefill is not None:
            plan.prefill.sequence.computed += len(plan.prefill.token_ids)
        for row in plan.decode:
            if row.sequence is not None:
                row.sequence.computed += 1
        return [
            self._advance(sequence, result) for sequence, result in zip(plan.sampled(), results, strict=True)
        ]

    def _advance(self, sequence: Sequence, result: int | Exception) -> TokenEvent:
        if isinstance(result, Exception):
            self.remove(sequence)
            return TokenEvent(sequence, None, error=result)
        if result in sequence.stop_ids:
            self.remove(sequence)
            return TokenEvent(sequence, result, FinishReason.STOP, is_stop_token=True)
        sequence.token_ids.append(result)
        if sequence.generated >= sequence.max_new_tokens:
            self.remove(sequence)
            return TokenEvent(sequence, result, FinishReason.LENGTH)
        sequence.status = SequenceStatus.DECODE
        if not self._kv_cache:
            sequence.status, sequence.computed = SequenceStatus.PREFILL, 0
        return TokenEvent(sequence, result)

    def _prefilling(self) -> Sequence | None:
        """Return the sequence whose prompt is under way, else start the next waiting one if a slot is free."""
        for sequence in self._slots:
            if sequence is not None and sequence.status is SequenceStatus.PREFILL:
                return sequence
        if not self._waiting or None not in self._slots:
            return None
        sequence = self._waiting.popleft()
        sequence.slot = self._slots.index(None)
        self._slots[sequence.slot] = sequence
        sequence.status = SequenceStatus.PREFILL
        return sequence

    def _chunk(self, sequence: Sequence) -> PrefillChunk:
        assert sequence.slot is not None
        # A row's last bits depend on whether it runs alone or beside other rows of its sequence. So that a
        # recomputed answer repeats the first one exactly, its tokens go one by one here too.
        rest = sequence.prompt_length - sequence.computed
        count = min(self._prefill_chunk, rest) if rest > 0 else 1
        if rest - count == 1 and count > 2:
            count -= 1  # a last chunk of one row would take the single-row kernel
        start = sequence.computed
        return PrefillChunk(
            sequence=sequence,
            slot=sequence.slot,
            token_ids=tuple(sequence.token_ids[start : start + count]),
            start=start,
            samples=count == sequence.pending,
        )

    def _compact(self) -> tuple[SlotMove, ...]:
        """Move the highest running sequences into free slots below them."""
        moves: list[SlotMove] = []
        while True:
            top = max(
                i for i, s in enumerate(self._slots) if s is not None and s.status is SequenceStatus.DECODE
            )
            sequence = self._slots[top]
            if sequence is None or None not in self._slots[:top]:
                return tuple(moves)
            free = self._slots.index(None)
            moves.append(SlotMove(top, free, sequence.computed))
            self._slots[free], self._slots[top] = sequence, None
            sequence.slot = free

    def _decode_rows(self) -> tuple[DecodeRow, ...]:
        top = max(i for i, s in enumerate(self._slots) if s is not None and s.status is SequenceStatus.DECODE)
        rows = []
        for sequence in self._slots[: top + 1]:
            if sequence is None:
                rows.append(DecodeRow(None, 0, 1))
            elif sequence.status is SequenceStatus.DECODE:
                rows.append(DecodeRow(sequence, sequence.token_ids[-1], len(sequence.token_ids)))
            else:  # its prompt is under way: the next chunk overwrites the position written here
                rows.append(DecodeRow(None, 0, sequence.computed + 1))
        return tuple(rows)
