"""Requests between the choice of a replica and their sending, which no count of the replica has yet.

Many may be chosen for before the first is sent. Without this all of them would see the same idlest replica.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Final

LONGEST_S: Final = 1.0
"""After which a request that was not sent is taken to have been given up."""


class Unsent:
    """Counts them by replica. now: a clock that does not go back, in seconds."""

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._by_request: dict[str, tuple[str, float]] = {}  # in the order of the choices

    def chosen(self, replica: str, request_id: str) -> None:
        """Take note of a choice, which takes the place of an earlier one of the same request."""
        self._by_request.pop(request_id, None)
        self._by_request[request_id] = (replica, self._now())

    def sent(self, replica: str) -> None:
        """Forget the request of a replica that was chosen for first."""
        for request_id, (chosen, _) in self._by_request.items():
            if chosen == replica:
                del self._by_request[request_id]
                return

    def counts(self) -> Counter[str]:
        """Return how many there are of each replica."""
        self._drop_old()
        return Counter(replica for replica, _ in self._by_request.values())

    def _drop_old(self) -> None:
        while self._by_request:
            request_id, (_, since_s) = next(iter(self._by_request.items()))
            if self._now() - since_s < LONGEST_S:
                return
            del self._by_request[request_id]
