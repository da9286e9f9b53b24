"""The calls of one lane through stages in processes of their own: into the first one, out of the last one.

What crosses a cut goes from process to process. The lane is woken once for a call, not once for each stage,
and does not copy rows that it has no use for.
"""

from __future__ import annotations

import queue
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from llorch_serve.errors import StageEndedError
from llorch_serve.runtime.bound_graph import Logits
from llorch_serve.runtime.stage_graph import Rows
from llorch_serve.stages import wire
from llorch_serve.stages.calls import StageCall
from llorch_serve.stages.ending import Ending
from llorch_serve.stages.framing import Messages
from llorch_serve.stages.remote import RemotePort, read_answer

_END_S: Final = 10.0  # for what has closed a connection to be known to have ended


@dataclass(frozen=True, slots=True)
class Links:
    """One stage's connections to its neighbours, one of each for every lane.

    taken: that calls come by. given: that they go on by: to the next stage, or to the lane.
    """

    taken: tuple[socket.socket, ...]
    given: tuple[socket.socket, ...]

    def close(self) -> None:
        """Close these ends, which the stage's process has of its own."""
        for end in (*self.taken, *self.given):
            end.close()


@dataclass(frozen=True, slots=True)
class LaneEnds:
    """A lane's ends: calls go in by ``first``, and answers come out by ``last``."""

    first: Messages
    last: Messages

    def close(self) -> None:
        """Close them; who waits for an answer learns of it. Idempotent."""
        self.first.close()
        self.last.close()


def connect(stages: int, lanes: int) -> tuple[tuple[Links, ...], tuple[LaneEnds, ...]]:
    """Return the connections of each stage, and those of each lane."""
    pairs = [[socket.socketpair() for _ in range(lanes)] for _ in range(stages + 1)]
    into, out_of = ([[pair[side] for pair in row] for row in pairs] for side in (1, 0))
    links = tuple(Links(tuple(into[n]), tuple(out_of[n + 1])) for n in range(stages))
    ends = zip(out_of[0], into[stages], strict=True)
    return links, tuple(LaneEnds(Messages(first), Messages(last)) for first, last in ends)


class Relay:
    """All stages as one lane calls them. Implements :class:`llorch_serve.stages.calls.StageCallee`; edits go
    to each stage by its own port.

    ports: of the stages, which are told how long those worked. memory: that the last one writes logits to;
    None: they are in messages. endings: of the stages.
    """

    def __init__(
        self,
        ends: LaneEnds,
        ports: Sequence[RemotePort],
        memory: Logits | None,
        endings: Sequence[Ending],
    ) -> None:
        self._ends = ends
        self._ports = ports
        self._memory = memory
        self._failures: queue.SimpleQueue[StageEndedError] = queue.SimpleQueue()
        for ending in endings:
            ending.when_ended(self._failures.put)

    def run(self, call: StageCall) -> Rows:
        """Make a call; return the last stage's logits."""
        try:
            self._ends.first.send(wire.ask_run(call))
            answer = self._ends.last.receive()
        except OSError:
            answer = None
        if answer is None:
            raise self._failure()
        rows, times = read_answer(answer, self._memory)
        for port, own in zip(self._ports, times, strict=True):
            port.told(own)
        return rows

    def close(self) -> None:
        """Close the lane's ends; who waits for an answer learns of it. Idempotent."""
        self._failures.put(StageEndedError("the stages have been closed"))
        self._ends.close()

    def _failure(self) -> StageEndedError:
        """Return how the stage that ended has ended: the others' connections close after its own."""
        try:
            failure = self._failures.get(timeout=_END_S)
            self._failures.put(failure)  # for the next call, which ends as this one
            return failure
        except queue.Empty:
            return StageEndedError("a stage has closed its connection; start the worker again")
