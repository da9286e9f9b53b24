"""Reads calls of tools out of an answer, whatever the format: text and calls in the order in which they came.

Text comes from the parser of reasoning; pieces go to :class:`llorch_serve.chat.parsing.answer.AnswerParser`.
A call is told once it is complete and sound, never in part: a call that turns out to be malformed stays text,
marker included, and what was told could not be taken back.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from llorch_serve.chat.parsing.json_calls import ParsedCall
from llorch_serve.chat.parsing.markers import held_back, is_beginning, space_end


class BodyReader(Protocol):
    """Reads what follows a marker, once: where it ends, and then what calls it holds."""

    def read(self, text: str, start: int) -> tuple[int, bool]:
        """Take text from ``start`` on; return how far it has been read, and whether the body ends there.

        What has not been read, a few hundred characters at most, comes again with what follows it.
        """

    def calls(self, body: str) -> tuple[ParsedCall, ...]:
        """Return the calls of the body, which is all that has been read; none: it is malformed."""


@dataclass(frozen=True, slots=True)
class CallFormat:
    """How a family writes calls.

    detected_by: texts that all occur in the templates of the family.
    begin: the marker in front of calls; hidden special tokens among markers are shown to the parser.
    end: the marker behind a call, which may be missing; empty if the family has none.
    reader: makes a reader for one body.
    bare: calls also come without marker, as an object at the very beginning of an answer or behind another
        call (with ``;`` between); then only tools that the request has are called.
    not_with: texts that do not occur in the templates of the family.
    """

    name: str
    detected_by: tuple[str, ...]
    begin: str
    end: str
    reader: Callable[[], BodyReader]
    bare: bool = False
    not_with: tuple[str, ...] = ()
    inner_markers: tuple[str, ...] = ()

    @property
    def markers(self) -> frozenset[str]:
        """All markers."""
        return frozenset({self.begin, self.end, *self.inner_markers} - {""})


class _Place(enum.Enum):
    START = enum.auto()  # where a call may come without marker
    TEXT = enum.auto()
    BODY = enum.auto()
    BEHIND = enum.auto()  # behind a call


class CallParser:
    """Reads the calls of one answer. Joined pieces depend on the joined text alone; white space behind a call
    is dropped.

    A character costs the same however much is held: what has been read, of a body or of white space, is only
    kept.

    names: the tools that the request has.
    """

    def __init__(self, form: CallFormat, names: frozenset[str]) -> None:
        self._form = form
        self._names = names
        self._place = _Place.START if form.bare else _Place.TEXT
        self._unread = ""  # what may become a marker or a header, and is looked at again with what follows it
        self._kept: list[str] = []  # what has been read of a body, or of what may come before one
        self._reader: BodyReader = form.reader()
        self._opening = ""  # what stood before the body: its marker, a separator, or white space
        self._marked = False
        self._end_due = False

    def push(self, text: str) -> list[str | ParsedCall]:
        """Take new text; return new text and calls, in order."""
        text = self._unread + text
        pieces: list[str | ParsedCall] = []
        at, before = 0, None
        while at < len(text) and before != (self._place, at):  # until nothing moves
            before = (self._place, at)
            match self._place:
                case _Place.START:
                    at = self._start(text, at, pieces)
                case _Place.BEHIND:
                    at = self._behind(text, at, pieces)
                case _Place.TEXT:
                    at = self._text(text, at, pieces)
                case _Place.BODY:
                    at = self._body(text, at, pieces)
        self._unread = text[at:]
        return pieces

    def finish(self) -> list[str | ParsedCall]:
        """Return what was held back: the answer has ended."""
        opening = self._opening if self._place is _Place.BODY else ""
        held = opening + self._released() + self._unread
        self._unread = ""
        return [held] if held else []

    def _start(self, text: str, at: int, pieces: list[str | ParsedCall]) -> int:
        end = space_end(text, at)
        self._kept.append(text[at:end])
        if end < len(text):
            self._open_bare(text, end, self._released(), pieces)
        return end

    def _behind(self, text: str, at: int, pieces: list[str | ParsedCall]) -> int:
        end = space_end(text, at)
        if self._kept:  # behind a separator
            self._kept.append(text[at:end])
            if end < len(text):
                space = self._released()
                self._open_bare(text, end, ";" if text.startswith("{", end) else space, pieces)
            return end
        if end == len(text):
            return end
        if self._end_due and text.startswith(self._form.end, end):
            self._end_due = False
            return end + len(self._form.end)
        if self._end_due and is_beginning(text, end, self._form.end):
            return end
        if self._form.bare and text.startswith(";", end):
            self._kept.append(";")
            return end + 1
        if self._form.bare:
            self._open_bare(text, end, "", pieces)
        else:
            self._place = _Place.TEXT
        return end

    def _text(self, text: str, at: int, pieces: list[str | ParsedCall]) -> int:
        begin = self._form.begin
        found = text.find(begin, at)
        sure = found if found >= 0 else len(text) - held_back(text[at:], (begin,))
        if sure > at:
            pieces.append(text[at:sure])
        if found < 0:
            return sure
        self._open(begin, marked=True)
        return found + len(begin)

    def _body(self, text: str, at: int, pieces: list[str | ParsedCall]) -> int:
        end, complete = self._reader.read(text, at)
        self._kept.append(text[at:end])
        if not complete:
            return end
        body = self._released()
        calls = self._reader.calls(body)
        if calls and (self._marked or all(call.name in self._names for call in calls)):
            self._place, self._end_due = _Place.BEHIND, bool(self._form.end)
            pieces += calls
        else:
            self._place = _Place.TEXT
            pieces.append(self._opening + body)
        return end

    def _released(self) -> str:
        kept, self._kept = "".join(self._kept), []
        return kept

    def _open_bare(self, text: str, at: int, before: str, pieces: list[str | ParsedCall]) -> None:
        """Begin a body without marker if there is one, else text; ``before``: what was kept of the text
        before it.
        """
        if text.startswith("{", at):
            self._open(before, marked=False)
        else:
            self._place = _Place.TEXT
            pieces.append(before)

    def _open(self, opening: str, *, marked: bool) -> None:
        self._place, self._reader = _Place.BODY, self._form.reader()
        self._opening, self._marked = opening, marked
