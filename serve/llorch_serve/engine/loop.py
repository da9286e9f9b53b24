"""The one thread that owns the engine: commands in, token events out, both as plain data."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Protocol

from llorch_serve.engine.sequence import FinishReason, Sequence, TokenEvent
from llorch_serve.errors import QueueFullError


@dataclass(frozen=True, slots=True)
class _Add:
    sequences: tuple[Sequence, ...]


@dataclass(frozen=True, slots=True)
class _Abort:
    sequence: Sequence


@dataclass(frozen=True, slots=True)
class _Stop:
    pass


class SteppedEngine(Protocol):
    """What a loop needs of :class:`llorch_serve.engine.engine.Engine`, and of the one that embeds texts."""

    @property
    def live(self) -> Collection[Sequence]:
        """Sequences that have been added and have not ended."""

    def add(self, *sequences: Sequence) -> None:
        """Queue sequences, all or none. Raises QueueFullError."""

    def abort(self, sequence: Sequence) -> bool:
        """Forget a sequence. Return whether it was live."""

    def step(self) -> list[TokenEvent]:
        """Make one call of the model and return what came of it."""


class EngineLoop:
    """Steps an engine while it has work and sleeps while it has none.

    on_events: called on the loop's thread after each step that produced events; must not block. It returns
        the sequences that are to be aborted (a stop string was found), which takes effect before the next
        step.
    on_death: called once, on the loop's thread, if a step raises what the engine does not expect.
    """

    def __init__(
        self,
        engine: SteppedEngine,
        on_events: Callable[[list[TokenEvent]], list[Sequence]],
        on_death: Callable[[BaseException], None],
    ) -> None:
        self._engine = engine
        self._on_events = on_events
        self._on_death = on_death
        # Each is written by one thread: whoever adds, one at a time, and the loop's.
        self._added = self._taken = 0
        self._commands: queue.SimpleQueue[_Add | _Abort | _Stop] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._main, name="llorch-engine", daemon=True)

    @property
    def live(self) -> int:
        """Sequences that have been handed over and have not ended. Any thread, as of about now."""
        return len(self._engine.live) + self._added - self._taken

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def add(self, *sequences: Sequence) -> None:
        """Queue the sequences of one request, all or none; any thread, one at a time.

        Where the queue is full for them, the first one's event says so.
        """
        self._added += len(sequences)
        self._commands.put(_Add(sequences))

    def abort(self, sequence: Sequence) -> None:
        """End a sequence; its last event has reason CANCELLED. Any thread; idempotent."""
        self._commands.put(_Abort(sequence))

    def end(self) -> None:
        """Have the thread cancel what is live and end, after its step."""
        self._commands.put(_Stop())

    def stop(self) -> None:
        """Cancel what is live and end the thread; returns when it has ended."""
        self.end()
        self._thread.join()

    def _main(self) -> None:
        try:
            while self._take_commands():
                self._publish(self._engine.step())
        except BaseException as error:  # noqa: BLE001 - a dead engine must be reported, whatever killed it
            self._on_death(error)

    def _publish(self, events: list[TokenEvent]) -> None:
        if events:
            for sequence in self._on_events(events):
                self._engine.abort(sequence)

    def _take_commands(self) -> bool:
        """Carry out all commands that have arrived, waiting for one if there is no work. False: stop."""
        block = not self._engine.live
        while True:
            try:
                command = self._commands.get(block=block)
            except queue.Empty:
                return True
            match command:
                case _Stop():
                    self._publish(self._cancelled(list(self._engine.live)))
                    return False
                case _Add(sequences):
                    self._add(sequences)
                    block = False
                case _Abort(sequence):
                    cancelled = self._cancelled([sequence])
                    self._publish(cancelled)
                    block = bool(cancelled) and not self._engine.live

    def _add(self, sequences: tuple[Sequence, ...]) -> None:
        try:
            self._engine.add(*sequences)
        except QueueFullError as error:
            self._on_events([TokenEvent(sequences[0], None, error=error)])
        finally:
            self._taken += len(sequences)

    def _cancelled(self, sequences: list[Sequence]) -> list[TokenEvent]:
        """Abort sequences; return the last event of each that was live."""
        return [
            TokenEvent(sequence, None, FinishReason.CANCELLED)
            for sequence in sequences
            if self._engine.abort(sequence)
        ]
