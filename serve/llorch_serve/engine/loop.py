"""The one thread that owns the engine: commands in, token events out, both as plain data."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass

from llorch_serve.engine.engine import Engine
from llorch_serve.engine.sequence import FinishReason, Sequence, TokenEvent
from llorch_serve.errors import QueueFullError
from llorch_serve.sampling.sampler import SamplingRow


@dataclass(frozen=True, slots=True)
class _Add:
    entries: tuple[tuple[Sequence, SamplingRow], ...]


@dataclass(frozen=True, slots=True)
class _Abort:
    sequence: Sequence


@dataclass(frozen=True, slots=True)
class _Stop:
    pass


class EngineLoop:
    """Steps an engine while it has work and sleeps while it has none.

    on_events: called on the loop's thread after each step that produced events; must not block. It returns
        the sequences that are to be aborted (a stop string was found), which takes effect before the next
        step.
    on_death: called once, on the loop's thread, if a step raises what the engine does not expect.
    """

    def __init__(
        self,
        engine: Engine,
        on_events: Callable[[list[TokenEvent]], list[Sequence]],
        on_death: Callable[[BaseException], None],
    ) -> None:
        self._engine = engine
        self._on_events = on_events
        self._on_death = on_death
        self._commands: queue.SimpleQueue[_Add | _Abort | _Stop] = queue.SimpleQueue()
        self._live: set[Sequence] = set()
        self._thread = threading.Thread(target=self._main, name="llorch-engine", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def add(self, *entries: tuple[Sequence, SamplingRow]) -> None:
        """Queue the sequences of one request, all or none; any thread.

        Where the queue is full for them, the first one's event says so.
        """
        self._commands.put(_Add(entries))

    def abort(self, sequence: Sequence) -> None:
        """End a sequence; its last event has reason CANCELLED. Any thread; idempotent."""
        self._commands.put(_Abort(sequence))

    def stop(self) -> None:
        """Cancel what is live and end the thread; returns when it has ended."""
        self._commands.put(_Stop())
        self._thread.join()

    def _main(self) -> None:
        try:
            while self._take_commands():
                self._publish(self._engine.step())
        except BaseException as error:  # noqa: BLE001 - a dead engine must be reported, whatever killed it
            self._on_death(error)

    def _publish(self, events: list[TokenEvent]) -> None:
        if not events:
            return
        for event in events:
            if event.finish is not None or event.error is not None:
                self._live.discard(event.sequence)
        for sequence in self._on_events(events):
            self._engine.abort(sequence)
            self._live.discard(sequence)

    def _take_commands(self) -> bool:
        """Carry out all commands that have arrived, waiting for one if there is no work. False: stop."""
        block = not self._live
        while True:
            try:
                command = self._commands.get(block=block)
            except queue.Empty:
                return True
            block = False
            if isinstance(command, _Stop):
                self._publish([self._cancel(sequence) for sequence in list(self._live)])
                return False
            if isinstance(command, _Add):
                self._add(command)
            elif command.sequence in self._live:
                self._publish([self._cancel(command.sequence)])
                block = not self._live

    def _add(self, command: _Add) -> None:
        try:
            self._engine.add(*command.entries)
        except QueueFullError as error:
            self._on_events([TokenEvent(command.entries[0][0], None, error=error)])
        else:
            self._live.update(sequence for sequence, _ in command.entries)

    def _cancel(self, sequence: Sequence) -> TokenEvent:
        self._engine.abort(sequence)
        return TokenEvent(sequence, None, FinishReason.CANCELLED)
