"""The formats of calls: one row each, and how what follows their marker is read."""

from __future__ import annotations

import re
from typing import Final

import msgspec

from llorch_serve.json_errors import NOT_JSON
from llorch_serve.parsing.calls import Body, CallFormat
from llorch_serve.parsing.json_calls import ParsedCall, ValueScanner, read_calls

# Beyond any name; a longer text without a brace is no call.
_MAX_HEADER_CHARS: Final = 512
_HEADER: Final = re.compile(r"\s*([\w.:/-]+)(?:\[CALL_ID\]([A-Za-z0-9_-]+))?(?:\[ARGS\])?\s*")


class JsonBody:
    """An object or a list of objects, each a call."""

    def __init__(self) -> None:
        self._begin: int | None = None
        self._scanner = ValueScanner()

    def read(self, text: str) -> Body | None:
        """Take all text so far; return the body, or None while it is not complete."""
        if self._begin is None:
            begin = len(text) - len(text.lstrip())
            if begin == len(text):
                return None
            if text[begin] not in "{[":
                return Body((), 0)
            self._begin = self._scanner.at = begin
        end = self._scanner.end(text)
        return None if end is None else Body(read_calls(text[self._begin : end]), end)


class NamedBody:
    """Mistral's: a list of calls, or a name, maybe an id, and an object of arguments."""

    def __init__(self) -> None:
        self._list = JsonBody()
        self._scanner = ValueScanner()
        self._header: re.Match[str] | None = None

    def read(self, text: str) -> Body | None:
        """Take all text so far; return the body, or None while it is not complete."""
        if self._header is None:
            if not text or text.isspace():
                return None
            if text.lstrip()[0] in "{[":
                return self._list.read(text)
            brace = text.find("{", 0, _MAX_HEADER_CHARS)
            if brace < 0:
                return None if len(text) < _MAX_HEADER_CHARS else Body((), 0)
            self._header = _HEADER.fullmatch(text, 0, brace)
            if self._header is None:
                return Body((), 0)
            self._scanner.at = brace
        end = self._scanner.end(text)
        if end is None:
            return None
        arguments = text[self._header.end() : end]
        try:
            msgspec.json.decode(arguments, type=dict[str, object])
        except NOT_JSON:
            return Body((), end)
        return Body((ParsedCall(self._header[1], arguments, self._header[2] or ""),), end)


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
