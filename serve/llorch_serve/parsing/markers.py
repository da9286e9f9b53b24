"""Finding markers in text that arrives in pieces: what is certain, and what may yet become a marker.

Used by the parsers of this package. Every decision depends on the text alone, not on where it was cut.
"""

from __future__ import annotations

from collections.abc import Sequence


def find_first(text: str, markers: Sequence[str]) -> tuple[int, str] | None:
    """Return where the first marker begins and which it is; of those that begin together, the longest."""
    found = [(place, marker) for marker in markers if (place := text.find(marker)) >= 0]
    return min(found, key=lambda at: (at[0], -len(at[1])), default=None)


def held_back(text: str, markers: Sequence[str]) -> int:
    """Return how many characters at the end of ``text`` may yet become a marker."""
    longest = max(map(len, markers), default=1) - 1
    for length in range(min(longest, len(text)), 0, -1):
        tail = text[-length:]
        if any(marker.startswith(tail) for marker in markers):
            return length
    return 0


def is_beginning(text: str, marker: str) -> bool:
    """Tell whether ``text`` is less than the marker, but may yet become it."""
    return len(text) < len(marker) and marker.startswith(text)
