"""Several engines of one model side by side, each with sequences, slots and a thread of its own.

While the call of one is in one stage of the model, the calls of others are in other stages. A request is in
one lane from its beginning to its end, with all of its sequences, so that they share what its cache holds.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from collections.abc import Sequence as Seq
from typing import Final, Protocol

from llorch_serve.engine.loop import EngineLoop, SteppedEngine
from llorch_serve.engine.sequence import Sequence, TokenEvent

WORTH_TOKENS: Final = 256
"""Tokens of a prompt that a lane must hold beyond what others do for a request to go there although the lane
has one sequence more: about what one call of a prompt takes. Lanes of unequal size leave stages idle.
"""

MOST_AHEAD: Final = 1
"""Sequences that a lane may have beyond the emptiest one and still be chosen for what it holds."""


class LaneEngine(SteppedEngine, Protocol):
    """What lanes need of :class:`llorch_serve.engine.engine.Engine`."""

    @property
    def slots(self) -> int:
        """Return how many sequences run at once."""

    def held(self, sequence: Sequence) -> int:
        """Return how many tokens of a prompt the cache holds; from any thread, as of about now."""


class Lanes:
    """Has the methods of :class:`llorch_serve.engine.loop.EngineLoop`, for one engine or several.

    on_events: as there, of one lane at a time. on_death: told the first error that a lane ends with; the
        others end after their step.
    """

    def __init__(
        self,
        engines: Seq[LaneEngine],
        on_events: Callable[[list[TokenEvent]], list[Sequence]],
        on_death: Callable[[BaseException], None],
    ) -> None:
        self._engines = engines
        self._on_events = on_events
        self._on_death = on_death
        self._telling = threading.Lock()
        self._adding = threading.Lock()
        self._dying = threading.Lock()
        self._dead = False
        self._loops = [EngineLoop(engine, self._tell, self.die) for engine in engines]

    def start(self) -> None:
        """Start the threads."""
        for loop in self._loops:
            loop.start()

    def add(self, *sequences: Sequence) -> None:
        """Queue the sequences of one request in one lane; any thread."""
        with self._adding:
            self._choose(sequences[0]).add(*sequences)

    def abort(self, sequence: Sequence) -> None:
        """End a sequence, in whichever lane it is. Any thread; idempotent."""
        for loop in self._loops:
            loop.abort(sequence)

    def stop(self) -> None:
        """Cancel what is live and end the threads; returns when they have ended."""
        for loop in self._loops:
            loop.end()
        for loop in self._loops:
            loop.stop()

    def _choose(self, sequence: Sequence) -> EngineLoop:
        """Return the emptiest lane, or one that is nearly as empty and holds much more of the prompt.

        Lanes with a free slot come before all others; of full ones, the emptiest has the shortest queue.
        """
        if len(self._loops) == 1:
            return self._loops[0]
        live = [loop.live for loop in self._loops]
        held = [engine.held(sequence) for engine in self._engines]
        slots = [engine.slots for engine in self._engines]
        lanes = [lane for lane, own in enumerate(slots) if live[lane] < own]
        if not lanes:
            lanes = list(range(len(slots)))
            live = [count - own for count, own in zip(live, slots, strict=True)]
        fewest = min(live[lane] for lane in lanes)
        emptiest = max((lane for lane in lanes if live[lane] == fewest), key=lambda lane: held[lane])
        nearly = [lane for lane in lanes if live[lane] <= fewest + MOST_AHEAD]
        fullest = max(nearly, key=lambda lane: held[lane])
        worth = held[fullest] >= held[emptiest] + WORTH_TOKENS
        return self._loops[fullest if worth else emptiest]

    def _tell(self, events: list[TokenEvent]) -> list[Sequence]:
        # Whoever is told need not know of lanes: sinks hear of one step at a time.
        with self._telling:
            return self._on_events(events)

    def die(self, error: BaseException) -> None:
        """End all lanes because of what has happened in one of them, or elsewhere. Any thread; once."""
        with self._dying:
            first, self._dead = not self._dead, True
        if first:
            for loop in self._loops:
                loop.end()
            with self._telling:
                self._on_death(error)
