"""Which field of a request a refused grammar is about, for ``compiler.py``: of several tools, one."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace

from llorch_serve.structured.composing import compose
from llorch_serve.structured.examiner import Examiner
from llorch_serve.structured.limits import EXAMINATION_S
from llorch_serve.structured.spec import (
    AfterThought,
    CallableTool,
    FormOrCalls,
    HeldForm,
    JsonSchema,
    ToolCalls,
    field_of,
)
from llorch_serve.structured.translate import place_of


def refused_field(form: HeldForm, reason: str, special: Mapping[int, str], examiner: Examiner) -> str:
    """Return the field whose grammar has been refused: of several tools, the first that is refused alone.

    reason: the library's, which may quote what it does not know. special: special tokens, by id.
    """
    inner = form.form if isinstance(form, AfterThought) else form
    if isinstance(inner, FormOrCalls):
        of_form = examiner.refusal(compose(inner.form, special))
        inner = inner.calls if of_form is None else inner.form
    if not isinstance(inner, ToolCalls):
        return field_of(inner) + place_of(inner, reason)
    tool = _refused_tool(inner, special, examiner)
    if tool is None:
        return field_of(inner)
    return tool.field + place_of(JsonSchema(tool.parameters), reason)


def _refused_tool(calls: ToolCalls, special: Mapping[int, str], examiner: Examiner) -> CallableTool | None:
    if len(calls.tools) == 1:
        return calls.tools[0]
    deadline = time.monotonic() + EXAMINATION_S  # for all of them, as others wait
    for tool in calls.tools:
        if time.monotonic() >= deadline:
            break
        if examiner.refusal(compose(replace(calls, tools=(tool,)), special)) is not None:
            return tool
    return None
