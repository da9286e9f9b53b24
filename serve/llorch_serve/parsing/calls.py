"""Reads calls of tools out of an answer, whatever the format: text and calls in the order in which they came.

Text comes from the parser of reasoning; pieces go to :class:`llorch_serve.parsing.answer.AnswerParser`. A call is told
once it is complete and sound, never in part: a call that turns out to be malformed stays text, marker included, and
what was told could not be taken back.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from llorch_serve.parsing.json_calls import ParsedCall
from llorch_serve.parsing.markers import find_first, held_back, is_beginning


@dataclass(frozen=True, slots=True)
class Body:
    """What a marker was followed by: ``calls`` in the first ``length`` characters; no calls: it is malformed."""

    calls: tuple[ParsedCall, ...]
    length: int


class BodyReader(Protocol):
    """Reads what follows a marker, once."""

    def read(self, text: str) -> Body | None:
        """Take all text after the marker so far; return the body, or None while it is not complete."""


@dataclass(frozen=True, slots=True)
class CallFormat:
    """How a family writes calls.

    detected_by: texts that all occur in the templates of the family.
    begin: the marker in front of calls; hidden special tokens among markers are shown to the parser.
    end: the marker behind a call, which may be missing; empty if the family has none.
    reader: makes a reader for one body.
    bare: calls also come without marker, as an object at the very beginning of an answer or behind another call (with
        ``;`` between); then only tools that the request has are called.
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
    """Reads the calls of one answer. Joined pieces depend on the joined text alone; white space behind a call is dropped.

    names: the tools that the request has.
    """

    def __init__(self, form: CallFormat, names: frozenset[str]) -> None:
        self._form = form
        self._names = names
        self._place = _Place.START if form.bare else _Place.TEXT
        self._held = ""
        self._reader: BodyReader = form.reader()
        self._opening = ""  # what stood before the body: its marker, a separator, or white space
        self._marked = False
        self._end_due = False

    def push(self, text: str) -> list[str | ParsedCall]:
        """Take new text; return new text and calls, in order."""
        self._held += text
        pieces: list[str | ParsedCall] = []
        before = None
        while before != (self._place, len(self._held)):  # until nothing moves
            before = (self._place, len(self._held))
            if self._place is _Place.START:
                self._start()
            if self._place is _Place.BEHIND:
                self._behind()
            if self._place is _Place.TEXT:
                pieces += self._text()
            if self._place is _Place.BODY:
                pieces += self._body()
        return pieces

    def finish(self) -> list[str | ParsedCall]:
        """Return what was held back: the answer has ended."""
        held, self._held = self._held, ""
        if self._place is _Place.BODY:
            return [self._opening + held]
        if self._place is _Place.BEHIND:
            held = held.lstrip()
        return [held] if held else []

    def _start(self) -> None:
        rest = self._held.lstrip()
        if rest.startswith("{"):
            self._open(self._held[: len(self._held) - len(rest)], rest, marked=False)
        elif rest:
            self._place = _Place.TEXT

    def _text(self) -> list[str | ParsedCall]:
        found = find_first(self._held, (self._form.begin,))
        if found is None:
            sure = len(self._held) - held_back(self._held, (self._form.begin,))
            text, self._held = self._held[:sure], self._held[sure:]
        else:
            text = self._held[: found[0]]
            self._open(self._form.begin, self._held[found[0] + len(self._form.begin) :], marked=True)
        return [text] if text else []

    def _body(self) -> list[str | ParsedCall]:
        body = self._reader.read(self._held)
        if body is None:
            return []
        taken, self._held = self._held[: body.length], self._held[body.length :]
        sound = bool(body.calls) and (self._marked or all(call.name in self._names for call in body.calls))
        if sound:
            self._place, self._end_due = _Place.BEHIND, bool(self._form.end)
            return list(body.calls)
        self._place = _Place.TEXT
        return [self._opening + taken] if self._opening + taken else []

    def _behind(self) -> None:
        rest = self._held.lstrip()
        end = self._form.end
        if self._end_due and rest.startswith(end):
            self._end_due = False
            rest = rest[len(end) :].lstrip()
        self._held = rest
        if not rest or (self._end_due and is_beginning(rest, end)):
            return
        separator = ";" if rest.startswith(";") else ""
        following = rest.removeprefix(";").lstrip()
        if self._form.bare and following.startswith("{"):
            self._open(separator, following, marked=False)
        elif following or not self._form.bare:
            self._place = _Place.TEXT

    def _open(self, opening: str, held: str, *, marked: bool) -> None:
        self._place, self._reader = _Place.BODY, self._form.reader()
        self._opening, self._held, self._marked = opening, held, marked
