"""Decides what each step computes, as plain data: no numpy, no runtime, no clock.

A step is one call of the model: a chunk of one prompt, the check of one sequence's draft, or one token of
every running sequence; or a draft model guesses for several of these. Prompts and running sequences take
turns: between two chunks, every running sequence gets at least one token, so a long prompt delays streams by
one chunk at a time. Who starts next is the waiting queue's choice, in which slot and from which cached prefix
the slot table's, and which guesses are checked that of ``guessing.py``.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace

from llorch_serve.engine.chunking import chunk_length, shortened
from llorch_serve.engine.guessing import Guessing
from llorch_serve.engine.load import Load
from llorch_serve.engine.plan import (
    DecodeBatch,
    DecodeRow,
    DraftBatch,
    PrefillChunk,
    Result,
    SharedStart,
    SlotEdit,
    StepPlan,
    VerifyChunk,
)
from llorch_serve.engine.reuse import SHORTEST_REUSE
from llorch_serve.engine.sequence import FinishReason, Sequence, SequenceStatus, TokenEvent
from llorch_serve.engine.slots import SlotTable
from llorch_serve.engine.turn import NEW_TURN, Turn
from llorch_serve.engine.waiting import DEFAULT_MOST_TOKENS, WaitingQueue


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """What a scheduler is made for.

    budget: tokens that the KV cache may hold over all slots; at least as many as one sequence may have.
    prefill_chunk: most tokens of a prompt in one step.
    max_waiting, max_waiting_tokens: see :class:`llorch_serve.engine.waiting.WaitingQueue`.
    kv_cache: False forgets the cache after every token and computes the whole sequence anew.
    prefix_cache, strict_reuse, shortest_reuse: see :class:`llorch_serve.engine.slots.SlotTable`.
    attention_crossover: position from which a prompt's token costs twice as much; while sequences run, later
        chunks are shorter by that. None: they are not.
    """

    slots: int
    budget: int
    prefill_chunk: int
    max_waiting: int
    max_waiting_tokens: int = DEFAULT_MOST_TOKENS
    kv_cache: bool = True
    prefix_cache: bool = True
    strict_reuse: bool = False
    shortest_reuse: int = SHORTEST_REUSE
    attention_crossover: int | None = None


@dataclass(slots=True)
class _TokenCounts:
    """Since the start; see :class:`llorch_serve.engine.load.Load`."""

    prompt: int = 0
    cached: int = 0
    generated: int = 0


class Scheduler:
    """Owns the waiting queue and the slots.

    guessing: plans guesses and their checks; by default all guesses are checked.
    """

    def __init__(self, config: SchedulerConfig, guessing: Guessing | None = None) -> None:
        self.guessing = guessing or Guessing()
        self._config = config
        self._table = SlotTable(
            config.slots,
            budget=config.budget,
            prefix_cache=config.prefix_cache and config.kv_cache,
            strict_reuse=config.strict_reuse,
            shortest_reuse=config.shortest_reuse,
        )
        self._waiting = WaitingQueue(config.max_waiting, config.max_waiting_tokens)
        self._turn = NEW_TURN
        self._counts = _TokenCounts()

    def add(self, *sequences: Sequence) -> None:
        """Queue sequences, all or none. Raises QueueFullError."""
        assert all(sequence.most_tokens <= self._config.budget for sequence in sequences)
        self._waiting.add(*sequences)

    def remove(self, sequence: Sequence, *, keep_cache: bool = True) -> None:
        """Forget a sequence, wherever it is; its slot is free at once.

        keep_cache: what its slot holds may serve others; False where the numbers themselves are in doubt.
        """
        if sequence.status is SequenceStatus.FINISHED:
            return
        if sequence.cache.slot is not None:
            self._table.take_back(sequence, keep=keep_cache)
        else:
            self._waiting.take(sequence)
        self._waiting.leave(sequence)
        sequence.status = SequenceStatus.FINISHED

    def fail(self, plan: StepPlan, missed_edits: Seq[SlotEdit]) -> list[Sequence]:
        """Remove and return the sequences that end because a plan was not carried out.

        missed_edits: the plan's edits from the one that failed on; none: its call failed.
        """
        failed = self._table.abandon(missed_edits) if missed_edits else plan.sequences()
        for sequence in failed:
            self.remove(sequence, keep_cache=False)
        return failed

    def held(self, sequence: Sequence) -> int:
        """Return how many tokens of a prompt the slots hold; from any thread, as of about now."""
        return self._table.held(sequence)

    @property
    def slots(self) -> int:
        """How many sequences run at once."""
        return self._config.slots

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
            slots=self._config.slots,
            kv_tokens_running=self._table.running_tokens,
            kv_tokens_idle=self._table.idle_tokens,
            kv_tokens_total=self._config.budget,
            prompt_tokens=self._counts.prompt,
            cached_tokens=self._counts.cached,
            generated_tokens=self._counts.generated,
            drafted_tokens=self.guessing.drafted,
            accepted_tokens=self.guessing.accepted,
        )

    def schedule(self) -> StepPlan | None:
        """Return the next step, or None if there is nothing to do."""
        edits, running = self._table.compact()
        decoding = [sequence for sequence in running if sequence.status is SequenceStatus.DECODE]
        turn = self._turn.among(decoding) if self._turn.checked else self._turn
        if not turn.checked and not (decoding and turn.prompt_ran):
            prompts = [sequence for sequence in running if sequence.status is SequenceStatus.PREFILL]
            following = self._waiting.next() if not prompts else None
            if following is not None and self._table.has_room(following):
                edits += self._start(following)
                prompts = [following]
            if prompts:
                self._turn = Turn(prompt_ran=True, guessed=turn.guessed)
                return StepPlan(self._prompt_call(prompts[0], wait=bool(decoding)), tuple(edits))
        self._turn = NEW_TURN
        if not decoding:
            return None
        if (batch := self.guessing.next_batch(decoding, turn)) is not None:
            self._turn = replace(turn, guessed=True)
            return StepPlan(batch, tuple(edits))
        if (check := self.guessing.next_check(decoding, turn)) is not None:
            self._turn = replace(turn, checked=turn.checked | {check.sequence})
            return StepPlan(check, tuple(edits))
        rows = tuple([DecodeRow(s, s.token_ids[-1], len(s.token_ids)) for s in decoding])
        return StepPlan(DecodeBatch(rows), tuple(edits))

    def update(self, plan: StepPlan, results: Seq[Result], seconds: float = 0.0) -> list[TokenEvent]:
        """Take what each of ``plan.sequences()`` got; return what happened. seconds: that the step took."""
        match plan.call:
            case DecodeBatch(rows=rows):
                sequences = [row.sequence for row in rows]
                self.guessing.note_decode(len(rows), seconds)
                for sequence in sequences:
                    cache = sequence.cache
                    cache.computed += 1
                    cache.written = max(cache.written, cache.computed)
            case PrefillChunk(sequence=sequence) as chunk:
                sequences = [sequence]
                self._note_chunk(chunk)
            case VerifyChunk(sequence=sequence) as check:
                sequences = [sequence]
                running = sum(each.status is SequenceStatus.DECODE for each in self._table)
                self.guessing.note_check(check, results[0], seconds=seconds, running=running)
            case SharedStart(sequence=sequence):
                sequences = [sequence]
            case DraftBatch():
                raise AssertionError("guesses are no tokens: Guessing takes them")
        events: list[TokenEvent] = []
        for sequence, result in zip(sequences, results, strict=True):
            events += self._advance(sequence, result)
        return events

    def _note_chunk(self, chunk: PrefillChunk) -> None:
        """Count the tokens of a chunk that has been computed."""
        cache, tokens = chunk.sequence.cache, len(chunk.token_ids)
        if cache.prefilled == chunk.start:
            cache.prefilled += tokens
        cache.computed += tokens
        cache.written = max(cache.written, cache.computed)
        self._waiting.charge(chunk.sequence, tokens)

    def _advance(self, sequence: Sequence, result: Result) -> list[TokenEvent]:
        """Append what a sequence got, up to its end; return an event for each token, or for its end."""
        if isinstance(result, Exception):
            self.remove(sequence, keep_cache=False)
            return [TokenEvent(sequence, None, error=result)]
        if not result.token_ids:
            finish = finish_reason(sequence, None, complete=result.complete)
            if finish is None:
                return []
            self.remove(sequence)
            return [TokenEvent(sequence, None, finish)]
        events, last = [], len(result.token_ids) - 1
        for place, token in enumerate(result.token_ids):
            finish = finish_reason(sequence, token, complete=result.complete and place == last)
            is_stop_token = token in sequence.limits.stop_ids
            scores = result.scores[place] if result.scores else None
            events.append(TokenEvent(sequence, token, finish, is_stop_token, scores=scores))
            self._waiting.charge(sequence, 1)
            self._counts.generated += 1
            if not is_stop_token:
                sequence.token_ids.append(token)
            if finish is not None:
                self.guessing.note_end(sequence)
                self.remove(sequence)
                break
            if sequence.guesses is not None:
                sequence.guesses.extend((token,))
            sequence.status = SequenceStatus.DECODE
            if not self._config.kv_cache:
                sequence.status, sequence.cache.computed = SequenceStatus.PREFILL, 0
        return events

    def _start(self, sequence: Sequence) -> list[SlotEdit]:
        """Give a slot to a waiting sequence; return the edits that bring what the cache holds of its
        prompt.
        """
        self._waiting.take(sequence)
        # Answers that share a prompt stand in one line behind the one that computes it, and one prompt is
        # under way at a time.
        shared = self._config.kv_cache and sequence.shared is not None and sequence.shared.computed
        edits = self._table.give(sequence, whole_prompt=shared)
        sequence.status = SequenceStatus.PREFILL
        if sequence.pending:  # else the prompt has been counted
            self._counts.prompt += sequence.prompt_length
            self._counts.cached += sequence.cache.reused
        return edits

    def _prompt_call(self, sequence: Sequence, *, wait: bool) -> PrefillChunk | SharedStart:
        """Return the next part of a prompt; wait: running sequences wait for it."""
        cache, scores = sequence.cache, sequence.prompt_scores
        assert cache.slot is not None
        if sequence.pending == 0:
            return SharedStart(sequence, cache.slot)
        most, start = self._config.prefill_chunk, cache.computed
        if wait and self._config.attention_crossover is not None:
            most = shortened(most, start, self._config.attention_crossover)
        count = chunk_length(sequence, most)
        return PrefillChunk(
            sequence=sequence,
            slot=cache.slot,
            token_ids=tuple(sequence.token_ids[start : start + count]),
            start=start,
            samples=count == sequence.pending and sequence.limits.max_new_tokens > 0,
            scored=range(0) if scores is None else scores.wanted(start, count),
        )


def finish_reason(sequence: Sequence, token_id: int | None, *, complete: bool) -> FinishReason | None:
    """Decide whether a sequence ends with its next token, which it does not hold yet; None if it goes on.

    token_id: None: there is none, since its grammar lets nothing follow or only its prompt was computed.
    complete: its grammar lets nothing follow the token.
    """
    if complete or token_id in sequence.limits.stop_ids:
        return FinishReason.STOP
    if token_id is None:
        return None if sequence.pending else FinishReason.LENGTH
    generated = len(sequence.token_ids) + 1 - sequence.prompt_length
    return FinishReason.LENGTH if generated >= sequence.limits.max_new_tokens else None
