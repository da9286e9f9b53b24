"""What is kept about one sequence that a draft model guesses for."""

from __future__ import annotations

from collections.abc import Sequence


class ModelDraft:
    """The guess that has not been checked yet, and how far the draft model is.

    max_draft: most tokens in a guess.
    behind: tokens of the sequence that the draft model has not read, as of its start or its last guess.
    """

    def __init__(self, *, max_draft: int, behind: int) -> None:
        self.max_draft = max_draft
        self.behind = behind
        self._guess: tuple[int, ...] = ()

    def propose(self, token_ids: Sequence[int]) -> None:
        """Take a guess of what follows the sequence as it is."""
        self._guess = tuple(token_ids)

    def stop(self) -> None:
        """Guess no more: the draft model cannot hold the sequence, or say what follows it."""
        self.max_draft = 0

    def extend(self, token_ids: Sequence[int]) -> None:
        """Append tokens of the sequence: the guess goes on behind them, if it began with them."""
        count = len(token_ids)
        self._guess = self._guess[count:] if self._guess[:count] == tuple(token_ids) else ()
        self.behind += count

    def draft(self, limit: int) -> tuple[int, ...]:
        """Return at most ``limit`` tokens that may follow; empty if there is no guess."""
        return self._guess[: max(limit, 0)]
