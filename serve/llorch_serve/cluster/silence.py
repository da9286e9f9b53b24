"""Ends calls of replicas that vanished without a word, with their machine or its network.

A process that ends closes its connections, and its callers know at once. A machine that is gone closes none,
and gRPC would wait for minutes. Ray finds out in some seconds, so it is asked about silent replicas.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Iterator
from typing import Final

from llorch_serve.cluster.failures import is_lost
from llorch_serve.cluster.interfaces import Probe

SILENT_S: Final = 5.0
"""After which a replica is asked about; a chunk of a long prompt may take as long."""

logger = logging.getLogger(__name__)


class WatchedCall:
    """A call of a replica. Used on the loop, but for what :meth:`sent` returns."""

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self.heard_s = now()
        self.probe: Probe | None = None
        self.end: Callable[[], None] = lambda: None

    def sent(self, tell: Callable[[str, Probe], None] | None) -> Callable[[str, Probe], None]:
        """Return what to tell of the replica that gets the call, on any thread; ``tell`` is told too."""

        def on_sent(replica: str, probe: Probe) -> None:
            self.probe = probe
            if tell is not None:
                tell(replica, probe)

        return on_sent

    def end_by(self, end: Callable[[], None]) -> None:
        """Take what ends the call, so that whoever waits for its parts gets an error."""
        self.end = end

    def heard(self) -> None:
        """Take note that a part has come."""
        self.heard_s = self._now()


class Silence:
    """Watches the calls of one event loop. silent_s: see :data:`SILENT_S`."""

    def __init__(self, silent_s: float = SILENT_S) -> None:
        self._silent_s = silent_s
        self._calls: set[WatchedCall] = set()
        self._task: asyncio.Task[None] | None = None

    @contextlib.contextmanager
    def watched(self) -> Iterator[WatchedCall]:
        """Watch a call for as long as it runs."""
        call = WatchedCall(asyncio.get_running_loop().time)
        self._calls.add(call)
        if self._task is None:
            self._task = asyncio.ensure_future(self._watch())
        try:
            yield call
        finally:
            self._calls.discard(call)

    async def _watch(self) -> None:
        """Ask about silent calls' replicas for as long as there are calls."""
        try:
            while self._calls:
                await asyncio.sleep(self._silent_s)
                probes = {call.probe for call in self._silent() if call.probe is not None}
                await asyncio.gather(*(self._ask(probe) for probe in probes))
        finally:
            self._task = None

    async def _ask(self, probe: Probe) -> None:
        """End the calls of a replica if it is gone."""
        try:
            # One that stands still does not answer; Ray replaces it if that lasts.
            await asyncio.wait_for(probe(), self._silent_s)
        except Exception as error:  # noqa: BLE001 - whatever it raises, the others are asked about
            if not is_lost(error):
                return
            logger.warning("a replica vanished without a word: %s", type(error).__name__)
            for call in self._silent():
                if call.probe == probe:
                    self._end(call)

    def _silent(self) -> list[WatchedCall]:
        """Return the calls of which nothing has been heard for too long."""
        now = asyncio.get_running_loop().time()
        return [call for call in self._calls if now - call.heard_s >= self._silent_s]

    def _end(self, call: WatchedCall) -> None:
        try:
            call.end()
        except Exception:  # the others are to end all the same
            logger.exception("a call of a replica that has vanished could not be ended")
