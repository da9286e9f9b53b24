"""Splits an answer into what the model thought and what it says.

Text comes from the detokeniser; what the model says goes on to the parser of calls. White space around the thoughts
is dropped, since templates write it themselves.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from llorch_serve.parsing.markers import held_back, is_beginning


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


class _Place(enum.Enum):
    START = enum.auto()  # nothing but white space so far
    THOUGHTS = enum.auto()
    BETWEEN = enum.auto()  # white space, and the mark of what is said
    ANSWER = enum.auto()
    MARKED_ANSWER = enum.auto()  # its end is looked for


class ReasoningParser:
    """Splits one answer. Joined pieces depend on the joined text alone.

    begun: the prompt ends inside the thoughts, as some templates have it.
    """

    def __init__(self, form: ReasoningFormat, *, begun: bool) -> None:
        self._form = form
        self._place = _Place.THOUGHTS if begun else _Place.START
        self._held = ""
        self._thought = False  # whether a thought has been told, after which white space counts

    def push(self, text: str) -> tuple[str, str]:
        """Take new text; return new thoughts and new text of the answer."""
        self._held += text
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
            answer, self._held = answer + self._held, ""
        return thoughts, answer

    def finish(self) -> tuple[str, str]:
        """Return what was held back: the answer has ended."""
        held, self._held = self._held, ""
        if self._place is _Place.THOUGHTS:
            return self._trimmed(held.rstrip()), ""
        return "", "" if self._place is _Place.BETWEEN and not held.strip() else held

    def _start(self) -> str:
        rest = self._held.lstrip()
        if rest.startswith(self._form.begin):
            self._held, self._place = rest[len(self._form.begin) :], _Place.THOUGHTS
        elif not is_beginning(rest, self._form.begin):
            self._place = _Place.ANSWER
        return ""

    def _think(self) -> str:
        thoughts, end, rest = self._held.partition(self._form.end)
        if end:
            self._held, self._place = rest, _Place.BETWEEN
            return self._trimmed(thoughts.rstrip())
        # White space before what may become the end is not told either.
        sure = thoughts[: len(thoughts) - held_back(thoughts, (self._form.end,))].rstrip()
        self._held = thoughts[len(sure) :]
        return self._trimmed(sure)

    def _trimmed(self, thoughts: str) -> str:
        if not self._thought:
            thoughts = thoughts.lstrip()
            self._thought = bool(thoughts)
        return thoughts

    def _between(self) -> None:
        rest, mark = self._held.lstrip(), self._form.answer_begin
        if mark and rest.startswith(mark):
            self._held, self._place = rest[len(mark) :], _Place.MARKED_ANSWER
        elif rest and not (mark and is_beginning(rest, mark)):
            self._held, self._place = rest, _Place.ANSWER

    def _marked(self) -> str:
        answer, end, rest = self._held.partition(self._form.answer_end)
        if end:
            self._held, self._place = rest, _Place.ANSWER
            return answer
        sure = len(answer) - held_back(answer, (self._form.answer_end,))
        self._held = answer[sure:]
        return answer[:sure]
