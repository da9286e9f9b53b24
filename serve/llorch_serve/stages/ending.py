"""How those who use a stage learn that it has ended, wherever it runs."""

from __future__ import annotations

import threading
from collections.abc import Callable

from llorch_serve.errors import StageEndedError


class Ending:
    """The end of one stage, which comes at most once, unless its worker closes it first. Any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._listeners: list[Callable[[StageEndedError], None]] = []
        self._closing = False
        self._failure: StageEndedError | None = None

    def when_ended(self, tell: Callable[[StageEndedError], None]) -> None:
        """Have ``tell`` called, on any thread, when the stage ends by itself; at once if it has."""
        with self._lock:
            self._listeners.append(tell)
            failure = self._failure
        if failure is not None:
            tell(failure)

    def close(self) -> None:
        """Tell nobody from now on: the stage is being closed."""
        with self._lock:
            self._closing = True

    def tell(self, failure: StageEndedError) -> None:
        """Tell everybody how it has ended."""
        with self._lock:
            if self._closing:
                return
            self._failure = failure
            listeners = list(self._listeners)
        for tell in listeners:
            tell(failure)
