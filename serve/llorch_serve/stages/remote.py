"""Both ends of a port whose stage is in another process: messages of bytes in, messages of bytes out.

What carries them does not matter here: a socket of this machine does, and an actor of a cluster could.
"""

from __future__ import annotations

from collections.abc import Callable
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
        """Return what the stage told with its last answer to this lane."""
        return self._times

    def _ask(self, question: wire.Buffers) -> Rows:
        header, rows = wire.unpack_answer(self._exchange(question), self._memory)
        if isinstance(header, wire.Failed):
            raise wire.error_of(header)
        self._times = StageTimes(header.calls, header.busy_s, header.waiting_s)
        return rows


def answered(stage: Stage, lane: int, question: memoryview, memory: Logits | None = None) -> wire.Buffers:
    """Do what a lane's message asks of a stage; return the answer. memory: as of the lane's port.

    What a session raises where a call fails is an answer too. Raises ValueError for what is no message, and
    whatever else the stage raises, after which nothing that it holds can be trusted.
    """
    header, rows = wire.unpack_question(question)
    found = _NOTHING
    try:
        if isinstance(header, wire.Run):
            found = stage.run(lane, wire.asked_call(header, rows))
        else:
            stage.edit(lane, wire.asked_edit(header))
    except FAILED_CALLS as error:
        return wire.failed(error)
    times = stage.times
    return wire.done(found, memory, calls=times.calls, busy_s=times.busy_s, waiting_s=times.waiting_s)
