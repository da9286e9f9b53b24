"""The turns that prompts and running sequences take, as a value that the scheduler replaces at each step."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from typing import Final

from llorch_serve.engine.sequence import Sequence


@dataclass(frozen=True, slots=True)
class Turn:
    """Whose turn it is: prompts and running sequences alternate.

    A turn begins with at most one chunk of a prompt. Then every running sequence gets at least one token:
    some from the check of their draft, each in a step of its own, or all from one decode batch, which ends
    the turn.

    prompt_ran: a chunk has been run in this turn.
    guessed: a draft model has been asked in this turn.
    checked: running sequences whose draft was checked in this turn.
    """

    prompt_ran: bool = False
    guessed: bool = False
    checked: frozenset[Sequence] = frozenset()

    def among(self, decoding: Seq[Sequence]) -> Turn:
        """Return the same turn without the sequences that have ended; a new one if all others were
        checked.
        """
        checked = self.checked.intersection(decoding)
        return NEW_TURN if len(checked) == len(decoding) else replace(self, checked=checked)


NEW_TURN: Final = Turn()
