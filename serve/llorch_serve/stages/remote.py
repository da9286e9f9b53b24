"""Both ends of a port whose stage is in another process: messages of bytes in, messages of bytes out.

What carries them does not matter here: a socket of this machine does, and an actor of a cluster does.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Final

import numpy as np

from llorch_serve.engine.containment import FAILED_CALLS
from llorch_serve.engine.load import StageTimes
from llorch_serve.engine.plan import SlotEdit
from llorch_serve.runtime.bound_graph import Logits
from llorch_serve.runtime.stage_graph import Rows
from llorch_serve.stages import wire
from llorch_serve.stages.calls import StageCall
from llorch_serve.stages.stage import Stage

_NOTHING: Final = np.zeros((0, 0, 0), np.float32)


class RemotePort:
    """A stage elsewhere, as one lane reaches it. Implements :class:`llorch_serve.stages.calls.StagePort`.

    exchange: sends a message in parts and returns the answer, which stays as it is until the next one. Raises
        StageEndedError where there is none.
    memory: that the stage writes logits to; None: they are in messages.
    """

    def __init__(self, exchange: Callable[[wire.Buffers], memoryview], memory: Logits | None = None) -> None:
        self._exchange = exchange
        self._memory = memory
        self._times = StageTimes()

    def run(self, call: StageCall) -> Rows:
        """Make a call."""
        return self._ask(wire.ask_run(call))

    def edit(self, edit: SlotEdit) -> None:
        """Edit the lane's slots."""
        self._ask(wire.ask_edit(edit))

    def times(self) -> StageTimes:
        """Return what the stage told last to this lane."""
        return self._times

    def told(self, times: StageTimes) -> None:
        """Take what the stage told by way of the stages behind it."""
        self._times = times

    def _ask(self, question: wire.Buffers) -> Rows:
        rows, (times,) = read_answer(self._exchange(question), self._memory)
        self._times = times
        return rows


def read_answer(message: memoryview, memory: Logits | None = None) -> tuple[Rows, tuple[StageTimes, ...]]:
    """Return an answer's rows, and the times of the stages that it tells of. Raises what it tells of."""
    header, rows = wire.unpack_answer(message, memory)
    if isinstance(header, wire.Failed):
        raise wire.error_of(header)
    return rows, header.times


def answered(stage: Stage, lane: int, question: memoryview, memory: Logits | None = None) -> wire.Buffers:
    """Do what a lane's message asks of a stage; return the answer. memory: as of the lane's port.

    What a session raises where a call fails is an answer too, and so is what a stage before has failed with.
    Raises ValueError for what is no message, and whatever else the stage raises, after which nothing that it
    holds can be trusted.
    """
    header, rows = wire.unpack_question(question)
    found: Rows = _NOTHING
    before: tuple[StageTimes, ...] = ()
    try:
        if isinstance(header, wire.Failed):
            return wire.pack(header)
        if isinstance(header, wire.Run):
            found, before = stage.run(lane, wire.asked_call(header, rows)), header.times
        else:
            stage.edit(lane, wire.asked_edit(header))
    except FAILED_CALLS as error:
        return wire.failed(error)
    return wire.done(found, memory, (*before, stage.times))


def handed_on(stage: Stage, lane: int, question: memoryview) -> wire.Buffers:
    """Make a lane's call in a stage before the last; return what the stage behind it is asked: the call with
    this one's rows, or the failure to pass on. Raises as :func:`answered` does.
    """
    header, rows = wire.unpack_question(question)
    if isinstance(header, wire.Failed):
        return wire.pack(header)
    if not isinstance(header, wire.Run):
        raise ValueError(f"{type(header).__name__} is no call")
    call = wire.asked_call(header, rows)
    try:
        found = stage.run(lane, call)
    except FAILED_CALLS as error:
        return wire.failed(error)
    return wire.ask_run(replace(call, rows=found), (*header.times, stage.times))
