"""The formats of calls: one row each, and how what follows their marker is read."""

from __future__ import annotations

import re
from typing import Final

import msgspec

from llorch_serve.chat.parsing.calls import CallFormat
from llorch_serve.chat.parsing.json_calls import ParsedCall, ValueScanner, read_calls
from llorch_serve.chat.parsing.markers import space_end
from llorch_serve.files.json_errors import NOT_JSON

# Beyond any name; a longer text without a brace is no call.
_MAX_HEADER_CHARS: Final = 512
_HEADER: Final = re.compile(r"([\w.:/-]+)(?:\[CALL_ID\]([A-Za-z0-9_-]+))?(?:\[ARGS\])?\s*")


class JsonBody:
    """An object or a list of objects, each a call."""

    def __init__(self) -> None:
        self._begun = False
        self._scanner = ValueScanner()

    def read(self, text: str, start: int) -> tuple[int, bool]:
        """Take text from ``start`` on, see :class:`llorch_serve.chat.parsing.calls.BodyReader`."""
        if not self._begun:
            start = space_end(text, start)
            if start == len(text):
                return start, False
            if text[start] not in "{[":
                return start, True
            self._begun = True
        return self._scanner.read(text, start)

    def calls(self, body: str) -> tuple[ParsedCall, ...]:
        """Return the calls of the whole body; none if it is malformed."""
        return read_calls(body.lstrip())


class NamedBody:
    """Mistral's: a list of calls, or a name, maybe an id, and an object of arguments."""

    def __init__(self) -> None:
        self._list: JsonBody | None = None
        self._scanner = ValueScanner()
        self._before = 0  # characters before the arguments, those of white space before the name among them
        self._header: re.Match[str] | None = None

    def read(self, text: str, start: int) -> tuple[int, bool]:
        """Take text from ``start`` on, see :class:`llorch_serve.chat.parsing.calls.BodyReader`."""
        if self._header is None and self._list is None:
            begin = space_end(text, start)
            self._before += begin - start
            if begin == len(text):
                return begin, False
            if text[begin] not in "{[":
                return self._read_header(text, begin)
            self._list, start = JsonBody(), begin
        return (self._list or self._scanner).read(text, start)

    def _read_header(self, text: str, start: int) -> tuple[int, bool]:
        latest = max(start, start + _MAX_HEADER_CHARS - self._before)
        brace = text.find("{", start, latest)
        if brace < 0:
            return start, len(text) >= latest
        self._header = _HEADER.fullmatch(text, start, brace)
        if self._header is None:
            return start, True
        self._before += brace - start
        return self._scanner.read(text, brace)

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


TOOL_FORMATS: Final = (
    CallFormat(
        name="mistral",
        detected_by=("[TOOL_CALLS]",),
        begin="[TOOL_CALLS]",
        end="",
        reader=NamedBody,
        inner_markers=("[CALL_ID]", "[ARGS]"),
    ),
    CallFormat(
        name="granite",
        detected_by=("<|tool_call|>", "<|start_of_role|>"),
        begin="<|tool_call|>",
        end="",
        reader=JsonBody,
    ),
    CallFormat(
        name="llama3",
        detected_by=("<|start_header_id|>", '{"name": function name, "parameters": '),
        begin="<|python_tag|>",
        end="",
        reader=JsonBody,
        bare=True,
    ),
    CallFormat(
        name="hermes",
        detected_by=("<tool_call>",),
        begin="<tool_call>",
        end="</tool_call>",
        reader=JsonBody,
        not_with=("<function=",),  # a dialect in XML
    ),
)
