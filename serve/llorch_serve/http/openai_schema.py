"""The bodies of OpenAI's two generation routes, as msgspec structures: what is read, and what is known but
has no effect.

A field that is not here is unknown, and refused unless the worker is told to ignore such; see
``unknown_fields.py``. What is here and cannot be honoured is refused by its name in ``openai_requests.py``;
what is marked without effect says nothing about the answer's text.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec


class StreamOptions(msgspec.Struct):
    """How a stream is sent. include_obfuscation: padding against eavesdroppers on lengths, which is not
    sent.
    """

    include_usage: bool | None = None
    include_obfuscation: bool | None = None


class ContentPart(msgspec.Struct):
    """One part of a message's content; only texts can be read by the models served."""

    type: str
    text: str | None = None
    # Kept as they came, since the part is refused.
    image_url: msgspec.Raw = msgspec.field(default_factory=msgspec.Raw)
    input_audio: msgspec.Raw = msgspec.field(default_factory=msgspec.Raw)
    file: msgspec.Raw = msgspec.field(default_factory=msgspec.Raw)
    refusal: Any = None
    # Without effect on the answer.
    id: Any = None
    index: Any = None
    annotations: Any = None  # of a text that some server wrote: where it found what it says
    cache_control: Any = None  # what to keep in a cache, which is done by itself


class CalledFunction(msgspec.Struct):
    """What a call calls; arguments is JSON text of an object, null for a call without any."""

    name: str
    arguments: str | None = None
    parsed_arguments: Any = None  # the same, as OpenAI's client reads them


class MessageCall(msgspec.Struct):
    """A call that an assistant's message holds."""

    function: CalledFunction
    id: str | None = None
    type: Literal["function"] | None = None
    index: Any = None  # its place in a stream, without effect


class Message(msgspec.Struct):
    """One message. refusal, audio, annotations and function_call are read so that conversations can be sent
    back as they came.

    reasoning: an older name of reasoning_content. prefix: of the last message: the answer goes on with it.
    """

    role: str
    content: str | list[ContentPart] | None = None
    name: str | None = None
    refusal: Any = None
    audio: Any = None
    annotations: Any = None
    function_call: Any = None
    tool_calls: list[MessageCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    prefix: bool | None = None
    # Of the message itself: who keeps it, where and since when. Without effect on the answer.
    id: Any = None
    index: Any = None
    type: Any = None
    status: Any = None
    timestamp: Any = None
    created: Any = None
    created_at: Any = None
    opts: Any = None
    metadata: Any = None
    parsed: Any = None  # its content once more, as OpenAI's client reads it


class JsonSchemaFormat(msgspec.Struct):
    """A JSON Schema with what OpenAI has around it. strict: answers keep the schema whatever it says."""

    schema: msgspec.Raw = msgspec.field(default_factory=msgspec.Raw)  # empty if absent
    name: str | None = None
    description: str | None = None
    strict: bool | None = None


class ResponseFormat(msgspec.Struct):
    """What form the answer must have. schema: as some servers take it, in place of json_schema; name,
    description and strict are as there.
    """

    type: str
    json_schema: JsonSchemaFormat | None = None
    schema: msgspec.Raw = msgspec.field(default_factory=msgspec.Raw)  # empty if absent
    name: str | None = None
    description: str | None = None
    strict: bool | None = None


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
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False
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
