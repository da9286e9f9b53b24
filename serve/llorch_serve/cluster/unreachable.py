"""Replicas that a front could not reach of late, which get nothing for a while.

Ray forgets what it knew of such a replica, which then looks idle, and tries it again at once.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Final

FIRST_PAUSE_S: Final = 1.0
LONGEST_PAUSE_S: Final = 4.0  # callers of a sole replica wait for it

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _Pause:
    until_s: float
    next_s: float


class Unreachable:
    """Remembers them. now: a clock that does not go back, in seconds."""

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._pauses: dict[str, _Pause] = {}

    def failed(self, replica: str) -> None:
        """Take note that a replica could not be reached: it is left out for twice as long as last time."""
        now = self._now()
        pause = self._pauses.get(replica)
        if pause is None:
            logger.warning("the replica %s cannot be reached", replica)
            pause = self._pauses[replica] = _Pause(now, FIRST_PAUSE_S)
        if now < pause.until_s:  # several requests found out together
            return
        pause.until_s = now + pause.next_s
        pause.next_s = min(2 * pause.next_s, LONGEST_PAUSE_S)

    def reached(self, replica: str) -> None:
        """Take note that a replica has answered."""
        self._pauses.pop(replica, None)

    def keep(self, replicas: Collection[str]) -> None:
        """Say which replicas there are."""
        self._pauses = {name: pause for name, pause in self._pauses.items() if name in replicas}

    def __contains__(self, replica: str) -> bool:
        pause = self._pauses.get(replica)
        return pause is not None and self._now() < pause.until_s
