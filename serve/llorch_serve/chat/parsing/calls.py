"""Reads calls of tools out of an answer, whatever the format: text and calls in the order in which they came.

Text comes from the parser of reasoning; pieces go to :class:`llorch_serve.chat.parsing.answer.AnswerParser`.
A call is told part by part as it comes. One that turns out to be malformed or breaks off stays text, marker
included, and a last part says that what was told of it is no call.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, replace
from typing import Protocol

from llorch_serve.chat.parsing.bodies import CallPart
from llorch_serve.chat.parsing.json_calls import ParsedCall
from llorch_serve.chat.parsing.markers import held_back, is_beginning, space_end
from llorch_serve.structured.spec import CallWriting


class BodyReader(Protocol):
    """Reads what follows a marker, once: where it ends, and then what calls it holds."""

    def read(self, text: str, start: int) -> tuple[int, bool]:
        """Take text from ``start`` on; return how far it has been read, and whether the body ends there.

        What has not been read, a few hundred characters at most, comes again with what follows it.
        """

    def news(self) -> list[CallPart]:
        """Return the parts of calls that have been read since the last time, by their place in the body."""

    def calls(self, body: str) -> tuple[ParsedCall, ...]:
        """Return the calls of the body, which is all that has been read; none: it is malformed."""


class ReaderFactory(Protocol):
    """Makes a reader for one body."""

    def __call__(self, *, first_only: bool = False) -> BodyReader:
        """Return it. first_only: of several calls, the first is enough."""


@dataclass(frozen=True, slots=True)
class CallFormat:
    """How a family writes calls.

    detected_by: texts that all occur in the templates of the family.
    begin: the marker in front of calls; hidden special tokens among markers are shown to the parser.
    end: the marker behind a call, which may be missing; empty if the family has none.
    reader: makes a reader for one body, of which the first call may be enough (``first_only``).
    bare: calls also come without marker, as an object at the very beginning of an answer or behind another
        call (with ``;`` between); then only tools that the request has are called.
    not_with: texts that do not occur in the templates of the family.
    writings: how calls that are required are written; the first whose texts the template has, else the last.
    """

    name: str
    detected_by: tuple[str, ...]
    begin: str
    end: str
    reader: ReaderFactory
    bare: bool = False
    not_with: tuple[str, ...] = ()
    inner_markers: tuple[str, ...] = ()
    writings: tuple[tuple[tuple[str, ...], CallWriting], ...] = ()

    def writing(self, template: str) -> CallWriting:
        """Return how calls are written by the model with this template."""
        fitting = (made for texts, made in self.writings if all(text in template for text in texts))
        return next(fitting, self.writings[-1][1])

    @property
    def markers(self) -> frozenset[str]:
        """All markers."""
        return frozenset({self.begin, self.end, *self.inner_markers} - {""})


class _Place(enum.Enum):
    START = enum.auto()  # where a call may come without marker
    TEXT = enum.auto()
    BODY = enum.auto()
    BEHIND = enum.auto()  # behind a call
    MARKER = enum.auto()  # where an answer has its first call, or none
    DONE = enum.auto()  # behind the only call that is wanted
    PLAIN = enum.auto()  # in an answer without calls


@dataclass(slots=True)
class _Told:
    """What has been told of one call of a body."""

    name: str
    arguments: list[str]

    def is_of(self, call: ParsedCall) -> bool:
        """Tell whether that was this call, and all of it."""
        return self.name == call.name and "".join(self.arguments) == call.arguments


class CallParser:
    """Reads the calls of one answer. Joined pieces depend on the joined text alone; white space behind a call
    is dropped.

    A character costs the same however much is held: what has been read, of a body or of white space, is only
    kept.

    names: the tools that the request has.
    first_only: nothing is read behind the first call.
    at_start: an answer begins with its calls, or has none: it is held to a form that may hold markers.
    """

    def __init__(
        self, form: CallFormat, names: frozenset[str], *, first_only: bool = False, at_start: bool = False
    ) -> None:
        self._form = form
        self._names = names
        self._first_only = first_only
        self._told: list[_Told] = []  # of the body
        self._places = 0  # of calls before the body
        self._place = _Place.START if form.bare else _Place.MARKER if at_start else _Place.TEXT
        self._other = _Place.PLAIN if at_start else _Place.TEXT  # where text leads that is no call
        self._unread = ""  # what may become a marker or a header, and is looked at again with what follows it
        self._kept: list[str] = []  # what has been read of a body, or of what may come before one
        self._reader = self._new_reader()
        self._opening = ""  # what stood before the body: its marker, a separator, or white space
        self._marked = False
        self._end_due = False

    @property
    def done(self) -> bool:
        """Whether the only call that is wanted has been told."""
        return self._place is _Place.DONE

    def push(self, text: str) -> list[str | CallPart]:
        """Take new text; return new text and calls, in order."""
        text = self._unread + text
        pieces: list[str | CallPart] = []
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
                case _Place.MARKER:
                    at = self._marker(text, at)
                case _Place.PLAIN:
                    pieces.append(text[at:])
                    at = len(text)
                case _Place.DONE:
                    at = len(text)
        self._unread = text[at:]
        return pieces

    def finish(self) -> list[str | CallPart]:
        """Return what was held back: the answer has ended."""
        pieces: list[str | CallPart] = []
        opening = ""
        if self._place is _Place.BODY:
            opening = self._opening
            self._break(pieces)
        held = opening + self._released() + self._unread
        self._unread = ""
        return [*pieces, held] if held else pieces

    def _start(self, text: str, at: int, pieces: list[str | CallPart]) -> int:
        end = space_end(text, at)
        self._kept.append(text[at:end])
        if end < len(text):
            self._open_bare(text, end, self._released(), pieces)
        return end

    def _marker(self, text: str, at: int) -> int:
        if text.startswith(self._form.begin, at):
            self._open(self._form.begin, marked=True)
            return at + len(self._form.begin)
        if not is_beginning(text, at, self._form.begin):
            self._place = self._other
        return at

    def _behind(self, text: str, at: int, pieces: list[str | CallPart]) -> int:
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

    def _text(self, text: str, at: int, pieces: list[str | CallPart]) -> int:
        begin = self._form.begin
        found = text.find(begin, at)
        sure = found if found >= 0 else len(text) - held_back(text[at:], (begin,))
        if sure > at:
            pieces.append(text[at:sure])
        if found < 0:
            return sure
        self._open(begin, marked=True)
        return found + len(begin)

    def _body(self, text: str, at: int, pieces: list[str | CallPart]) -> int:
        end, complete = self._reader.read(text, at)
        self._kept.append(text[at:end])
        self._tell(pieces)
        if not complete:
            return end
        body = self._released()
        calls = self._reader.calls(body)
        if self._first_only:
            calls = calls[:1]
        if (
            calls
            and (self._marked or all(call.name in self._names for call in calls))
            and len(self._told) <= len(calls)
            and all(told.is_of(call) for told, call in zip(self._told, calls, strict=False))
        ):
            self._place, self._end_due = _Place.BEHIND, bool(self._form.end)
            self._complete(calls, pieces)
        else:
            self._place = self._other
            self._break(pieces)
            pieces.append(self._opening + body)
        return end

    def _tell(self, pieces: list[str | CallPart]) -> None:
        """Tell the news of the body, unless it has no marker and calls what is no tool."""
        for part in self._reader.news():
            if part.name:
                if not self._marked and part.name not in self._names:
                    return
                self._told.append(_Told(part.name, []))
            elif part.place < len(self._told):
                self._told[part.place].arguments.append(part.arguments)
            else:
                return
            pieces.append(replace(part, place=self._places + part.place))

    def _complete(self, calls: tuple[ParsedCall, ...], pieces: list[str | CallPart]) -> None:
        """Tell that a body's calls are sound, and those of which nothing has been told."""
        for place, call in enumerate(calls):
            known = CallPart(self._places + place, ends=True)
            new = CallPart(self._places + place, call.name, call.arguments, call.id, ends=True)
            pieces.append(known if place < len(self._told) else new)
        self._places += len(calls)
        self._told = []
        if self._first_only:
            self._place = _Place.DONE

    def _break(self, pieces: list[str | CallPart]) -> None:
        """Tell that what was told of a body's calls is no call."""
        pieces += [CallPart(self._places + place, broken=True) for place in range(len(self._told))]
        self._places += len(self._told)
        self._told = []

    def _released(self) -> str:
        kept, self._kept = "".join(self._kept), []
        return kept

    def _open_bare(self, text: str, at: int, before: str, pieces: list[str | CallPart]) -> None:
        """Begin a body without marker if there is one, else text; ``before``: what was kept of the text
        before it.
        """
        if text.startswith("{", at):
            self._open(before, marked=False)
        else:
            self._place = self._other
            pieces.append(before)

    def _open(self, opening: str, *, marked: bool) -> None:
        self._place, self._reader = _Place.BODY, self._new_reader()
        self._opening, self._marked = opening, marked

    def _new_reader(self) -> BodyReader:
        return self._form.reader(first_only=self._first_only)
