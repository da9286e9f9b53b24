"""How often each token occurs among the last ones of a sequence: what penalties are measured by."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import numpy as np

from llorch_serve.sampling.selection import IdArray


class TokenCounts:
    """Occurrences of tokens among those appended last. Each :meth:`append` takes constant time, whatever came
    before.

    window: how many of the last tokens count; None: all.
    """

    def __init__(self, token_ids: Sequence[int] = (), *, window: int | None = None) -> None:
        counted = token_ids if window is None else token_ids[max(len(token_ids) - window, 0) :]
        self._window = window
        # Only a window forgets, and only for that are the tokens kept in their order.
        self._recent = deque[int]() if window is None else deque(counted)
        ids, counts = np.unique(np.asarray(counted, dtype=np.int64), return_counts=True)
        self._size = len(ids)
        self._place = {int(token): place for place, token in enumerate(ids)}
        self._ids, self._counts = ids, counts.astype(np.int64)

    @property
    def ids(self) -> IdArray:
        """Tokens that occur, each once, in no particular order; valid until the next append."""
        return self._ids[: self._size]

    @property
    def counts(self) -> IdArray:
        """How often each of ``ids`` occurs; valid until the next append."""
        return self._counts[: self._size]

    def append(self, token_id: int) -> None:
        """Count one more token, and forget the one that leaves the window."""
        if self._window == 0:
            return
        if self._window is not None:
            if len(self._recent) == self._window:
                self._forget(self._recent.popleft())
            self._recent.append(token_id)
        place = self._place.get(token_id)
        if place is None:
            self._enter(token_id)
        else:
            self._counts[place] += 1

    def _enter(self, token_id: int) -> None:
        if self._size == len(self._ids):
            room = max(self._size, 64)
            self._ids = np.concatenate([self._ids, np.zeros(room, np.int64)])
            self._counts = np.concatenate([self._counts, np.zeros(room, np.int64)])
        self._ids[self._size], self._counts[self._size] = token_id, 1
        self._place[token_id] = self._size
        self._size += 1

    def _forget(self, token_id: int) -> None:
        place = self._place[token_id]
        self._counts[place] -= 1
        if self._counts[place]:
            return
        del self._place[token_id]
        self._size -= 1
        if place < self._size:  # the last one moves into the gap
            moved = int(self._ids[self._size])
            self._ids[place], self._counts[place] = moved, self._counts[self._size]
            self._place[moved] = place
