"""Which tools a chat lets its model call, and the form of such calls.

Tools come with a prompt as JSON text. Templates are shown some of them, parsers look for their names, and a
choice of tools that requires a call becomes a grammar of the model's own format of calls.
"""

from __future__ import annotations

import re
from typing import Any, Final

import msgspec

from llorch_serve.errors import FieldViolation, InvalidRequestError
from llorch_serve.files.json_errors import NOT_JSON
from llorch_serve.requests import ChatPrompt, ToolMode
from llorch_serve.structured.spec import MAX_TEXT_BYTES, CallableTool, CallWriting, ToolCalls

CHOICE_FIELD: Final = "input.chat.tool_choice"
TOOLS_FIELD: Final = "input.chat.tools"
_MOST_NAMED: Final = 16  # tools, in a refusal
_MAX_NAME_CHARS: Final = 256  # of a tool that must be called
_PLAIN_NAME: Final = re.compile(r"[\w.:/-]+")
# What else says which properties there are, so that those listed are not all.
_OPEN: Final = frozenset(
    {"additionalProperties", "patternProperties", "unevaluatedProperties", "$ref", "allOf", "anyOf", "oneOf"}
    | {"if", "dependentSchemas", "$dynamicRef"}
)


class _Function(msgspec.Struct):
    name: str = ""
    parameters: Any = None


class _Tool(_Function):
    function: _Function | None = None

    @property
    def called(self) -> _Function:
        return self if self.function is None else self.function

    @property
    def parameters_field(self) -> str:
        return "parameters" if self.function is None else "function.parameters"


def shown_tools(prompt: ChatPrompt) -> tuple[str, ...]:
    """Return the tools that the template is given, as JSON text."""
    choice = prompt.tool_choice
    if choice.mode is ToolMode.NONE:
        return ()
    if choice.mode is ToolMode.AUTO and choice.names:
        names = frozenset(choice.names)
        return tuple(tool for tool in prompt.tools if _read(tool).called.name in names)
    return prompt.tools


def callable_names(prompt: ChatPrompt) -> frozenset[str]:
    """Return the names of the tools that the model may call."""
    names = frozenset(_read(tool).called.name for tool in shown_tools(prompt))
    return names.intersection(prompt.tool_choice.names) if prompt.tool_choice.names else names


def choice_violations(prompt: ChatPrompt) -> list[FieldViolation]:
    """Return what is wrong with the choice of tools; empty if all is well."""
    choice = prompt.tool_choice
    if choice.mode is ToolMode.NONE:
        return [FieldViolation(CHOICE_FIELD, "names tools with none, expected no names")] * bool(choice.names)
    if choice.mode is ToolMode.REQUIRED and not prompt.tools:
        return [FieldViolation(CHOICE_FIELD, "requires a call and there are no tools; send at least one")]
    known = [_read(tool).called.name for tool in prompt.tools] if choice.names else []
    known_names = frozenset(known)
    unknown = next((name for name in choice.names if name not in known_names), None)
    if unknown is None:
        return []
    more = "" if len(known) <= _MOST_NAMED else f" and {len(known) - _MOST_NAMED} more"
    names = ", ".join(repr(name[:64]) for name in known[:_MOST_NAMED]) + more
    expected = f"expected names of the request's tools: {names}" if known else "and the request has no tools"
    return [FieldViolation(CHOICE_FIELD, f"found {unknown[:64]!r}, {expected}")]


def held_calls(prompt: ChatPrompt, writing: CallWriting | None) -> ToolCalls | None:
    """Return the form of calls of the tools that may be called; None where there are none.

    writing: how the model writes calls; None: its template has no format that is known here.
    Raises InvalidRequestError where a call is required and the model has no format, or a tool cannot be
    called by a grammar.
    """
    required = prompt.tool_choice.mode is ToolMode.REQUIRED
    if not required and (writing is None or not shown_tools(prompt)):
        return None
    if writing is None:
        found = (
            "requires a call, and the model's chat template has no format of calls that this worker knows; "
            "leave it out, or start the worker with the model's format: --tool-format NAME"
        )
        raise InvalidRequestError([FieldViolation(CHOICE_FIELD, found)])
    names, bad = frozenset(prompt.tool_choice.names), []
    tools = []
    for index, text in enumerate(prompt.tools):
        tool = _read(text)
        name = tool.called.name
        if (names and name not in names) or not (name or required):
            continue  # what has no name is not called, and nobody asks that it is
        bad += _name_violations(name, f"{TOOLS_FIELD}[{index}]", quoted=writing.quoted)
        field = f"{TOOLS_FIELD}[{index}].{tool.parameters_field}"
        tools.append(CallableTool(name, _arguments(tool.called.parameters, field, bad), field))
    size = sum(len(tool.parameters.encode()) + len(tool.name.encode()) for tool in tools)
    if size > MAX_TEXT_BYTES:
        found = f"found {size} bytes of names and parameters, expected at most {MAX_TEXT_BYTES} where a "
        bad.append(
            FieldViolation(TOOLS_FIELD, found + "grammar holds calls; name fewer tools in tool_choice")
        )
    if bad:
        raise InvalidRequestError(bad)
    if not tools:
        return None
    return ToolCalls(writing, tuple(tools), several=prompt.parallel_tool_calls)


def _read(text: str) -> _Tool:
    """Return a tool; one without a name where a template alone knows its shape."""
    try:
        return msgspec.json.decode(text, type=_Tool)
    except NOT_JSON:
        return _Tool()


def _name_violations(name: str, field: str, *, quoted: bool) -> list[FieldViolation]:
    """Return what keeps a tool from being called by its name."""
    if not 0 < len(name) <= _MAX_NAME_CHARS:
        found = f"found a function name of {len(name)} characters, expected 1 to {_MAX_NAME_CHARS}"
    elif not quoted and not _PLAIN_NAME.fullmatch(name):
        found = f"found the function name {name[:64]!r}; this model writes letters, digits and . : / - _ only"
    else:
        return []
    return [FieldViolation(field, f"{found}, as a grammar holds its calls")]


def _arguments(parameters: object, field: str, bad: list[FieldViolation]) -> str:
    """Return the JSON Schema of a call's arguments: an object, with the listed properties where nothing says
    that there are others.
    """
    schema = {"properties": {}} if parameters in (None, {}) else parameters
    if not isinstance(schema, dict):
        found = f"found a JSON {type(schema).__name__}, expected a JSON Schema: an object"
        bad.append(FieldViolation(field, found))
        return "{}"
    type_ = schema.get("type", "object")
    if type_ != "object" and not (isinstance(type_, list) and "object" in type_):
        found = f"found the type {str(type_)[:64]!r}, expected 'object': arguments have names"
        bad.append(FieldViolation(field, found))
    schema = {**schema, "type": "object"}
    listed, required = schema.get("properties"), schema.get("required", [])
    if (
        isinstance(listed, dict)
        and isinstance(required, list)
        and not (_OPEN & schema.keys())
        and all(name in listed for name in required if isinstance(name, str))
    ):
        schema["additionalProperties"] = False
    return msgspec.json.encode(schema).decode()
