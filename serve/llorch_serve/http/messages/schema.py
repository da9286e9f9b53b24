"""The bodies of Anthropic's Messages API, as msgspec structures.

A field that is not here is unknown, and treated as those of OpenAI's routes are. What is here and cannot be
honoured is refused or told of in ``reading.py``; what is marked without effect says nothing about the answer.
"""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal

import msgspec

from llorch_serve.http.translated.blocks import any_of
from llorch_serve.http.translated.planning import Extras


class Block(msgspec.Struct, kw_only=True):
    """What blocks of all types have. cache_control: without effect, since every prompt's beginning is kept
    for reuse.
    """

    type: str | None = None
    cache_control: Any = None


class TextBlock(Block, kw_only=True):
    """Text. citations: none can be given to the model. parsed_output: the text, as Anthropic's client reads
    it.
    """

    text: str
    citations: list[Any] | None = None
    parsed_output: Any = None


TEXT_BLOCKS: Final[dict[str, type[Block]]] = {"text": TextBlock}
TextPart = Annotated[msgspec.Raw, any_of(TEXT_BLOCKS)]


class ThinkingBlock(Block, kw_only=True):
    """What the model thought. signature: not looked at."""

    thinking: str
    signature: str | None = None


class ToolUseBlock(Block, kw_only=True):
    """A call that the assistant made; input is an object."""

    id: str
    name: str
    input: msgspec.Raw
    caller: Any = None
    toolset_name: str | None = None


class ToolResultBlock(Block, kw_only=True):
    """What a call came to. content: a text or text blocks. is_error: templates have no place for it."""

    tool_use_id: str
    content: str | list[TextPart] | None = None
    is_error: bool | None = None
    toolset_name: str | None = None


USER_BLOCKS: Final[dict[str, type[Block]]] = {"text": TextBlock, "tool_result": ToolResultBlock}
ASSISTANT_BLOCKS: Final[dict[str, type[Block]]] = {
    "text": TextBlock,
    "thinking": ThinkingBlock,
    "tool_use": ToolUseBlock,
}
TurnPart = Annotated[msgspec.Raw, any_of(USER_BLOCKS, ASSISTANT_BLOCKS)]


class Turn(msgspec.Struct):
    """One message of a conversation."""

    role: Literal["user", "assistant", "system"]
    content: str | list[TurnPart]


class MessagesTool(msgspec.Struct):
    """A tool that the caller runs. input_schema: a JSON Schema.

    Without effect: cache_control, eager_input_streaming. What templates have no place for is told of:
    defer_loading, input_examples, allowed_callers.
    """

    name: str
    input_schema: msgspec.Raw
    type: Literal["custom"] | None = None
    description: str | None = None
    strict: bool | None = None
    cache_control: Any = None
    eager_input_streaming: bool | None = None
    defer_loading: bool | None = None
    input_examples: list[Any] | None = None
    allowed_callers: list[str] | None = None


TOOLS: Final[dict[str, type[MessagesTool]]] = {"custom": MessagesTool}
ToolPart = Annotated[msgspec.Raw, any_of(TOOLS)]


class ToolChoice(msgspec.Struct):
    """Whether the model is to call. name: of the tool, for type ``tool``."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(msgspec.Struct):
    """Whether the model is to think before it answers. budget_tokens, display: told of, not held."""

    type: Literal["enabled", "adaptive", "between_tools", "disabled"]
    budget_tokens: int | None = None
    display: str | None = None


class OutputFormat(msgspec.Struct):
    """The form that the answer is held to. schema: a JSON Schema."""

    type: Literal["json_schema"]
    schema: msgspec.Raw


class OutputConfig(msgspec.Struct):
    """How the answer is to be. effort: given to the template as ``reasoning_effort``."""

    effort: str | None = None
    format: OutputFormat | None = None


class CountBody(Extras, kw_only=True):
    """POST /v1/messages/count_tokens: fields that say what the model is shown, with the extra ones, of which
    all but ``chat_template_kwargs`` count nothing. Absent and null are the same.
    """

    messages: list[Turn]
    model: str | None = None
    system: str | list[TextPart] | None = None
    tools: list[ToolPart] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    output_format: OutputFormat | None = None  # an older place of output_config.format
    # Told of: nothing is ever cut out of a conversation here.
    context_management: Any = None
    # Refused unless they ask for nothing.
    container: Any = None
    mcp_servers: list[Any] | None = None
    # Without effect on the answer.
    cache_control: Any = None
    diagnostics: Any = None
    speed: str | None = None
    user_profile_id: str | None = None
    workspace_id: str | None = None


class MessagesBody(CountBody, kw_only=True):
    """POST /v1/messages. max_tokens: absent, until the context is full."""

    max_tokens: int | None = None
    stream: bool = False
    stop_sequences: list[str] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    # Without effect on the answer.
    metadata: Any = None
    service_tier: str | None = None
    inference_geo: str | None = None
