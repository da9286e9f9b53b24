"""One stage in the process that runs it: its loaded graphs, and for each lane a cache and graphs bound to it.

One call runs at a time, whichever lane's it is. Edits of a lane's slots need not wait, since a lane makes one
call at a time and edits only between its calls.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from llorch_serve.cache.kv_cache import SlotCache
from llorch_serve.engine.load import StageTimes
from llorch_serve.engine.plan import SlotCopy, SlotEdit, SlotRelease, SlotSwap
from llorch_serve.providers import Placement
from llorch_serve.runtime.session import SessionGraphs
from llorch_serve.runtime.stage_graph import CrossingRows, Rows
from llorch_serve.stages.calls import StageCall


@dataclass(frozen=True, slots=True)
class LanePart:
    """What a stage has for one lane.

    rows: where its graphs find what crosses to them. gives_logits: it is the last stage's.
    """

    cache: SlotCache
    graphs: SessionGraphs
    rows: CrossingRows
    gives_logits: bool


@dataclass(frozen=True, slots=True)
class StageFacts:
    """What a lane must know of a loaded stage.

    where: its nodes run. batched: one call takes a token of each of several slots. max_rows: most tokens of
        one sequence in a call; None: any number. needs_one_logits_row: the runtime fails in a call that asks
        for no row of logits.
    """

    where: Placement
    batched: bool
    max_rows: int | None
    needs_one_logits_row: bool


class Stage:
    """A loaded stage. parts: one for each lane. facts: see :class:`StageFacts`."""

    def __init__(
        self, parts: Sequence[LanePart], facts: StageFacts, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self.facts = facts
        self._parts = parts
        self._clock = clock
        self._one_at_a_time = threading.Lock()
        self._times = StageTimes()

    @property
    def times(self) -> StageTimes:
        """How long it has worked so far."""
        return self._times

    @property
    def is_last(self) -> bool:
        """Tell whether it gives logits, and no rows for a stage behind it."""
        return self._parts[0].gives_logits

    def run(self, lane: int, call: StageCall) -> Rows:
        """Make a lane's call. See :meth:`llorch_serve.stages.calls.StagePort.run`."""
        asked = self._clock()
        with self._one_at_a_time:
            began = self._clock()
            try:
                return _run(self._parts[lane], call)
            finally:
                done, before = self._clock(), self._times
                self._times = StageTimes(
                    before.calls + 1, before.busy_s + done - began, before.waiting_s + began - asked
                )

    def edit(self, lane: int, edit: SlotEdit) -> None:
        """Edit a lane's slots. See :meth:`llorch_serve.stages.calls.StagePort.edit`."""
        part = self._parts[lane]
        handoff = part.graphs.handoff
        match edit:
            case SlotCopy(source, target, tokens):
                part.cache.copy(source, target, tokens)
                if handoff is not None:
                    handoff.overwritten(target)
            case SlotSwap(first, second, tokens):
                part.cache.swap(first, second, tokens)
                if handoff is not None:
                    handoff.swapped(first, second)
            case SlotRelease(slot, keep):
                part.cache.release(slot, keep)


def _run(part: LanePart, call: StageCall) -> Rows:
    """Run a call on the graph that is for it, prompts in their own cache where they have one."""
    ids, wanted = call.token_ids, call.wanted
    if call.rows is not None:
        part.rows.values, ids = call.rows, range(len(ids))
    if not part.gives_logits:
        wanted = range(len(ids))
    handoff = part.graphs.handoff
    if not call.prompt:
        found = part.graphs.decode.run(call.first, ids, call.lengths, wanted)
    elif handoff is None:
        found = part.graphs.prompts.run(call.first, ids, call.lengths, wanted)
    else:
        (length,) = call.lengths
        handoff.begin(call.first, length - len(ids))
        found = part.graphs.prompts.run(0, ids, call.lengths, wanted)
        handoff.end(length)
    return found if part.gives_logits else found.transpose(1, 0, 2)


@dataclass(frozen=True, slots=True)
class LocalPort:
    """A stage of this process, as one lane reaches it. Implements
    :class:`llorch_serve.stages.calls.StagePort`.
    """

    stage: Stage
    lane: int

    def run(self, call: StageCall) -> Rows:
        """Make a call, on the caller's thread."""
        return self.stage.run(self.lane, call)

    def edit(self, edit: SlotEdit) -> None:
        """Edit the lane's slots."""
        self.stage.edit(self.lane, edit)

    def times(self) -> StageTimes:
        """Return how long the stage has worked."""
        return self.stage.times
