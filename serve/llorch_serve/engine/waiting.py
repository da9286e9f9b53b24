"""The queue of sequences without a slot: bounded, and fair among clients by the tokens they were served.

Each client has a counter of tokens (prompt tokens computed and tokens generated). The client with the
smallest one is next, and a client that comes to a busy worker starts at the smallest counter there, so that
absence earns no credit (virtual token counters: Sheng et al., "Fairness in Serving Large Language Models",
2024).

Priority orders one client's own requests: the highest first, equal ones in order of arrival. Among clients a
step of it is a head start of PRIORITY_TOKENS, for as long as that request waits; a bounded advantage, after
which the counters decide again, so that no priority shuts another client out.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import count
from typing import TYPE_CHECKING, Final

from llorch_serve.errors import QueueFullError

if TYPE_CHECKING:  # at run time it would bring numpy to ``llorch serve --help``
    from llorch_serve.engine.sequence import Sequence

DEFAULT_MOST_TOKENS: Final = 2**20
"""Some 50 MiB: a token that waits takes 12 to 48 bytes, by whether it came as text or as an id, and whether
guesses are made.
"""

PRIORITY_TOKENS: Final = 1000


@dataclass(slots=True)
class _Client:
    """served: the counter. live: sequences waiting or running. waiting: (-priority, arrival, sequence),
    sorted.
    """

    served: int
    live: int = 0
    waiting: list[tuple[int, int, Sequence]] = field(default_factory=list)


class WaitingQueue:
    """Sequences that wait for a slot. Not thread-safe.

    limit: most sequences that wait. most_tokens: most tokens that their prompts may have together, though one
        request may always wait alone. A request of several answers counts its prompt once for each.
    """

    def __init__(self, limit: int, most_tokens: int = DEFAULT_MOST_TOKENS) -> None:
        self._limit = limit
        self._most_tokens = most_tokens
        self._clients: dict[str, _Client] = {}
        self._arrivals = count()
        self._length = 0
        self._tokens = 0

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[Sequence]:
        """Give every sequence that waits, in no order."""
        return (sequence for client in self._clients.values() for *_, sequence in client.waiting)

    def add(self, *sequences: Sequence) -> None:
        """Queue sequences at the end of their clients' lines, all or none. Raises QueueFullError."""
        if self._length + len(sequences) > self._limit:
            raise QueueFullError(
                f"{self._length} requests are waiting, and this worker queues {self._limit}; try again later",
                retry_after_s=1.0,
            )
        tokens = sum(sequence.prompt_length for sequence in sequences)
        if self._length > 0 and self._tokens + tokens > self._most_tokens:
            raise QueueFullError(
                f"{self._tokens} tokens of prompts are waiting and this request has {tokens}, the most this "
                f"worker "
                f"queues is {self._most_tokens}; try again later",
                retry_after_s=1.0,
            )
        for sequence in sequences:
            self._add(sequence)

    def _add(self, sequence: Sequence) -> None:
        client = self._clients.get(sequence.ownership.client)
        if client is None:
            served = min((other.served for other in self._clients.values()), default=0)
            client = self._clients[sequence.ownership.client] = _Client(served)
        client.live += 1
        insort(client.waiting, (-sequence.ownership.priority, next(self._arrivals), sequence))
        self._length += 1
        self._tokens += sequence.prompt_length

    def next(self) -> Sequence | None:
        """Return the sequence whose turn it is, without taking it out; None if nothing waits."""
        best: tuple[int, int] | None = None
        chosen = None
        for client in self._clients.values():
            if not client.waiting:
                continue
            _, arrival, sequence = client.waiting[0]
            rank = (client.served - sequence.ownership.priority * PRIORITY_TOKENS, arrival)
            if best is None or rank < best:
                best, chosen = rank, sequence
        return chosen

    def take(self, sequence: Sequence) -> None:
        """Take out a sequence, which is live until :meth:`leave` is told."""
        client = self._clients[sequence.ownership.client]
        for entry in client.waiting:
            if entry[2] is sequence:
                client.waiting.remove(entry)
                self._length -= 1
                self._tokens -= sequence.prompt_length
                return
        raise ValueError(f"{sequence.request_id} does not wait")

    def charge(self, sequence: Sequence, tokens: int) -> None:
        """Count tokens that a live sequence was served."""
        self._clients[sequence.ownership.client].served += tokens

    def leave(self, sequence: Sequence) -> None:
        """Forget a sequence that was taken out; its client is forgotten with its last one."""
        client = self._clients[sequence.ownership.client]
        client.live -= 1
        if client.live == 0:
            del self._clients[sequence.ownership.client]
