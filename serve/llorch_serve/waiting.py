"""The queue of sequences without a slot: bounded, and fair among clients by the tokens they were served.

Each client has a counter of tokens (prompt tokens computed and tokens generated). The client with the smallest one
is next, and a client that comes to a busy worker starts at the smallest counter there, so that absence earns no
credit (virtual token counters: Sheng et al., "Fairness in Serving Large Language Models", 2024). One client alone is
served in order of arrival.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from itertools import count

from llorch_serve.errors import QueueFullError
from llorch_serve.sequence import Sequence


@dataclass(slots=True)
class _Client:
    """served: the counter. live: sequences waiting or running. waiting: (arrival, sequence)."""

    served: int
    live: int = 0
    waiting: deque[tuple[int, Sequence]] = field(default_factory=deque)


class WaitingQueue:
    """Sequences that wait for a slot. Not thread-safe."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._clients: dict[str, _Client] = {}
        self._arrivals = count()
        self._length = 0

    def __len__(self) -> int:
        return self._length

    def add(self, *sequences: Sequence) -> None:
        """Queue sequences at the end of their clients' lines, all or none. Raises QueueFullError."""
        if self._length + len(sequences) > self._limit:
            raise QueueFullError(
                f"{self._length} requests are waiting, and this worker queues {self._limit}; try again later",
                retry_after_s=1.0,
            )
        for sequence in sequences:
            self._add(sequence)

    def _add(self, sequence: Sequence) -> None:
        client = self._clients.get(sequence.client)
        if client is None:
            served = min((other.served for other in self._clients.values()), default=0)
            client = self._clients[sequence.client] = _Client(served)
        client.live += 1
        client.waiting.append((next(self._arrivals), sequence))
        self._length += 1

    def next(self) -> Sequence | None:
        """Return the sequence whose turn it is, without taking it out; None if nothing waits."""
        lines = [client for client in self._clients.values() if client.waiting]
        if not lines:
            return None
        return min(lines, key=lambda client: (client.served, client.waiting[0][0])).waiting[0][1]

    def take(self, sequence: Sequence) -> None:
        """Take out a sequence, which is live until :meth:`leave` is told."""
        client = self._clients[sequence.client]
        for entry in client.waiting:
            if entry[1] is sequence:
                client.waiting.remove(entry)
                self._length -= 1
                return
        raise ValueError(f"{sequence.request_id} does not wait")

    def charge(self, sequence: Sequence, tokens: int) -> None:
        """Count tokens that a live sequence was served."""
        self._clients[sequence.client].served += tokens

    def leave(self, sequence: Sequence) -> None:
        """Forget a sequence that was taken out; its client is forgotten with its last one."""
        client = self._clients[sequence.client]
        client.live -= 1
        if client.live == 0:
            del self._clients[sequence.client]
