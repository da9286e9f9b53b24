"""How far a worker is on its way to serving: counted by the thread that loads, read by whoever asks.

Input: the folder's files as they are read (:func:`read_ahead`) and the phases after that. Output: percent and
bytes, for ``GetLoad`` and the log. It also carries the wish to stop from the event loop to the thread that
loads.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import psutil

from llorch_serve.errors import UnavailableError

READ_SHARE: Final = 90.0
"""Percent of a load that reading the files counts for; the rest is making the session and warming up, whose
time no runtime tells in advance.
"""

_CHUNK_BYTES: Final = 8 * 2**20
_LOG_INTERVAL_S: Final = 5.0

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Progress:
    """How much is loaded. percent: 0..100, and 100 only when serving. loaded_bytes, total_bytes: of the
    folder's files.
    """

    percent: float
    loaded_bytes: int
    total_bytes: int


class LoadProgress:
    """One load. Every method may be called from any thread. One that takes long is told in the log, every few
    seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._told_at = clock()
        self._lock = threading.Lock()
        self._loaded = self._total = 0
        self._done = self._cancelled = False
        self._stop: Callable[[], None] | None = None

    def now(self) -> Progress:
        """Return how far it is."""
        with self._lock:
            share = self._loaded / self._total if self._total else 0.0
            return Progress(100.0 if self._done else READ_SHARE * share, self._loaded, self._total)

    def expect(self, total_bytes: int) -> None:
        """Say how many bytes will be read."""
        with self._lock:
            self._total = total_bytes

    def advance(self, count: int) -> None:
        """Count bytes that have been read. Raises UnavailableError once the load is no longer wanted."""
        with self._lock:
            self._loaded += count
        now = self._clock()
        if now - self._told_at >= _LOG_INTERVAL_S:
            self._told_at = now
            state = self.now()
            logger.info(
                "loading: %.0f %%, %d of %d MiB read",
                state.percent,
                state.loaded_bytes // 2**20,
                state.total_bytes // 2**20,
            )
        self.check()

    def finish(self) -> None:
        """Say that the worker serves."""
        with self._lock:
            self._done = True

    def check(self) -> None:
        """Raise UnavailableError if the load is no longer wanted."""
        if self._cancelled:
            raise UnavailableError("the worker was told to stop before it had loaded its model")

    def stoppable(self, stop: Callable[[], None] | None) -> None:
        """Have ``stop`` called by :meth:`cancel`, at once if that has been; None: nothing is to be stopped
        any more.
        """
        with self._lock:
            self._stop = stop
            cancelled = self._cancelled
        if cancelled and stop is not None:
            stop()

    def cancel(self) -> None:
        """Say that the load is no longer wanted; it ends with UnavailableError where it can."""
        with self._lock:
            self._cancelled = True
            stop = self._stop
        if stop is not None:
            stop()


def read_ahead(files: Iterable[Path], progress: LoadProgress) -> None:
    """Read files into the system's page cache, from where the runtime maps them; sequential reads are a
    disk's fastest.

    Files that do not fit into free memory are not read: each would push out what the last one brought. One
    that cannot be read is left to whoever opens it next, with the error that belongs to it. Raises
    UnavailableError if the load is cancelled meanwhile.
    """
    found = [path for path in files if path.is_file()]
    total = sum(path.stat().st_size for path in found)
    progress.expect(total)
    if total > psutil.virtual_memory().available:
        return
    buffer = bytearray(_CHUNK_BYTES)
    for path in found:
        try:
            with path.open("rb", buffering=0) as stream:
                while count := stream.readinto(buffer):
                    progress.advance(count)
        except OSError:
            continue
