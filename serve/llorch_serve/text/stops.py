"""Finds stop strings in text that arrives piece by piece, from the detokeniser on its way to the caller.

What could still become a stop string is held back, so that no part of one is ever seen. Results depend on the
text alone, not on where it was cut. Stop strings are meant for what a model says, so inside its thoughts they
are not looked for.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass, field, replace


@dataclass(frozen=True, slots=True)
class ThoughtMarks:
    """Where a thought is, which the text may begin with.

    begin, end: around it; white space before it and behind it belongs to it.
    begun: the text begins inside the thought.
    """

    begin: str
    end: str
    begun: bool


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
    thought: where they are not looked for, but for those that hold the mark of its end; None: nowhere.
    """

    stop_strings: Sequence[str]
    thought: ThoughtMarks | None = None
    _patterns: list[_Pattern] = field(init=False)
    _watched_thought: _ThoughtWatch | None = field(default=None, init=False)
    _held: str = field(default="", init=False)
    _done: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        assert all(self.stop_strings)
        self._patterns = [_Pattern(text, _borders(text)) for text in self.stop_strings]
        if self.thought is not None and self._patterns:
            self._watched_thought = _ThoughtWatch(self.thought)

    def push(self, text: str) -> tuple[str, str | None]:
        """Take new text; return what may be shown, and the stop string if one is complete.

        After a match nothing more may be pushed; what followed the stop string in ``text`` is dropped.
        """
        assert not self._done
        if not self._patterns:
            return text, None
        if self._watched_thought is not None:
            text = self._watched_thought.decided(text)
        return self._watch(text)

    def _watch(self, text: str) -> tuple[str, str | None]:
        buffer = self._held + text
        for index, char in enumerate(text):
            thought = self._watched_thought
            wanted = self._patterns if thought is None else thought.wanted(self._patterns, char)
            complete = [pattern.text for pattern in wanted if pattern.advance(char)]
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
        other._watched_thought = None if self._watched_thought is None else self._watched_thought.fork()
        return other

    def flush(self) -> str:
        """Return the text that is still held back: the answer ended, and no stop string will come of it."""
        undecided = "" if self._watched_thought is None else self._watched_thought.released()
        shown, matched = self._watch(undecided) if undecided else ("", None)
        held, self._held = self._held, ""
        self._done = True
        return shown if matched else shown + held


class _Place(enum.Enum):
    START = enum.auto()  # white space, and what may become the thought's beginning
    THOUGHT = enum.auto()
    BETWEEN = enum.auto()  # white space behind the thought
    ANSWER = enum.auto()


class _ThoughtWatch:
    """Follows a thought character by character, and tells which stop strings are looked for meanwhile."""

    def __init__(self, marks: ThoughtMarks) -> None:
        self._marks = marks
        self._end = _Pattern(marks.end, _borders(marks.end))
        self._place = _Place.THOUGHT if marks.begun else _Place.START
        self._space: list[str] = []
        self._head = ""

    def decided(self, text: str) -> str:
        """Take new text; return what is certain to be thought or answer by now, of earlier text too."""
        if self._place is not _Place.START:
            return text
        if not self._head:
            head = text.lstrip()
            self._space.append(text[: len(text) - len(head)])
            text = head
        self._head += text
        if self._marks.begin.startswith(self._head):
            if self._head != self._marks.begin:
                return ""
            self._place = _Place.THOUGHT
        else:
            begun = self._head.startswith(self._marks.begin)
            self._place = _Place.THOUGHT if begun else _Place.ANSWER
        return self.released()

    def released(self) -> str:
        """Return what is not decided: the text has ended."""
        if self._place is _Place.START:
            self._place = _Place.ANSWER
        text, self._space, self._head = "".join([*self._space, self._head]), [], ""
        return text

    def wanted(self, patterns: Sequence[_Pattern], char: str) -> Sequence[_Pattern]:
        """Take the next character; return the stop strings that it counts for."""
        if self._place is _Place.BETWEEN and not char.isspace():
            self._place = _Place.ANSWER
        if self._place is _Place.ANSWER:
            return patterns
        if self._place is _Place.THOUGHT and self._end.advance(char):
            self._place = _Place.BETWEEN
        return [pattern for pattern in patterns if self._marks.end in pattern.text]

    def fork(self) -> _ThoughtWatch:
        """Return a copy that goes on by itself."""
        other = _ThoughtWatch(self._marks)
        other._end, other._place = replace(self._end), self._place
        other._space, other._head = [*self._space], self._head
        return other
