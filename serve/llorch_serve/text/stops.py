"""Finds stop strings in text that arrives piece by piece, from the detokeniser on its way to the caller.

What could still become a stop string is held back, so that no part of one is ever seen. Results depend on the
text alone, not on where it was cut.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace


@dataclass(slots=True)
class _Pattern:
    """A stop string as the automaton of Knuth, Morris and Pratt (1977): linear time whatever the text.

    borders: for each prefix, the length of its longest proper suffix that is a prefix too.
    matched: characters of ``text`` that the pushed text ends with.
    """

    text: str
    borders: tuple[int, ...]
    matched: int = 0

    def advance(self, char: str) -> bool:
        """Take one more character; return whether the text now ends with the stop string."""
        text, matched = self.text, self.matched
        while matched and text[matched] != char:
            matched = self.borders[matched - 1]
        if text[matched] == char:
            matched += 1
        self.matched = matched
        return matched == len(text)


def _borders(text: str) -> tuple[int, ...]:
    borders = [0] * len(text)
    length = 0
    for index in range(1, len(text)):
        while length and text[index] != text[length]:
            length = borders[length - 1]
        if text[index] == text[length]:
            length += 1
        borders[index] = length
    return tuple(borders)


@dataclass(slots=True)
class StopMatcher:
    """Watches for the stop string that is complete first; of those that end together, the longest.

    stop_strings: none of them empty; may be no string at all.
    """

    stop_strings: Sequence[str]
    _patterns: list[_Pattern] = field(init=False)
    _held: str = field(default="", init=False)
    _done: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        assert all(self.stop_strings)
        self._patterns = [_Pattern(text, _borders(text)) for text in self.stop_strings]

    def push(self, text: str) -> tuple[str, str | None]:
        """Take new text; return what may be shown, and the stop string if one is complete.

        After a match nothing more may be pushed; what followed the stop string in ``text`` is dropped.
        """
        assert not self._done
        if not self._patterns:
            return text, None
        buffer = self._held + text
        for index, char in enumerate(text):
            complete = [pattern.text for pattern in self._patterns if pattern.advance(char)]
            if complete:
                stop = max(complete, key=len)
                self._held, self._done = "", True
                return buffer[: len(buffer) - len(text) + index + 1 - len(stop)], stop
        hold = max(pattern.matched for pattern in self._patterns)
        keep = len(buffer) - hold
        self._held = buffer[keep:]
        return buffer[:keep], None

    def fork(self) -> StopMatcher:
        """Return a matcher that goes on from here by itself, so that texts can be tried."""
        other = StopMatcher(())
        other.stop_strings, other._held = self.stop_strings, self._held
        other._patterns = [replace(pattern) for pattern in self._patterns]
        return other

    def flush(self) -> str:
        """Return the text that is still held back: the answer ended, and no stop string will come of it."""
        held, self._held = self._held, ""
        self._done = True
        return held
