"""Decides what each step computes, as plain data: no numpy, no runtime, no clock.

A step is one call of the model: a chunk of one prompt, the check of one sequence's draft, or one token of
every running sequence. Prompts and running sequences take turns: between two chunks, every running sequence
gets at least one token, so a long prompt delays streams by one chunk at a time. Who starts next is the
waiting queue's choice, in which slot and from which cached prefix the slot table's.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Final

from llorch_serve.engine.chunking import shortened
from llorch_serve.engine.load import Load
from llorch_serve.engine.plan import DecodeRow, PrefillChunk, SharedStart, SlotEdit, StepPlan, VerifyChunk
from llorch_serve.engine.sequence import FinishReason, Sequence, SequenceStatus, TokenEvent
from llorch_serve.engine.slots import SHORTEST_REUSE, SlotTable
from llorch_serve.engine.waiting import DEFAULT_MOST_TOKENS, WaitingQueue

_ROW_BLOCK: Final = 32
"""The attention kernel's blocks of query rows are multiples of this; how large depends on head size and
processor. A row that is left over is computed by another kernel, whose last bits differ.
"""

MOST_DRAFTING: Final = 4
"""Running sequences beyond which drafts are not checked: each check is a call of its own, while a decode call
serves all of them at once."""

Sampled = Seq[int] | Exception
"""The tokens a sequence got in a step, none if its grammar lets nothing follow, or why there was an error."""


class Scheduler:
    """Owns the waiting queue and the slots.

    budget: tokens that the KV cache may hold over all slots; at least as many as one sequence may have.
    kv_cache: False forgets the cache after every token and computes the whole sequence anew.
    prefix_cache, strict_reuse, shortest_reuse: see :class:`llorch_serve.engine.slots.SlotTable`.
    most_drafting: running sequences up to which drafts are checked.
    doubling: position from which a prompt's token costs twice as much; beside running sequences later chunks
        are shorter by that. None: they are not.
    """

    def __init__(
        self,
        *,
        slots: int,
        budget: int,
        prefill_chunk: int,
        max_waiting: int,
        max_waiting_tokens: int = DEFAULT_MOST_TOKENS,
        kv_cache: bool = True,
        prefix_cache: bool = True,
        strict_reuse: bool = False,
        shortest_reuse: int = SHORTEST_REUSE,
        most_drafting: int = MOST_DRAFTING,
        doubling: int | None = None,
    ) -> None:
        self._slots = slots
        self._budget = budget
        self._table = SlotTable(
            slots,
            budget=budget,
            prefix_cache=prefix_cache and kv_cache,
            strict_reuse=strict_reuse,
            shortest_reuse=shortest_reuse,
        )
        self._waiting = WaitingQueue(max_waiting, max_waiting_tokens)
        self._prefill_chunk = prefill_chunk
        self._kv_cache = kv_cache
        self._most_drafting = most_drafting
        self._doubling = doubling
        self._prefilled_last = False
        self._checked: set[Sequence] = set()  # running sequences whose draft was checked in this turn
        self._prompt_tokens = self._cached_tokens = self._generated_tokens = 0
        self._drafted_tokens = self._accepted_tokens = 0

    def add(self, *sequences: Sequence) -> None:
        """Queue sequences, all or none. Raises QueueFullError."""
        assert all(sequence.most_tokens <= self._budget for sequence in sequences)
        self._waiting.add(*sequences)

    def remove(self, sequence: Sequence, *, keep_cache: bool = True) -> None:
        """Forget a sequence, wherever it is; its slot is free at once.

        keep_cache: what its slot holds may serve others; False where the numbers themselves are in doubt.
        """
        if sequence.status is SequenceStatus.FINISHED:
            return
        if sequence.slot is not None:
            self._table.take_back(sequence, keep=keep_cache)
        else:
            self._waiting.take(sequence)
        self._waiting.leave(sequence)
        sequence.status = SequenceStatus.FINISHED

    def lose(self, edits: Seq[SlotEdit]) -> list[Sequence]:
        """Take note that a plan's edits from one on were not carried out, and nothing of the plan after them.

        Returns the sequences whose slots they were to change, which the caller removes.
        """
        return self._table.lose(edits)

    @property
    def waiting(self) -> int:
        """Sequences without a slot."""
        return len(self._waiting)

    @property
    def running(self) -> int:
        """Sequences with a slot."""
        return sum(1 for _ in self._table)

    def load(self) -> Load:
        """Return the figures of this moment."""
        return Load(
            running=self.running,
            waiting=self.waiting,
            slots=self._slots,
            kv_tokens_running=self._table.running_tokens,
            kv_tokens_idle=self._table.idle_tokens,
            kv_tokens_total=self._budget,
            prompt_tokens=self._prompt_tokens,
            cached_tokens=self._cached_tokens,
            generated_tokens=self._generated_tokens,
            drafted_tokens=self._drafted_tokens,
            accepted_tokens=self._accepted_tokens,
        )

    def schedule(self) -> StepPlan | None:
        """Return the next step, or None if there is nothing to do."""
        edits = self._table.compact()
        decoding = self._table.decoding()
        self._checked.intersection_update(decoding)
        if decoding and len(self._checked) == len(decoding):
            self._end_turn()
        if not self._checked and not (decoding and self._prefilled_last):
            prefilling = self._prefilling(edits)
            if prefilling is not None:
                self._prefilled_last = True
                if prefilling.pending == 0:
                    assert prefilling.slot is not None
                    return StepPlan(edits=tuple(edits), start=SharedStart(prefilling, prefilling.slot))
                return StepPlan(edits=tuple(edits), prefill=self._chunk(prefilling, shared=bool(decoding)))
        if not decoding:
            self._prefilled_last = False
            return None
        verify = self._check(decoding)
        if verify is not None:
            self._checked.add(verify.sequence)
            return StepPlan(edits=tuple(edits), verify=verify)
        self._end_turn()
        rows = tuple(DecodeRow(s, s.token_ids[-1], len(s.token_ids)) for s in decoding)
        return StepPlan(edits=tuple(edits), decode=rows)

    def update(self, plan: StepPlan, results: Seq[Sampled]) -> list[TokenEvent]:
        """Take what each of ``plan.sampled()`` got; return what happened."""
        if plan.prefill is not None:
            chunk, sequence = plan.prefill, plan.prefill.sequence
            if sequence.prefilled == chunk.start:
                sequence.prefilled += len(chunk.token_ids)
            sequence.computed += len(chunk.token_ids)
            sequence.written = max(sequence.written, sequence.computed)
            self._waiting.charge(sequence, len(chunk.token_ids))
        for row in plan.decode:
            row.sequence.computed += 1
            row.sequence.written = max(row.sequence.written, row.sequence.computed)
        if plan.verify is not None:
            end = plan.verify.start + len(plan.verify.token_ids)
            plan.verify.sequence.written = max(plan.verify.sequence.written, end)
        events = []
        if plan.prefill is not None and plan.prefill.sequence.max_new_tokens == 0:
            events += self._end_of_prompt(plan.prefill.sequence)
        for sequence, result in zip(plan.sampled(), results, strict=True):
            if plan.verify is not None and not isinstance(result, Exception) and result:
                self._learn(plan.verify, len(result))
            events += self._advance(sequence, result)
        return events

    def _end_of_prompt(self, sequence: Sequence) -> list[TokenEvent]:
        """End a sequence of which only the prompt is wanted, if that is done."""
        if sequence.pending:
            return []
        self.remove(sequence)
        return [TokenEvent(sequence, None, FinishReason.LENGTH)]

    def _learn(self, check: VerifyChunk, tokens: int) -> None:
        """Count a checked draft: of ``tokens`` that came of it, all but the last were guessed."""
        sequence, drafted, accepted = check.sequence, len(check.draft), tokens - 1
        assert sequence.lookup is not None
        sequence.computed += tokens
        sequence.lookup.learn(drafted=drafted, accepted=accepted)
        sequence.drafted += drafted
        sequence.accepted += accepted
        self._drafted_tokens += drafted
        self._accepted_tokens += accepted

    def _advance(self, sequence: Sequence, result: Sampled) -> list[TokenEvent]:
        if isinstance(result, Exception):
            self.remove(sequence, keep_cache=False)
            return [TokenEvent(sequence, None, error=result)]
        if not result:
            self.remove(sequence)
            return [TokenEvent(sequence, None, FinishReason.STOP)]
        events = []
        for token in result:
            events.append(self._append(sequence, token))
            if sequence.status is SequenceStatus.FINISHED:
                break
        return events

    def _append(self, sequence: Sequence, token: int) -> TokenEvent:
        self._waiting.charge(sequence, 1)
        self._generated_tokens += 1
        if token in sequence.stop_ids:
            self.remove(sequence)
            return TokenEvent(sequence, token, FinishReason.STOP, is_stop_token=True)
        sequence.token_ids.append(token)
        if sequence.generated == sequence.complete_at:
            self.remove(sequence)
            return TokenEvent(sequence, token, FinishReason.STOP)
        if sequence.generated >= sequence.max_new_tokens:
            self.remove(sequence)
            return TokenEvent(sequence, token, FinishReason.LENGTH)
        if sequence.lookup is not None:
            sequence.lookup.extend((token,))
        sequence.status = SequenceStatus.DECODE
        if not self._kv_cache:
            sequence.status, sequence.computed = SequenceStatus.PREFILL, 0
        return TokenEvent(sequence, token)

    def _end_turn(self) -> None:
        """Every running sequence has got a token since the last chunk of a prompt."""
        self._checked.clear()
        self._prefilled_last = False

    def _prefilling(self, edits: list[SlotEdit]) -> Sequence | None:
        """Return the sequence whose prompt is under way, else start the next waiting one if there is room for
        it.
        """
        for sequence in self._table:
            if sequence.status is SequenceStatus.PREFILL:
                return sequence
        following = self._waiting.next()
        if following is None or not self._table.has_room(following):
            return None
        self._waiting.take(following)
        # Answers that share a prompt stand in one line behind the one that computes it, and one prompt is
        # under way at a time.
        shared = self._kv_cache and following.shared is not None and following.shared.computed
        edits += self._table.give(following, whole_prompt=shared)
        following.status = SequenceStatus.PREFILL
        if following.pending == 0:
            return following  # the prompt has been counted
        self._prompt_tokens += following.prompt_length
        self._cached_tokens += following.cached_tokens
        return following

    def _chunk(self, sequence: Sequence, *, shared: bool) -> PrefillChunk:
        """Return the next part of a prompt; shared: running sequences wait for it."""
        assert sequence.slot is not None
        # A row's last bits depend on whether it runs alone or beside other rows of its sequence. So that a
        # recomputed answer repeats the first one exactly, its tokens go one by one here too.
        rest = sequence.prompt_length - sequence.computed
        most = self._prefill_chunk
        if shared and self._doubling is not None:
            most = shortened(most, sequence.computed, self._doubling)
        count = min(most, rest) if rest > 0 else 1
        if sequence.prompt_scores is not None:
            count = sequence.prompt_scores.limit(sequence.computed, count)
        # Neither a chunk's rest nor a chunk may leave a single row for the attention kernel, which takes rows
        # in blocks of a multiple of _ROW_BLOCK.
        while count > 2 and (rest - count == 1 or count % _ROW_BLOCK == 1):
            count -= 1
        start = sequence.computed
        return PrefillChunk(
            sequence=sequence,
            slot=sequence.slot,
            token_ids=tuple(sequence.token_ids[start : start + count]),
            start=start,
            samples=count == sequence.pending and sequence.max_new_tokens > 0,
            scored=range(0)
            if sequence.prompt_scores is None
            else sequence.prompt_scores.wanted(start, count),
        )

    def _check(self, decoding: list[Sequence]) -> VerifyChunk | None:
        """Return the next running sequence's draft to check, or None if this turn's are done."""
        if len(decoding) > self._most_drafting:
            return None
        for sequence in decoding:
            if sequence.lookup is None or sequence in self._checked:
                continue
            # One token comes of the check in any case, so the draft may be one shorter than what is still
            # allowed.
            draft = sequence.lookup.draft(sequence.max_new_tokens - sequence.generated - 1)
            if draft:
                assert sequence.slot is not None
                tokens = (sequence.token_ids[-1], *draft)
                return VerifyChunk(sequence, sequence.slot, tokens, sequence.computed)
        return None
