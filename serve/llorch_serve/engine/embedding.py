"""An engine that embeds texts: each step runs the texts of one batch.

It has no KV cache and no slots; what it shares with the engine that generates is the queue, fair among
clients. A batch is what the queue's next text is run with: others of about its length, since all of them are
padded to the longest.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import replace
from typing import Final, Protocol

import numpy as np
import numpy.typing as npt

from llorch_serve.engine.containment import FAILED_CALLS
from llorch_serve.engine.load import NOTHING, Load, TokenRate, WorkerState
from llorch_serve.engine.sequence import FinishReason, Sequence, SequenceStatus, TokenEvent
from llorch_serve.engine.waiting import WaitingQueue
from llorch_serve.errors import NonFiniteLogitsError

BATCH_TOKENS: Final = 1024
"""Most tokens of a batch of several texts, padding included; a text that has more runs alone."""

_MOST_PADDING: Final = 0.125
"""Largest part of a batch that is padding."""


class Embedder(Protocol):
    """What the engine needs from :class:`llorch_serve.runtime.embedding_session.EmbeddingSession`; tests plug
    in a fake.
    """

    def embed(self, texts: Seq[Seq[int]]) -> npt.NDArray[np.float32]:
        """Return a vector for each text. Raises ProviderError, ResourceError or MemoryError."""


class EmbeddingEngine:
    """Owns a session and every live sequence. Not thread-safe. Has the methods of
    :class:`llorch_serve.engine.engine.Engine`.

    live: sequences that have been added and have not ended.
    """

    def __init__(
        self, session: Embedder, waiting: WaitingQueue, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self.live: set[Sequence] = set()
        self._session = session
        self._waiting = waiting
        self._clock = clock
        self._rate = TokenRate()
        self._tokens = 0
        self._running = 0

    def add(self, *sequences: Sequence) -> None:
        """Queue sequences, all or none. Raises QueueFullError."""
        self._waiting.add(*sequences)
        self.live.update(sequences)

    def abort(self, sequence: Sequence) -> bool:
        """Forget a sequence. Return whether it was live; if not, nothing is done."""
        if sequence not in self.live:
            return False
        self.live.discard(sequence)
        self._take(sequence)
        return True

    def step(self) -> list[TokenEvent]:
        """Embed the texts of one batch and return the end of each; an empty list if nothing waits.

        A call that fails ends the texts of its batch, and a vector that is not finite its own text.
        """
        first = self._waiting.next()
        if first is None:
            return []
        batch = choose_batch(first, self._waiting)
        self._running, now = len(batch), self._clock()
        for sequence in batch:
            sequence.times.started_at = now
            self._waiting.charge(sequence, sequence.prompt_length)
            self._take(sequence)
        try:
            vectors = self._session.embed([sequence.token_ids for sequence in batch])
        except FAILED_CALLS as error:
            return self._ended([TokenEvent(sequence, None, error=error) for sequence in batch])
        finite: npt.NDArray[np.bool_] = np.asarray(np.isfinite(vectors).all(axis=1))
        return self._ended(
            [
                _ended(sequence, vector, is_finite=bool(is_finite))
                for sequence, vector, is_finite in zip(batch, vectors, finite, strict=True)
            ]
        )

    @property
    def slots(self) -> int:
        """Return 1: a batch runs at once, whatever is in it."""
        return 1

    def held(self, sequence: Sequence) -> int:
        """Return 0: nothing is kept of a text."""
        return 0

    def close(self) -> None:
        """Do what the other engine ends here: nothing."""

    def load(self) -> Load:
        """Return how busy the engine is; from any thread, as of the last step."""
        return replace(
            NOTHING,
            running=self._running,
            waiting=len(self._waiting),
            slots=1,
            prompt_tokens=self._tokens,
            tokens_per_second=self._rate.per_second(self._clock()),
            state=WorkerState.READY,
        )

    def _take(self, sequence: Sequence) -> None:
        self._waiting.take(sequence)
        self._waiting.leave(sequence)

    def _ended(self, events: list[TokenEvent]) -> list[TokenEvent]:
        now = self._clock()
        for event in events:
            sequence = event.sequence
            sequence.status = SequenceStatus.FINISHED
            sequence.times.first_token_at = sequence.times.last_token_at = now
            self._tokens += sequence.prompt_length
            self._rate.count(now, sequence.prompt_length)
            self.live.discard(sequence)
        self._running = 0
        return events


def _ended(sequence: Sequence, vector: npt.NDArray[np.float32], *, is_finite: bool) -> TokenEvent:
    if not is_finite:
        return TokenEvent(sequence, None, error=NonFiniteLogitsError("the embedding of a text"))
    return TokenEvent(sequence, None, FinishReason.STOP, embedding=vector)


def choose_batch(first: Sequence, waiting: WaitingQueue) -> list[Sequence]:
    """Return ``first`` and those of the others that wait which are run with it: the nearest in length, as
    long as all of them, padded, stay within BATCH_TOKENS and little of it is padding.
    """
    length = first.prompt_length
    others = sorted(
        (sequence for sequence in waiting if sequence is not first),
        key=lambda sequence: abs(sequence.prompt_length - length),
    )
    batch, longest, tokens = [first], length, length
    for sequence in others:
        size = max(longest, sequence.prompt_length) * (len(batch) + 1)
        used = tokens + sequence.prompt_length
        if size > BATCH_TOKENS or size - used > _MOST_PADDING * size:
            break
        batch.append(sequence)
        longest, tokens = max(longest, sequence.prompt_length), used
    return batch
