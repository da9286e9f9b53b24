"""Splits an answer into what the model thought and what it says.

Text comes from the detokeniser; what the model says goes on to the parser of calls. White space around the
thoughts is dropped, since templates write it themselves.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from llorch_serve.chat.parsing.markers import held_back, is_beginning, space_end
from llorch_serve.text.stops import ThoughtMarks


@dataclass(frozen=True, slots=True)
class ReasoningFormat:
    """How a family writes its thoughts.

    detected_by: texts that all occur in the templates of the family.
    begin, end: around the thoughts, which come first.
    answer_begin, answer_end: around what is said, if the family marks that too; else empty.
    """

    name: str
    detected_by: tuple[str, ...]
    begin: str
    end: str
    answer_begin: str = ""
    answer_end: str = ""

    @property
    def markers(self) -> frozenset[str]:
        """All markers."""
        return frozenset({self.begin, self.end, self.answer_begin, self.answer_end} - {""})


@dataclass(frozen=True, slots=True)
class ExpectedThought:
    """What an answer may begin with. begun: the prompt ends inside the thought, as some templates have it;
    else the model may begin one itself.
    """

    form: ReasoningFormat
    begun: bool

    @property
    def marks(self) -> ThoughtMarks:
        """What finds the thought in text."""
        return ThoughtMarks(self.form.begin, self.form.end, self.begun)


class _Place(enum.Enum):
    START = enum.auto()  # nothing but white space so far
    THOUGHTS = enum.auto()
    BETWEEN = enum.auto()  # white space, and the mark of what is said
    ANSWER = enum.auto()
    MARKED_ANSWER = enum.auto()  # its end is looked for


class ReasoningParser:
    """Splits one answer. Joined pieces depend on the joined text alone.

    A character costs the same however much is held: white space that has been read is only kept.

    exact: white space behind the thoughts is part of what is said.
    """

    def __init__(self, expected: ExpectedThought, *, exact: bool = False) -> None:
        self._form = expected.form
        self._place = _Place.THOUGHTS if expected.begun else _Place.START
        self._exact = exact
        self._space: list[str] = []  # white space that may count yet
        self._unread = ""  # what may become a marker, and is looked at again with what follows it
        self._thought = False  # whether a thought has been told, after which white space counts

    def push(self, text: str) -> tuple[str, str]:
        """Take new text; return new thoughts and new text of the answer."""
        self._unread += text  # which was less than a marker
        thoughts, answer = "", ""
        place = None
        while place is not self._place:  # until nothing moves
            place = self._place
            if place is _Place.START:
                answer += self._start()
            elif place is _Place.THOUGHTS:
                thoughts += self._think()
            elif place is _Place.BETWEEN:
                self._between()
            elif place is _Place.MARKED_ANSWER:
                answer += self._marked()
        if self._place is _Place.ANSWER:
            answer, self._unread = answer + self._unread, ""
        return thoughts, answer

    def finish(self) -> tuple[str, str]:
        """Return what was held back: the answer has ended."""
        held = self._released() + self._unread
        self._unread = ""
        if self._place is _Place.THOUGHTS:
            return self._trimmed(held.rstrip()), ""
        return "", "" if self._place is _Place.BETWEEN and not held.strip() else held

    def _start(self) -> str:
        self._take_space()
        if self._unread.startswith(self._form.begin):
            self._released()
            self._unread, self._place = self._unread[len(self._form.begin) :], _Place.THOUGHTS
        elif not is_beginning(self._unread, 0, self._form.begin):
            self._place = _Place.ANSWER
            return self._released()
        return ""

    def _think(self) -> str:
        thoughts, end, rest = self._unread.partition(self._form.end)
        if end:
            self._unread, self._place = rest, _Place.BETWEEN
            return self._trimmed((self._released() + thoughts).rstrip())
        sure = len(thoughts) - held_back(thoughts, (self._form.end,))
        told, self._unread = thoughts[:sure].rstrip(), thoughts[sure:]
        # White space before what may become the end is not told either.
        space = thoughts[len(told) : sure]
        if told:
            told = self._trimmed(self._released() + told)
        if space:
            self._space.append(space)
        return told

    def _trimmed(self, thoughts: str) -> str:
        if not self._thought:
            thoughts = thoughts.lstrip()
            self._thought = bool(thoughts)
        return thoughts

    def _between(self) -> None:
        if not self._exact:
            self._take_space()
        rest, mark = self._unread, self._form.answer_begin
        if mark and rest.startswith(mark):
            self._released()
            self._unread, self._place = rest[len(mark) :], _Place.MARKED_ANSWER
        elif rest and not (mark and is_beginning(rest, 0, mark)):
            self._released()
            self._place = _Place.ANSWER

    def _marked(self) -> str:
        answer, end, rest = self._unread.partition(self._form.answer_end)
        if end:
            self._unread, self._place = rest, _Place.ANSWER
            return answer
        sure = len(answer) - held_back(answer, (self._form.answer_end,))
        self._unread = answer[sure:]
        return answer[:sure]

    def _take_space(self) -> None:
        end = space_end(self._unread)
        if end:
            self._space.append(self._unread[:end])
            self._unread = self._unread[end:]

    def _released(self) -> str:
        space, self._space = "".join(self._space), []
        return space
