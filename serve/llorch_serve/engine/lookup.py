"""Guesses what a sequence will say next from what it has said or read before: no second model.

The last few tokens are looked up among the earlier ones, and what followed them there is the guess (prompt
lookup: Saxena 2023). The engine checks a guess in one call of the model, and only the model's own tokens are
ever used.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Final

LONGEST_NGRAM: Final = 4
SHORTEST_NGRAM: Final = 2
SEARCHED_TOKENS: Final = 16_384
"""How far back a guess is looked for, so that its cost is bounded whatever the context."""
_FIRST_DRAFT: Final = 4
_LONGEST_PAUSE: Final = 32
_MOST_MISSES: Final = 256
"""Bytes of two tokens that look like the ones sought: after so many the search is given up, as a step waits
for it.
"""

_BYTES: Final = 4


class PromptLookup:
    """The tokens of one sequence, searchable, and how well its guesses have done.

    max_draft: most tokens in a guess. A guess that is right doubles the length of the next, and one that
        fails ends it at what was right; guesses that are wrong from their first token on pause guessing for
        ever more tokens.
    """

    def __init__(self, token_ids: Sequence[int], *, max_draft: int) -> None:
        self._data = bytearray()
        self.max_draft = max_draft
        self._length = min(_FIRST_DRAFT, max_draft)
        self._pause = 0
        self._next_pause = 1
        self.extend(token_ids)

    def extend(self, token_ids: Sequence[int]) -> None:
        """Append tokens of the sequence."""
        self._data += struct.pack(f"<{len(token_ids)}i", *token_ids)
        self._pause = max(self._pause - len(token_ids), 0)

    def draft(self, limit: int) -> tuple[int, ...]:
        """Return at most ``limit`` tokens that may follow; empty if there is no guess worth a check."""
        if self._pause or limit < 1:
            return ()
        count = min(self._length, limit)
        for size in range(LONGEST_NGRAM, SHORTEST_NGRAM - 1, -1):
            after = self._find(size * _BYTES)
            if after is not None:
                found = self._data[after : after + count * _BYTES]
                return struct.unpack(f"<{len(found) // _BYTES}i", found)
        return ()

    def learn(self, *, drafted: int, accepted: int) -> None:
        """Take note of how many tokens of a guess were right."""
        if accepted == 0:
            self._pause = self._next_pause
            self._next_pause = min(2 * self._next_pause, _LONGEST_PAUSE)
            self._length = min(_FIRST_DRAFT, self.max_draft)
            return
        self._next_pause = 1
        grown = 2 * drafted if accepted == drafted else accepted + 1
        self._length = min(max(grown, _FIRST_DRAFT), self.max_draft)

    def _find(self, size: int) -> int | None:
        """Return where the latest earlier occurrence of the last ``size`` bytes ends, or None if it was not
        found.
        """
        data = self._data
        if len(data) <= size:
            return None
        pattern, first = data[-size:], max(len(data) - SEARCHED_TOKENS * _BYTES, 0)
        end = len(data) - 1  # one byte short: the end itself is no earlier occurrence
        for _ in range(_MOST_MISSES):
            start = data.rfind(pattern, first, end)
            if start < 0:
                return None
            if start % _BYTES == 0:
                return start + size
            end = start + size - 1
        return None
