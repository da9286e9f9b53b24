"""Reads what follows a call's marker while it grows: where it ends, and the calls in it, part by part.

Used by the rows of ``tool_formats.py``. The name of a call is told once the object of its arguments begins,
and these then as they come. A call that is written in another order is told when the body is complete.
"""

from __future__ import annotations

import enum
import re
from dataclasses import dataclass
from typing import Final

import msgspec

from llorch_serve.chat.parsing.json_calls import ParsedCall, ValueScanner, first_bracket, read_calls
from llorch_serve.chat.parsing.markers import space_end
from llorch_serve.files.json_errors import NOT_JSON

# Beyond any name; a longer text without a brace is no call whose arguments can be told as they come.
_MAX_HEADER_CHARS: Final = 512
_HEADER: Final = re.compile(r"([\w.:/-]+)(?:\[CALL_ID\]([A-Za-z0-9_-]+))?(?:\[ARGS\])?\s*")
_OBJECT_HEADER: Final = re.compile(
    r'\{\s*(?:"id"\s*:\s*"([\w-]+)"\s*,\s*)?"name"\s*:\s*("(?:[^"\\]|\\.)+")\s*,\s*'
    r'"(?:arguments|parameters)"\s*:\s*'
)
_BETWEEN: Final = re.compile(r"[\s,]*")


@dataclass(frozen=True, slots=True)
class CallPart:
    """A part of a call: arguments of the same place join.

    place: which call it is, from 0.
    name, id: with the first part of a call; id: the model's, or empty.
    ends: the call is complete and sound.
    broken: what was told of it is no call, and comes as text.
    """

    place: int
    name: str = ""
    arguments: str = ""
    id: str = ""
    ends: bool = False
    broken: bool = False


class _Phase(enum.Enum):
    BEFORE = enum.auto()  # white space
    BETWEEN = enum.auto()  # in a list, before an object or the end
    HEADER = enum.auto()  # an object, as far as its arguments
    ARGUMENTS = enum.auto()
    BEHIND = enum.auto()  # the rest of the object
    WHOLE = enum.auto()  # told when all of it has been read


class JsonBody:
    """An object or a list of objects, each a call. first_only: of a list, the first call is enough."""

    def __init__(self, *, first_only: bool = False) -> None:
        self._first_only = first_only
        self._phase = _Phase.BEFORE
        self._scanner = ValueScanner()
        self._outside = 0  # brackets around each object
        self._place = 0
        self._news: list[CallPart] = []

    def read(self, text: str, start: int) -> tuple[int, bool]:
        """Take text from ``start`` on, see :class:`llorch_serve.chat.parsing.calls.BodyReader`."""
        at, before = start, None
        while at < len(text) and before != (self._phase, at):
            before = (self._phase, at)
            at, complete = self._step(text, at)
            if complete:
                return at, True
        return at, False

    def news(self) -> list[CallPart]:
        """Return the parts that have been read since the last time."""
        news, self._news = self._news, []
        return news

    def calls(self, body: str) -> tuple[ParsedCall, ...]:
        """Return the calls of the whole body; none if it is malformed."""
        text = body.lstrip()
        cut = self._first_only and self._outside and self._phase is not _Phase.WHOLE
        return read_calls(text[1:].lstrip() if cut else text)

    def _step(self, text: str, at: int) -> tuple[int, bool]:
        match self._phase:
            case _Phase.BEFORE:
                return self._begin(text, space_end(text, at))
            case _Phase.BETWEEN:
                return self._between(text, at)
            case _Phase.HEADER:
                return self._read_header(text, at), False
            case _Phase.ARGUMENTS:
                end, done = self._scanner.read(text, at, until=self._outside + 1)
                self._news.append(CallPart(self._place, arguments=text[at:end]))
                self._phase = _Phase.BEHIND if done else self._phase
                return end, False
            case _Phase.BEHIND:
                return self._finish_object(text, at)
            case _Phase.WHOLE:
                return self._scanner.read(text, at)

    def _begin(self, text: str, at: int) -> tuple[int, bool]:
        if at == len(text):
            return at, False
        if text[at] == "[":
            self._outside, self._phase = 1, _Phase.BETWEEN
            return self._scanner.read(text, at, end=at + 1)
        self._phase = _Phase.HEADER
        return at, text[at] != "{"

    def _between(self, text: str, at: int) -> tuple[int, bool]:
        found = _BETWEEN.match(text, at)
        assert found is not None
        at = found.end()
        if at == len(text):
            return at, False
        self._phase = _Phase.HEADER if text[at] == "{" else _Phase.WHOLE
        return at, False

    def _read_header(self, text: str, at: int) -> int:
        latest = at + _MAX_HEADER_CHARS
        bracket = first_bracket(text, at + 1, latest)
        if bracket is None and len(text) < latest:
            return at
        header = None if bracket is None else _OBJECT_HEADER.fullmatch(text, at, bracket)
        if bracket is None or header is None or text[bracket] != "{":
            self._phase = _Phase.WHOLE
            return at
        try:
            name = msgspec.json.decode(header[2], type=str)
        except NOT_JSON:
            self._phase = _Phase.WHOLE
            return at
        self._news.append(CallPart(self._place, name, id=header[1] or ""))
        self._phase = _Phase.ARGUMENTS
        end, _ = self._scanner.read(text, at, end=bracket)
        return end

    def _finish_object(self, text: str, at: int) -> tuple[int, bool]:
        end, done = self._scanner.read(text, at, until=self._outside)
        if not done:
            return end, False
        self._place += 1
        self._phase = _Phase.BETWEEN
        return end, not self._outside or self._first_only


class NamedBody:
    """Mistral's: a list of calls, or a name, maybe an id, and an object of arguments."""

    def __init__(self, *, first_only: bool = False) -> None:
        self._list: JsonBody | None = None
        self._first_only = first_only
        self._scanner = ValueScanner()
        self._before = 0  # characters before the arguments, those of white space before the name among them
        self._header: re.Match[str] | None = None
        self._news: list[CallPart] = []

    def read(self, text: str, start: int) -> tuple[int, bool]:
        """Take text from ``start`` on, see :class:`llorch_serve.chat.parsing.calls.BodyReader`."""
        if self._header is None and self._list is None:
            begin = space_end(text, start)
            self._before += begin - start
            if begin == len(text):
                return begin, False
            if text[begin] not in "{[":
                return self._read_header(text, begin)
            self._list, start = JsonBody(first_only=self._first_only), begin
        return self._read_arguments(text, start) if self._list is None else self._list.read(text, start)

    def news(self) -> list[CallPart]:
        """Return the parts that have been read since the last time."""
        if self._list is not None:
            return self._list.news()
        news, self._news = self._news, []
        return news

    def _read_header(self, text: str, start: int) -> tuple[int, bool]:
        latest = max(start, start + _MAX_HEADER_CHARS - self._before)
        brace = text.find("{", start, latest)
        if brace < 0:
            return start, len(text) >= latest
        self._header = _HEADER.fullmatch(text, start, brace)
        if self._header is None:
            return start, True
        self._before += brace - start
        self._news.append(CallPart(0, self._header[1], id=self._header[2] or ""))
        return self._read_arguments(text, brace)

    def _read_arguments(self, text: str, start: int) -> tuple[int, bool]:
        end, complete = self._scanner.read(text, start)
        self._news.append(CallPart(0, arguments=text[start:end]))
        return end, complete

    def calls(self, body: str) -> tuple[ParsedCall, ...]:
        """Return the calls of the whole body; none if it is malformed."""
        if self._list is not None:
            return self._list.calls(body)
        if self._header is None:
            return ()
        arguments = body[self._before :]
        try:
            msgspec.json.decode(arguments, type=dict[str, object])
        except NOT_JSON:
            return ()
        return (ParsedCall(self._header[1], arguments, self._header[2] or ""),)
