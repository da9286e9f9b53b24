"""The formats of calls: one row each."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from llorch_serve.chat.parsing.bodies import JsonBody, NamedBody
from llorch_serve.chat.parsing.calls import CallFormat
from llorch_serve.structured.spec import CallWriting

_NAMED: Final = CallWriting("[TOOL_CALLS]", "[ARGS]", "", between="", quoted=False)
_OBJECT: Final = CallWriting('{"name": ', ', "arguments": ', "}", between=", ")

TOOL_FORMATS: Final = (
    CallFormat(
        name="mistral",
        detected_by=("[TOOL_CALLS]",),
        begin="[TOOL_CALLS]",
        end="",
        reader=NamedBody,
        inner_markers=("[CALL_ID]", "[ARGS]"),
        writings=(
            (("[ARGS]", "[CALL_ID]"), replace(_NAMED, id_marker="[CALL_ID]")),
            (("[ARGS]",), _NAMED),
            ((), replace(_OBJECT, before="[TOOL_CALLS][", behind="]")),
        ),
    ),
    CallFormat(
        name="granite",
        detected_by=("<|tool_call|>", "<|start_of_role|>"),
        begin="<|tool_call|>",
        end="",
        reader=JsonBody,
        writings=(((), replace(_OBJECT, before="<|tool_call|>[", behind="]")),),
    ),
    CallFormat(
        name="llama3",
        detected_by=("<|start_header_id|>", '{"name": function name, "parameters": '),
        begin="<|python_tag|>",
        end="",
        reader=JsonBody,
        bare=True,
        # Its templates refuse a conversation with two calls at once.
        writings=(((), replace(_OBJECT, middle=', "parameters": ', between=None)),),
    ),
    CallFormat(
        name="hermes",
        detected_by=("<tool_call>",),
        begin="<tool_call>",
        end="</tool_call>",
        reader=JsonBody,
        not_with=("<function=",),  # a dialect in XML
        writings=(
            (
                (),
                CallWriting('<tool_call>\n{"name": ', ', "arguments": ', "}\n</tool_call>", between="\n"),
            ),
        ),
    ),
)
