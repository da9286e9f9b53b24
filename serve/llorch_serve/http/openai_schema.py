"""The bodies of OpenAI's two generation routes, as msgspec structures: what is read, and what is known but
has no effect.

A field that is not here is unknown and refused. What is here and cannot be honoured is refused by its name in
``openai_requests.py``; what is marked without effect says nothing about the answer's text.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec


class StreamOptions(msgspec.Struct, forbid_unknown_fields=True):
    """How a stream is sent. include_obfuscation: padding against eavesdroppers on lengths, which is not
    sent.
    """

    include_usage: bool = False
    include_obfuscation: bool = False


class ContentPart(msgspec.Struct):
    """One part of a message's content; only texts can be read by the models served."""

    type: str
    text: str | None = None


class CalledFunction(msgspec.Struct, forbid_unknown_fields=True):
    """What a call calls; arguments is JSON text of an object, null for a call without any."""

    name: str
    arguments: str | None = None


class MessageCall(msgspec.Struct, forbid_unknown_fields=True):
    """A call that an assistant's message holds."""

    function: CalledFunction
    id: str = ""
    type: Literal["function"] = "function"


class Message(msgspec.Struct, forbid_unknown_fields=True):
    """One message. refusal, audio and annotations are read so that conversations can be sent back as they
    came.
    """

    role: str
    content: str | list[ContentPart] | None = None
    name: str | None = None
    refusal: str | None = None
    audio: Any = None
    annotations: Any = None
    function_call: Any = None
    tool_calls: list[MessageCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None


class JsonSchemaFormat(msgspec.Struct, forbid_unknown_fields=True):
    """A JSON Schema with what OpenAI has around it. strict: answers keep the schema whatever it says."""

    schema: msgspec.Raw
    name: str | None = None
    description: str | None = None
    strict: bool | None = None


class ResponseFormat(msgspec.Struct, forbid_unknown_fields=True):
    """What form the answer must have."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None


class Shared(msgspec.Struct, kw_only=True):
    """Fields that both routes have. Absent and null are the same."""

    model: str | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    temperature: float | None = None
    top_p: float | None = None
    max_tokens: int | None = None
    stop: str | list[str] | None = None
    seed: int | None = None
    n: int = 1
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    # Beyond OpenAI's schema, as other servers of local models have them.
    top_k: int | None = None
    min_p: float | None = None
    typical_p: float | None = None
    repeat_last_n: int | None = None
    repetition_penalty: float | None = None
    min_tokens: int = 0
    stop_token_ids: list[int] = msgspec.field(default_factory=list)
    ignore_eos: bool = False
    # Without effect on the answer.
    user: str | None = None
    metadata: Any = None
    store: Any = None


class CompletionBody(Shared, kw_only=True):
    """POST /v1/completions."""

    prompt: str | list[str | int | list[int]]
    logprobs: int | None = None
    echo: bool = False
    best_of: int | None = None
    suffix: str | None = None


class ChatBody(Shared, kw_only=True):
    """POST /v1/chat/completions."""

    messages: list[Message]
    max_completion_tokens: int | None = None
    logprobs: bool = False
    top_logprobs: int | None = None
    response_format: ResponseFormat | None = None
    tools: list[msgspec.Raw] | None = None
    chat_template_kwargs: msgspec.Raw = msgspec.field(default_factory=msgspec.Raw)  # empty if absent
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    functions: list[Any] | None = None
    function_call: Any = None
    modalities: list[str] | None = None
    audio: Any = None
    prediction: Any = None
    reasoning_effort: str | None = None
    verbosity: str | None = None
    web_search_options: Any = None
    # Without effect on the answer.
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
