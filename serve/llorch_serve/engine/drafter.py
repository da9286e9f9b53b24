"""Guesses by a draft model: a smaller one of the same tokenizer, with a session of its own.

Its slots are those of the model: what the scheduler has moved there is moved here too. What a slot holds is
told by its tokens, which are compared with the sequence's own when it starts and before each guess; so wrong
guesses, aborted sequences and reused prefixes need no bookkeeping.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import Final

from llorch_serve.engine.draft import ModelDraft
from llorch_serve.engine.payoff import Payoff
from llorch_serve.engine.plan import DraftBatch, DraftRow, SlotCopy, SlotEdit, SlotRelease, SlotSwap
from llorch_serve.engine.reuse import common_prefix
from llorch_serve.engine.runner import Logits, Session, apply_edit
from llorch_serve.engine.sequence import Sequence
from llorch_serve.sampling.forecast import fitted, forecast

FEW: Final = 8
"""Tokens that are read by the graph that decodes; more of them go the way of prompts."""


@dataclass(frozen=True, slots=True)
class DraftLimits:
    """What bounds guesses.

    slots, context: of the draft's own cache. draft_vocab, vocab: rows of the draft's table, and of the
        model's.
    chunk: most tokens of a sequence that the draft reads in one step. most: most tokens in a guess.
    """

    slots: int
    context: int
    draft_vocab: int
    vocab: int
    chunk: int
    most: int


@dataclass(slots=True)
class _Slot:
    """What a slot of the draft's cache holds, from position 0, and for whom it was computed."""

    tokens: list[int] = field(default_factory=list)
    owner: Sequence | None = None


@dataclass(slots=True)
class _Row:
    """One sequence in a batch. guess: what has been guessed so far."""

    sequence: Sequence
    place: int
    most: int
    guess: list[int] = field(default_factory=list)

    @property
    def open(self) -> bool:
        """Whether another token is to be guessed: behind a stop token nothing follows."""
        guess = self.guess
        return len(guess) < self.most and not (guess and guess[-1] in self.sequence.limits.stop_ids)


class Drafter:
    """Owns the draft's session. Not thread-safe. payoff: is told what guesses cost.

    Its methods raise what the session raises.
    """

    def __init__(
        self,
        session: Session,
        limits: DraftLimits,
        payoff: Payoff | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._session = session
        self._limits = limits
        self._payoff = payoff
        self._clock = clock
        self._slots = [_Slot() for _ in range(limits.slots)]
        self._cold = False

    def begin(self, sequence: Sequence) -> ModelDraft:
        """Return what is kept about a sequence that is new."""
        if self._cold:
            self._cold = False
            self._warm_up()
        return ModelDraft(max_draft=self._limits.most, behind=sequence.prompt_length)

    def warm_up(self) -> None:
        """Have a call of each kind made as the next sequence begins, so that the first guess finds buffers
        ready; before there are sequences. Not at once: what a device records belongs to the thread that
        calls, which must be the one that guesses.
        """
        self._cold = True

    def _warm_up(self) -> None:
        count = min(FEW, self._limits.context - 2)
        if count < 1:  # nor is there room for a guess
            return
        self._session.prefill(0, (0,) * count, 0)
        self._session.verify(0, (0, 0), count - 1)
        self._session.decode((0,), (count,))

    def follow(self, edits: Seq[SlotEdit]) -> None:
        """Move what slots hold as the model's slots have been moved."""
        for edit in edits:
            match edit:
                case SlotCopy(source, target, tokens):
                    held = self._slots[source].tokens[:tokens]
                    if held:
                        apply_edit(self._session, SlotCopy(source, target, len(held)))
                    self._slots[target] = _Slot(held, self._slots[source].owner)
                case SlotSwap(first, second, _):
                    longest = max(len(self._slots[index].tokens) for index in (first, second))
                    if longest:
                        apply_edit(self._session, SlotSwap(first, second, longest))
                    self._slots[first], self._slots[second] = self._slots[second], self._slots[first]
                case SlotRelease(slot, keep):
                    apply_edit(self._session, edit)
                    del self._slots[slot].tokens[keep:]

    def start(self, sequence: Sequence, place: int) -> None:
        """Take note that a sequence has been given a slot, and how much of it the draft holds there: what is
        left to be read decides whether guesses pay.
        """
        if sequence.draft is not None:
            sequence.draft.behind = len(sequence.token_ids) - len(self._own(sequence, place))

    def forget(self) -> None:
        """Take all slots to hold nothing, since the model's have not been moved as planned."""
        self._slots = [_Slot() for _ in self._slots]

    def guess(self, batch: DraftBatch) -> list[tuple[int, ...]]:
        """Return what follows each row's sequence, as the draft takes it; nothing where the draft has still
        more of the sequence to read than it does in a step, or cannot hold it.
        """
        rows = [_Row(row.sequence, row.slot, self._most(row)) for row in batch.rows]
        able = [row for row in rows if row.most > 0]
        started = self._clock()
        if read := self._read(able):
            now = self._clock()
            if self._payoff is not None:
                self._payoff.caught_up(read, now - started)
            started = now
        ready = [row for row in able if self._behind(row) <= (FEW if len(able) == 1 else 1)]
        self._guess(ready)
        if self._payoff is not None:
            self._payoff.guessed(sum(len(row.guess) for row in ready), self._clock() - started)
        for row in rows:
            assert row.sequence.draft is not None
            row.sequence.draft.behind = self._behind(row)
        return [tuple(row.guess) for row in rows]

    def _most(self, row: DraftRow) -> int:
        """Return how many tokens can be guessed."""
        tokens, held = row.sequence.token_ids, self._own(row.sequence, row.slot)
        most = min(row.most, self._limits.context - len(tokens))
        if most < 1 or max(tokens[len(held) :]) >= self._limits.draft_vocab:
            assert row.sequence.draft is not None
            row.sequence.draft.stop()
            return 0
        return most

    def _own(self, sequence: Sequence, place: int) -> list[int]:
        """Return what a slot holds, once it holds nothing but the sequence's tokens, without its last."""
        slot = self._slots[place]
        if slot.owner is not sequence:
            # Of what others left it may use what the model's cache was shared with it, and no more: else the
            # time that a guess takes would tell it what they sent. What the model shared need not be from
            # whom the draft has it, as not every sequence is guessed for.
            del slot.tokens[sequence.cache.reused if _share(slot.owner, sequence) else 0 :]
            slot.owner = sequence
        del slot.tokens[common_prefix(slot.tokens, sequence.token_ids[:-1]) :]
        return slot.tokens

    def _behind(self, row: _Row) -> int:
        """Return how many of the sequence's tokens the slot lacks; at least the last one, which is run to
        guess.
        """
        return len(row.sequence.token_ids) - len(self._slots[row.place].tokens)

    def _read(self, rows: Seq[_Row]) -> int:
        """Read sequences up to their last token, some of them only in part; return how many tokens took the
        way of prompts.
        """
        if len(rows) > 1:
            # As after a guess that was right to its end: one call for all that are as far behind.
            if late := [row for row in rows if self._behind(row) == 2]:
                self._decode(late)
        elif all(self._behind(row) <= FEW for row in rows):
            return 0  # the call that guesses reads them too
        read = 0
        for row in rows:
            slot, tokens = self._slots[row.place], row.sequence.token_ids
            start = len(slot.tokens)
            part = tokens[start : min(len(tokens) - 1, start + self._limits.chunk - read)]
            if len(part) > FEW:
                self._session.prefill(row.place, part, start, ())
                read += len(part)
            elif part:
                self._session.verify(row.place, part, start)
            slot.tokens += part
        return read

    def _guess(self, rows: Seq[_Row]) -> None:
        ahead = 0
        while running := [row for row in rows if row.open]:
            logits = fitted(self._run(running), self._limits.vocab)
            own = [row.sequence.sampling for row in running if row.sequence.sampling is not None]
            for row, token in zip(running, forecast(logits, own, ahead), strict=True):
                if token is None and not row.guess:  # as of logits that are not finite, which come again
                    assert row.sequence.draft is not None
                    row.sequence.draft.stop()
                if token is None or token >= self._limits.draft_vocab:
                    row.most = len(row.guess)
                else:
                    row.guess.append(token)
            ahead += 1

    def _run(self, rows: Seq[_Row]) -> Logits:
        """Run what each row has that its slot lacks; return the logits behind it, [rows, vocabulary]."""
        if len(rows) == 1 and not rows[0].guess and self._behind(rows[0]) > 1:
            [row] = rows
            slot = self._slots[row.place]
            start = len(slot.tokens)
            slot.tokens += row.sequence.token_ids[start:]
            return self._session.verify(row.place, slot.tokens[start:], start)[-1:]
        logits = self._decode(rows)
        return logits if len(rows) == len(logits) else logits[[row.place for row in rows]]

    def _decode(self, rows: Seq[_Row]) -> Logits:
        """Run the next token of each row; return logits [slots up to the last row's, vocabulary].

        A slot in between runs some token behind what it holds, where its own will be written before it is
        read; one that is full runs its last one again.
        """
        for row in rows:
            held, tokens = self._slots[row.place].tokens, row.sequence.token_ids
            place = len(held)
            held.append(tokens[place] if place < len(tokens) else row.guess[place - len(tokens)])
        asked = {row.place for row in rows}
        token_ids, lengths = [], []
        for place, slot in enumerate(self._slots[: max(asked) + 1]):
            behind = place not in asked and len(slot.tokens) < self._limits.context
            token_ids.append(0 if behind else slot.tokens[-1])
            lengths.append(len(slot.tokens) + behind)
        return self._session.decode(token_ids, lengths)


def _share(first: Sequence | None, second: Sequence) -> bool:
    """Tell whether two sequences may start from what either leaves in the cache."""
    return first is not None and first.ownership.cache_salt == second.ownership.cache_salt
