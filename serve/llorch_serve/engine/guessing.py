"""Which running sequences are guessed for, which guesses are checked, and what came of them.

The scheduler asks it at each step; the payoff, where there is one, decides whether a check is made at all.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

from llorch_serve.engine.payoff import Payoff
from llorch_serve.engine.plan import DraftBatch, DraftRow, Result, VerifyChunk
from llorch_serve.engine.sequence import Sequence
from llorch_serve.engine.turn import Turn


@dataclass(slots=True)
class Guessing:
    """Plans guesses and checks. payoff: None: every guess is checked.

    drafted, accepted: tokens that were guessed and checked so far, and how many of them were right.
    """

    payoff: Payoff | None = None
    drafted: int = 0
    accepted: int = 0

    def next_batch(self, decoding: Seq[Sequence], turn: Turn) -> DraftBatch | None:
        """Return what a draft model should guess for these sequences in this turn, or None."""
        if turn.guessed:
            return None
        rows = []
        for sequence in decoding:
            if sequence.draft is None or sequence in turn.checked or sequence.draft.draft(1):
                continue
            most = self._most(sequence)
            if most < 1 or not self._is_worth(sequence, len(decoding)):
                continue
            if self.payoff is not None:
                most = self.payoff.length(sequence.drafts.lately, most)
            assert sequence.cache.slot is not None
            rows.append(DraftRow(sequence, sequence.cache.slot, most))
        return DraftBatch(tuple(rows)) if rows else None

    def take(self, batch: DraftBatch, guesses: Seq[Seq[int]]) -> None:
        """Take what a draft model guessed for each row, nothing for one that it was not ready for."""
        for row, guess in zip(batch.rows, guesses, strict=True):
            if row.sequence.draft is not None:
                row.sequence.draft.propose(guess)

    def next_check(self, decoding: Seq[Sequence], turn: Turn) -> VerifyChunk | None:
        """Return the check of the first draft that one of these sequences has in this turn, or None."""
        for sequence in decoding:
            if sequence.guesses is None or sequence in turn.checked or self._most(sequence) < 1:
                continue
            # A draft model's guess is paid for already. One from the text is only looked for where it is
            # checked, since the search takes time too.
            if sequence.draft is None and not self._is_worth(sequence, len(decoding)):
                continue
            if draft := sequence.guesses.draft(self._most(sequence)):
                assert sequence.cache.slot is not None
                tokens = (sequence.token_ids[-1], *draft)
                return VerifyChunk(sequence, sequence.cache.slot, tokens, sequence.cache.computed)
        return None

    def note_check(self, check: VerifyChunk, result: Result, *, seconds: float, running: int) -> None:
        """Count a checked draft: of the tokens that came of it, all but the last were guessed.

        seconds: that the check took. running: sequences that decode.
        """
        sequence, cache = check.sequence, check.sequence.cache
        cache.written = max(cache.written, check.start + len(check.token_ids))
        if isinstance(result, Exception) or not result.token_ids:
            return
        drafted, accepted = len(check.draft), len(result.token_ids) - 1
        cache.computed += accepted + 1
        if sequence.lookup is not None:
            sequence.lookup.learn(drafted=drafted, accepted=accepted)
        if self.payoff is not None:
            record = sequence.drafts.lately
            self.payoff.checked(
                record,
                drafted=drafted,
                accepted=accepted,
                seconds=seconds,
                running=running,
                generated=sequence.generated,
            )
        sequence.drafts.drafted += drafted
        sequence.drafts.accepted += accepted
        self.drafted += drafted
        self.accepted += accepted

    def note_decode(self, rows: int, seconds: float) -> None:
        """Take note of how long a decode call of so many rows took."""
        if self.payoff is not None:
            self.payoff.decoded(rows, seconds)

    def note_end(self, sequence: Sequence) -> None:
        """Take note of how long an answer has become."""
        if self.payoff is not None:
            self.payoff.ended(sequence.generated)

    def _most(self, sequence: Sequence) -> int:
        """Return how many tokens a guess may have: one comes of the check in any case."""
        assert sequence.guesses is not None
        return min(sequence.guesses.max_draft, sequence.left - 1)

    def _is_worth(self, sequence: Sequence, running: int) -> bool:
        return self.payoff is None or self.payoff.worth(
            sequence.drafts.lately,
            most=self._most(sequence),
            running=running,
            generated=sequence.generated,
            left=sequence.left,
            behind=0 if sequence.draft is None else sequence.draft.behind,
        )
