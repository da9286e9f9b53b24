"""The bodies of OpenAI's Responses API, as msgspec structures.

A field that is not here is unknown, and treated as those of OpenAI's other routes are. What is here and
cannot be honoured is refused or told of in ``reading.py``; what is marked without effect says nothing about
the answer.
"""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal

import msgspec

from llorch_serve.http.openai_schema import StreamOptions
from llorch_serve.http.translated.blocks import any_of
from llorch_serve.http.translated.planning import Extras


class ItemText(msgspec.Struct):
    """Text that the model is given, or wrote. annotations, logprobs: of the latter. parsed: the same, as
    OpenAI's client reads it. None of the three is looked at, however much it is.
    """

    text: str
    type: str | None = None
    annotations: msgspec.Raw = msgspec.field(default_factory=msgspec.Raw)
    logprobs: msgspec.Raw = msgspec.field(default_factory=msgspec.Raw)
    parsed: msgspec.Raw = msgspec.field(default_factory=msgspec.Raw)


class ThoughtText(msgspec.Struct):
    """A part of what the model thought, or of a summary of it."""

    text: str
    type: str | None = None


TEXT_PARTS: Final[dict[str, type[ItemText]]] = {"input_text": ItemText, "output_text": ItemText}
THOUGHT_PARTS: Final[dict[str, type[ThoughtText]]] = {"reasoning_text": ThoughtText}
SUMMARY_PARTS: Final[dict[str, type[ThoughtText]]] = {"summary_text": ThoughtText}
TextPart = Annotated[msgspec.Raw, any_of(TEXT_PARTS)]
ThoughtPart = Annotated[msgspec.Raw, any_of(THOUGHT_PARTS, SUMMARY_PARTS)]


class Item(msgspec.Struct, kw_only=True):
    """What items of all types have. id, status: of an item that a server made; without effect."""

    type: str | None = None
    id: str | None = None
    status: str | None = None


class MessageItem(Item, kw_only=True):
    """A message. phase: what part of an answer it is to its vendor; without effect."""

    role: Literal["user", "assistant", "system", "developer"]
    content: str | list[TextPart]
    phase: str | None = None


class FunctionCall(Item, kw_only=True):
    """A call that the assistant made; arguments is JSON text of an object. parsed_arguments: the same, as
    OpenAI's client reads them.
    """

    call_id: str
    name: str
    arguments: str
    parsed_arguments: Any = None
    namespace: str | None = None
    caller: Any = None


class FunctionCallOutput(Item, kw_only=True):
    """What a call came to: a text or text parts."""

    call_id: str
    output: str | list[TextPart]
    name: str | None = None
    namespace: str | None = None
    caller: Any = None


class Reasoning(Item, kw_only=True):
    """What the model thought. encrypted_content: as this worker gave it, for clients that keep that alone."""

    content: list[ThoughtPart] | None = None
    summary: list[ThoughtPart] | None = None
    encrypted_content: str | None = None


class ItemReference(msgspec.Struct):
    """An item of an answer that is kept here."""

    id: str
    type: str | None = None


ITEMS: Final[dict[str, type[msgspec.Struct]]] = {
    "message": MessageItem,
    "function_call": FunctionCall,
    "function_call_output": FunctionCallOutput,
    "reasoning": Reasoning,
    "item_reference": ItemReference,
}
ItemPart = Annotated[msgspec.Raw, any_of(ITEMS)]


class FunctionTool(msgspec.Struct):
    """A function that the caller runs. parameters: a JSON Schema. defer_loading: told of, not held."""

    name: str
    type: str | None = None
    description: str | None = None
    parameters: msgspec.Raw = msgspec.field(default_factory=msgspec.Raw)  # empty if absent
    strict: bool | None = None
    defer_loading: bool | None = None


TOOLS: Final[dict[str, type[FunctionTool]]] = {"function": FunctionTool}
ToolPart = Annotated[msgspec.Raw, any_of(TOOLS)]


class ChosenTool(msgspec.Struct):
    """A tool by its name."""

    type: Literal["function"]
    name: str


class ChosenTools(msgspec.Struct):
    """One function, or those that may be called: of type ``allowed_tools``, with mode and tools."""

    type: Literal["function", "allowed_tools"]
    name: str | None = None
    mode: Literal["auto", "required"] | None = None
    tools: list[ChosenTool] | None = None


class TextFormat(msgspec.Struct):
    """The form that the answer is held to."""

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    schema: msgspec.Raw = msgspec.field(default_factory=msgspec.Raw)  # empty if absent
    description: str | None = None
    strict: bool | None = None


class TextConfig(msgspec.Struct):
    """How the text of the answer is to be."""

    format: TextFormat | None = None
    verbosity: str | None = None


class ReasoningConfig(msgspec.Struct):
    """How the model is to think. effort: given to the template as ``reasoning_effort``; ``none`` turns
    thoughts off. summary, generate_summary: told of, as thoughts come whole.
    """

    effort: str | None = None
    summary: str | None = None
    generate_summary: str | None = None


class ResponsesBody(Extras, kw_only=True):
    """POST /v1/responses. Absent and null are the same."""

    input: str | list[ItemPart]
    model: str | None = None
    instructions: str | None = None
    previous_response_id: str | None = None
    store: bool = True
    stream: bool = False
    stream_options: StreamOptions | None = None
    max_output_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    stop: str | list[str] | None = None
    tools: list[ToolPart] | None = None
    tool_choice: Literal["none", "auto", "required"] | ChosenTools | None = None
    parallel_tool_calls: bool | None = None
    text: TextConfig | None = None
    reasoning: ReasoningConfig | None = None
    include: list[str] | None = None
    top_logprobs: int | None = None
    metadata: dict[str, str] | None = None
    # Refused unless they ask for nothing.
    background: bool | None = None
    context_management: list[Any] | None = None
    conversation: Any = None
    max_tool_calls: int | None = None
    moderation: Any = None
    prompt: Any = None
    truncation: str | None = None
    # Without effect on the answer.
    client_metadata: Any = None
    prompt_cache_key: str | None = None
    prompt_cache_options: Any = None
    prompt_cache_retention: str | None = None
    safety_identifier: str | None = None
    service_tier: str | None = None
    user: str | None = None
