"""What crosses between a lane and a stage: a call and its rows, edits of slots, and how long the stage took.

All of it is plain data. ``wire.py`` makes bytes of it and data of bytes, so that whatever carries bytes may
carry it: a socket here, an actor of a cluster elsewhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from llorch_serve.engine.load import StageTimes
from llorch_serve.engine.plan import SlotEdit
from llorch_serve.runtime.stage_graph import Rows


@dataclass(frozen=True, slots=True)
class StageCall:
    """One call of a lane as one stage gets it.

    prompt: it is a part of a prompt, for the graph that takes those.
    first: the first of the neighbouring slots that it runs on. lengths: tokens of each, these included.
    token_ids: slot by slot, as many for each slot; every stage is told, and the first one runs them.
    wanted: indices into ``token_ids`` whose logits the last stage returns.
    rows: what the stage before returned, [tensors, rows, width]; None for the first stage.
    """

    prompt: bool
    first: int
    lengths: Sequence[int]
    token_ids: Sequence[int]
    wanted: Sequence[int]
    rows: Rows | None = None


class StageCallee(Protocol):
    """One stage, or several one behind the other, as one lane calls them. One call at a time."""

    def run(self, call: StageCall) -> Rows:
        """Return what crosses to the next stage, [tensors, rows, width], or the last one's logits, [wanted,
        vocabulary]; valid until the next call.

        Raises what a session raises where a call fails, and StageEndedError where a stage is gone.
        """


class StagePort(StageCallee, Protocol):
    """One stage as one lane reaches it, wherever it runs. One call or edit at a time."""

    def edit(self, edit: SlotEdit) -> None:
        """Move what the stage's cache holds of the lane's slots. Raises as ``run``."""

    def times(self) -> StageTimes:
        """Return how long the stage has worked for all lanes, as far as it is known here. Any thread."""
