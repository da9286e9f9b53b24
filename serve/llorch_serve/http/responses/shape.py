"""What an answer of the Responses API says beside what was generated, kept from its body until its end.

Made by ``reading.py``, and told by ``answers.py``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final

import msgspec

from llorch_serve.http.openai_schema import Message
from llorch_serve.http.responses.schema import ResponsesBody, TextFormat

MAX_ECHOED_BYTES: Final = 2**16
"""Of the caller's words that an answer repeats, as they are kept for as long as the answer takes."""

_UNTOLD: Final = {
    "metadata": b"{}",
    "reasoning": b"{}",
    "text": b'{"format":{"type":"text"}}',
    "tool_choice": b'"auto"',
    "tools": b"[]",
}
"""What stands in the place of words that are too long, where their place may not be empty."""


@dataclass(slots=True)
class Beginning:
    """The conversation that an answer goes on from, until the answer begins; then it is kept, or not.

    size: bytes.
    """

    owner: str
    messages: tuple[Message, ...]
    size: int


@dataclass(frozen=True, slots=True)
class ResponseShape:
    """What an answer says beside what was generated.

    now: returns the time that the answer tells when it ends, in seconds since 1970.
    echoed: fields of the body that the answer repeats. wraps: thoughts come as ``encrypted_content`` too.
    logprobs: texts come with those of their tokens. ignored: fields of the body without effect.
    beginning: empty unless the answer is to be kept; taken out once.
    """

    response_id: str
    created: int
    now: Callable[[], float]
    model: str
    echoed: dict[str, Any]
    wraps: bool
    logprobs: bool
    ignored: tuple[str, ...]
    beginning: list[Beginning] = field(default_factory=list)


def echoed(body: ResponsesBody) -> dict[str, Any]:
    """Return the fields of a body that its answer repeats; what is in the caller's words, if that is not too
    long.
    """
    form = TextFormat("text") if body.text is None or body.text.format is None else body.text.format
    told = {
        name: value
        for name, value in msgspec.structs.asdict(form).items()
        if value not in (None, msgspec.Raw())
    }
    effort = None if body.reasoning is None else body.reasoning.effort
    words: dict[str, Any] = {
        "instructions": body.instructions,
        "metadata": body.metadata or {},
        "prompt_cache_key": body.prompt_cache_key,
        "reasoning": {"effort": effort, "summary": None},
        "safety_identifier": body.safety_identifier,
        "text": {"format": told, "verbosity": "medium"},
        "tool_choice": body.tool_choice or "auto",
        "tools": body.tools or [],
        "user": body.user,
    }
    encoded = {name: msgspec.json.encode(value) for name, value in words.items()}
    if sum(map(len, encoded.values())) > MAX_ECHOED_BYTES:
        encoded = dict.fromkeys(words, b"null") | _UNTOLD
    return {
        **{name: msgspec.Raw(value) for name, value in encoded.items()},
        "background": False,
        "max_output_tokens": body.max_output_tokens,
        "max_tool_calls": None,
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": body.previous_response_id,
        "service_tier": "default",
        "store": body.store,
        "temperature": body.temperature,
        "top_logprobs": body.top_logprobs or 0,
        "top_p": body.top_p,
        "truncation": "disabled",
    }
