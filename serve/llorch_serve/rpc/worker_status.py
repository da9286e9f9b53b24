"""What a worker says of itself: its state, how far it has loaded and how busy it is."""

from __future__ import annotations

from dataclasses import replace

from llorch_serve.engine.load import NOTHING, Load, WorkerState
from llorch_serve.loading.progress import LoadProgress
from llorch_serve.requests import TextGenerator


class WorkerStatus:
    """One worker's, from its start on. progress: of the load that comes first."""

    def __init__(self, progress: LoadProgress) -> None:
        self._progress = progress
        self._generator: TextGenerator | None = None
        self._state = WorkerState.STARTING

    def set_ready(self, generator: TextGenerator) -> None:
        """Say that the worker serves."""
        self._progress.finish()
        self._generator, self._state = generator, WorkerState.READY

    def set_state(self, state: WorkerState) -> None:
        """Say what has become of a worker that serves no longer."""
        self._state = state

    def load(self) -> Load:
        """Return the state, and the figures of this moment; a worker that is ready is busy without a free
        slot.
        """
        figures = NOTHING if self._generator is None else self._generator.load()
        state, progress = self._state, self._progress.now()
        if state is WorkerState.READY and figures.running >= figures.slots:
            state = WorkerState.BUSY
        return replace(
            figures,
            state=state,
            load_percent=progress.percent,
            loaded_bytes=progress.loaded_bytes,
            total_bytes=progress.total_bytes,
        )
