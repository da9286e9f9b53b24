"""Which formats a model answers in: by the text of its chat template, or as the user says.

The worker asks once for each template, when it starts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, TypeVar

from llorch_serve.chat.parsing.calls import CallFormat
from llorch_serve.chat.parsing.reasoning import ReasoningFormat
from llorch_serve.chat.parsing.tool_formats import TOOL_FORMATS
from llorch_serve.config import AUTO
from llorch_serve.errors import UsageError
from llorch_serve.structured.spec import CallWriting

NONE: Final = "none"

REASONING_FORMATS: Final = (
    ReasoningFormat(
        name="granite",
        detected_by=("<think></think>", "<response></response>"),
        begin="<think>",
        end="</think>",
        answer_begin="<response>",
        answer_end="</response>",
    ),
    ReasoningFormat(name="think", detected_by=("</think>",), begin="<think>", end="</think>"),
)


F = TypeVar("F", CallFormat, ReasoningFormat)


@dataclass(frozen=True, slots=True)
class AnswerFormats:
    """How a model writes calls and thoughts; None: answers are text and nothing else.

    writing: how a call that is required is written, where there is a format of calls.
    """

    tools: CallFormat | None
    reasoning: ReasoningFormat | None
    writing: CallWriting | None = None

    def markers(self, *, calls: bool) -> frozenset[str]:
        """Return the texts that must be seen, even where they are special tokens; those of calls only if
        asked for.
        """
        forms = [self.reasoning, self.tools if calls else None]
        return frozenset().union(*(form.markers for form in forms if form is not None))


def choose_formats(template: str, *, tools: str = AUTO, reasoning: str = AUTO) -> AnswerFormats:
    """Return the formats for a template's source.

    tools, reasoning: the name of a format; ``auto``: the first whose texts the template has; ``none``.
    Raises UsageError for other names.
    """
    calls = _choose(TOOL_FORMATS, tools, template, "--tool-format")
    thoughts = _choose(REASONING_FORMATS, reasoning, template, "--reasoning-format")
    return AnswerFormats(calls, thoughts, None if calls is None else calls.writing(template))


def _choose(formats: tuple[F, ...], asked: str, template: str, flag: str) -> F | None:
    if asked == NONE:
        return None
    if asked == AUTO:
        return next((form for form in formats if _fits(form, template)), None)
    for form in formats:
        if form.name == asked:
            return form
    names = ", ".join([AUTO, NONE, *(form.name for form in formats)])
    raise UsageError(f"{flag} is {asked!r}; expected one of {names}")


def _fits(form: CallFormat | ReasoningFormat, template: str) -> bool:
    unwanted = form.not_with if isinstance(form, CallFormat) else ()
    return all(text in template for text in form.detected_by) and not any(
        text in template for text in unwanted
    )
