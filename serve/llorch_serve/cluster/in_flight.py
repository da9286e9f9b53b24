"""Requests of this front that are on their way to a replica or in it, as far as Ray does not count them.

Ray's count of a replica is as old as the last request that was sent there or ended there, and is forgotten
after ten seconds: a replica whose answers take longer would look idle. Many requests may be chosen for before
the first is sent: all of them would see the same idlest replica. What a replica says as it takes a request
replaces Ray's count, without those that are on their way to it by then. An end it counts a little after the
caller has been told of it, and the caller's next request may be here by then: the free slot would look taken.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection
from typing import Final, TypeAlias

IsOver: TypeAlias = Callable[[], bool]

LONGEST_S: Final = 1.0
"""After which a request that was not sent, or not taken, is thought to have been given up."""

MOST_ENDED: Final = 1024
"""Requests remembered whose end was told before it was that a replica had taken them."""


class InFlight:
    """Counts them by replica. now: a clock that does not go back, in seconds."""

    def __init__(self, now: Callable[[], float]) -> None:
        self._unsent = _Steps(now)
        self._on_the_way = _Steps(now)
        self._taken: dict[str, dict[str, IsOver]] = {}  # requests by their replica
        self._ended: dict[str, str] = {}  # replicas by the request, which may still be told to be taken

    def keep(self, replicas: Collection[str]) -> None:
        """Say which replicas there are."""
        self._taken = {replica: self._taken.get(replica, {}) for replica in replicas}

    def chosen(self, replica: str, request_id: str) -> None:
        """Take note of a choice, which takes the place of an earlier one of the same request."""
        self._ended.pop(request_id, None)  # that was a rejection
        self._on_the_way.forget(request_id)
        self._unsent.enter(request_id, replica)

    def sent(self, replica: str, request_id: str) -> None:
        """Take note that a request is sent, which may be to another replica than the first choice."""
        self._unsent.forget(request_id)
        self._on_the_way.enter(request_id, replica)

    def taken(self, replica: str, request_id: str, is_over: IsOver | None = None) -> None:
        """Take note that a replica has a request, unless it has ended already: Ray tells of both in either
        order. is_over: tells whether its answer has come to its end.
        """
        if self._ended.pop(request_id, None) != replica:
            self._on_the_way.forget(request_id)
            self._taken.setdefault(replica, {})[request_id] = is_over or _never

    def ended(self, replica: str, request_id: str) -> None:
        """Take note that a replica has it no longer; idempotent. What was not sent by choice is ignored."""
        if self._taken.get(replica, {}).pop(request_id, None) is not None:
            return
        if self._on_the_way.replica_of(request_id) != replica:
            return
        self._on_the_way.forget(request_id)
        self._ended[request_id] = replica
        if len(self._ended) > MOST_ENDED:
            del self._ended[next(iter(self._ended))]

    def unsent(self) -> Counter[str]:
        """Return how many are still to be sent to each replica."""
        self._unsent.drop_old()
        return self._unsent.count()

    def on_the_way(self) -> Counter[str]:
        """Return how many have been sent to each replica that it has not taken yet."""
        return self._on_the_way.count()

    def count(self, replica: str) -> int:
        """Return how many a replica has taken of this front, with those whose end Ray has not told yet."""
        return len(self._taken.get(replica, ()))

    def over(self, replica: str) -> int:
        """Return how many of these have come to their end."""
        return sum(is_over() for is_over in self._taken.get(replica, {}).values())


class _Steps:
    """Requests that are at one step of their way, and the replica of each, in their order."""

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._entered: dict[str, tuple[str, float]] = {}

    def enter(self, request_id: str, replica: str) -> None:
        """Take note that a request is there."""
        self._entered.pop(request_id, None)
        self._entered[request_id] = (replica, self._now())

    def forget(self, request_id: str) -> None:
        """Take note that a request is there no longer; idempotent."""
        self._entered.pop(request_id, None)

    def replica_of(self, request_id: str) -> str | None:
        """Return the replica of a request."""
        return self._entered.get(request_id, (None, 0.0))[0]

    def count(self) -> Counter[str]:
        """Return how many there are for each replica, without those that have been for too long."""
        since_s = self._now() - LONGEST_S
        return Counter(replica for replica, entered_s in self._entered.values() if entered_s > since_s)

    def drop_old(self) -> None:
        """Forget those that have been for too long, whose end nobody tells."""
        since_s = self._now() - LONGEST_S
        while self._entered:
            request_id, (_, entered_s) = next(iter(self._entered.items()))
            if entered_s > since_s:
                return
            del self._entered[request_id]


def _never() -> bool:
    return False
