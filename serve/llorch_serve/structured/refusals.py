"""Which field of a request a refused grammar is about, for ``compiler.py``: of several tools, one."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace

from llorch_serve.structured.composing import compose
from llorch_serve.structured.examiner import Examiner
from llorch_serve.structured.limits import EXAMINATION_S
from llorch_serve.structured.spec import AfterThought, HeldForm, ToolCalls, field_of


def refused_field(form: HeldForm, special: Mapping[int, str], examiner: Examiner) -> str:
    """Return the field whose grammar has been refused: of several tools, the first that is refused alone."""
    calls = form.form if isinstance(form, AfterThought) else form
    field = field_of(form)
    if not isinstance(calls, ToolCalls):
        return field
    if len(calls.tools) == 1:
        return f"{field}[{calls.tools[0].place}]"
    deadline = time.monotonic() + EXAMINATION_S  # for all of them, as others wait
    for tool in calls.tools:
        if time.monotonic() >= deadline:
            break
        if examiner.refusal(compose(replace(calls, tools=(tool,)), special)) is not None:
            return f"{field}[{tool.place}]"
    return field
