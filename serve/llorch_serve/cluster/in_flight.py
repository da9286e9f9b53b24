"""Requests of this front that are on their way to a replica or in it, as far as Ray does not count them.

Ray's count of a replica is as old as the last request that was sent there or ended there, and is forgotten
after ten seconds: a replica whose answers take longer would look idle. And many requests may be chosen for
before the first is sent: all of them would see the same idlest replica.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection
from typing import Final

LONGEST_S: Final = 1.0
"""After which a request that was not sent is taken to have been given up."""


MOST_ENDED: Final = 1024
"""Requests remembered whose end was told before it was that a replica had taken them."""


class InFlight:
    """Counts them by replica. now: a clock that does not go back, in seconds."""

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._unsent: dict[str, tuple[str, float]] = {}  # by the request, in the order of the choices
        self._taken: dict[str, set[str]] = {}  # requests by their replica
        self._ended: dict[str, str] = {}  # replicas by the request, which may still be told to be taken

    def keep(self, replicas: Collection[str]) -> None:
        """Say which replicas there are."""
        self._taken = {replica: self._taken.get(replica, set()) for replica in replicas}

    def chosen(self, replica: str, request_id: str) -> None:
        """Take note of a choice, which takes the place of an earlier one of the same request."""
        self._unsent.pop(request_id, None)
        self._ended.pop(request_id, None)  # that was a rejection
        self._unsent[request_id] = (replica, self._now())

    def sent(self, replica: str) -> None:
        """Forget the choice of a replica that came first: from here on Ray's own count has the request."""
        for request_id, (chosen, _) in self._unsent.items():
            if chosen == replica:
                del self._unsent[request_id]
                return

    def taken(self, replica: str, request_id: str) -> None:
        """Take note that a replica has a request, unless it has ended already: Ray tells of both in either
        order.
        """
        if self._ended.pop(request_id, None) != replica:
            self._taken.setdefault(replica, set()).add(request_id)

    def ended(self, replica: str, request_id: str) -> None:
        """Take note that a replica has it no longer; idempotent."""
        taken = self._taken.get(replica, set())
        if request_id in taken:
            taken.remove(request_id)
            return
        self._ended[request_id] = replica
        if len(self._ended) > MOST_ENDED:
            del self._ended[next(iter(self._ended))]

    def unsent(self) -> Counter[str]:
        """Return how many are still to be sent to each replica."""
        while self._unsent:
            request_id, (_, since_s) = next(iter(self._unsent.items()))
            if self._now() - since_s < LONGEST_S:
                break
            del self._unsent[request_id]
        return Counter(replica for replica, _ in self._unsent.values())

    def count(self, replica: str) -> int:
        """Return how many a replica has of this front."""
        return len(self._taken.get(replica, ()))
