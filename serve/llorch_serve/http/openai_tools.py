"""The choice of tools in OpenAI's bodies, for ``openai_requests.py``.

A function that must be called is named in a way of its own, and so are the tools of ``allowed_tools``.
"""

from __future__ import annotations

from typing import Any, Final, Literal

import msgspec

from llorch_serve.errors import FieldViolation
from llorch_serve.requests import ToolChoice, ToolMode

_SHAPES: Final = (
    'expected "none", "auto", "required", {"type": "function", "function": {"name": ...}} or '
    '{"type": "allowed_tools", "allowed_tools": {"mode": "auto" or "required", "tools": [...]}}'
)


class _Named(msgspec.Struct, forbid_unknown_fields=True):
    name: str


class _Function(msgspec.Struct, forbid_unknown_fields=True):
    type: Literal["function"]
    function: _Named


class _Allowed(msgspec.Struct, forbid_unknown_fields=True):
    mode: Literal["auto", "required"]
    tools: list[_Function]


class _AllowedTools(msgspec.Struct, forbid_unknown_fields=True):
    type: Literal["allowed_tools"]
    allowed_tools: _Allowed


def names_function(value: Any) -> bool:
    """Tell whether a ``tool_choice`` names the one function to call."""
    return isinstance(value, dict) and value.get("type") == "function"


def read_tool_choice(value: Any, bad: list[FieldViolation]) -> ToolChoice:
    """Return what ``tool_choice`` asks for, and add to ``bad`` what it must not be."""
    if value is None:
        return ToolChoice()
    if isinstance(value, str):
        if value in ("none", "auto", "required"):
            return ToolChoice(ToolMode(value))
        bad.append(FieldViolation("tool_choice", f"found {value[:64]!r}, {_SHAPES}"))
        return ToolChoice()
    try:
        if not isinstance(value, dict) or value.get("type") != "allowed_tools":
            named = msgspec.convert(value, _Function)
            return ToolChoice(ToolMode.REQUIRED, (named.function.name,))
        allowed = msgspec.convert(value, _AllowedTools).allowed_tools
    except msgspec.ValidationError as error:
        bad.append(FieldViolation("tool_choice", f"{str(error)[:200]}; {_SHAPES}"))
        return ToolChoice()
    if not allowed.tools:
        found = "found no allowed_tools.tools, expected at least one"
        bad.append(FieldViolation("tool_choice", found))
    return ToolChoice(ToolMode(allowed.mode), tuple(tool.function.name for tool in allowed.tools))
