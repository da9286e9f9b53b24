"""Finding markers in text that arrives in pieces: what is certain, and what may yet become a marker.

Used by the parsers of this package. Every decision depends on the text alone, not on where it was cut.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final

_SPACE: Final = re.compile(r"\s*")


def space_end(text: str, start: int = 0) -> int:
    """Return where white space that begins at ``start`` ends."""
    found = _SPACE.match(text, start)
    assert found is not None
    return found.end()


def held_back(text: str, markers: Sequence[str]) -> int:
    """Return how many characters at the end of ``text`` may yet become a marker."""
    longest = max(map(len, markers), default=1) - 1
    for length in range(min(longest, len(text)), 0, -1):
        tail = text[-length:]
        if any(marker.startswith(tail) for marker in markers):
            return length
    return 0


def is_beginning(text: str, start: int, marker: str) -> bool:
    """Tell whether ``text`` from ``start`` on is less than the marker, but may yet become it."""
    return len(text) - start < len(marker) and marker.startswith(text[start:])
