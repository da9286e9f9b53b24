"""Answers in OpenAI's shapes: whole, and as chunks of a stream.

Input: the updates that :class:`llorch_serve.calls.live_call.LiveCall` collects. Output: dictionaries that
become JSON. ``llorch``, beyond OpenAI's schema, carries what our own contract promises with every answer:
seed, matched stop and timings.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

import msgspec

from llorch_serve.engine.sequence import FinishReason
from llorch_serve.http.openai_logprobs import Columns, chat_logprobs
from llorch_serve.http.openai_requests import AnswerShape
from llorch_serve.requests import Completion, GenerationUpdate, ToolCallDelta, whole_calls

_REASONS: Final = {
    FinishReason.STOP: "stop",
    FinishReason.LENGTH: "length",
    FinishReason.TOOL_CALLS: "tool_calls",
}


def finish_reason(completion: Completion) -> str:
    """Return OpenAI's word for how an answer ended."""
    return _REASONS[completion.reason]


def usage(completions: Iterable[Completion]) -> dict[str, Any]:
    """Return the tokens of all answers of a body together."""
    done = list(completions)
    prompt, generated = sum(c.prompt_tokens for c in done), sum(c.generated_tokens for c in done)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": generated,
        "total_tokens": prompt + generated,
        "prompt_tokens_details": {"cached_tokens": sum(c.cached_tokens for c in done)},
        "completion_tokens_details": {
            "accepted_prediction_tokens": sum(c.accepted_tokens for c in done),
            "rejected_prediction_tokens": sum(c.drafted_tokens - c.accepted_tokens for c in done),
        },
    }


def extra(completion: Completion) -> dict[str, Any]:
    """Return what llorch says of an answer beyond OpenAI's schema. Durations in seconds."""
    timings = completion.timings
    return {
        "seed": completion.seed,
        "stop_matched": completion.stop_matched,
        "timings": {
            "queue_s": timings.queue_s,
            "prefill_s": timings.prefill_s,
            "decode_s": timings.decode_s,
        },
    }


class CompletionChoice:
    """One choice of /v1/completions."""

    whole_object = chunk_object = "text_completion"

    def __init__(self, shape: AnswerShape, index: int) -> None:
        self._shape = shape
        self._index = index
        self._columns = Columns()

    def first(self) -> dict[str, Any] | None:
        """Return the chunk that opens the choice, if there is one."""
        return None

    def whole(self, update: GenerationUpdate) -> dict[str, Any]:
        """Return the whole choice."""
        return self._choice(update)

    def chunk(self, update: GenerationUpdate) -> dict[str, Any]:
        """Return a chunk of a stream."""
        return _chunk(self._shape, self.chunk_object, self._choice(update))

    def _choice(self, update: GenerationUpdate) -> dict[str, Any]:
        logprobs = self._columns.of(update) if self._shape.logprobs else None
        choice: dict[str, Any] = {"index": self._index, "text": update.text, "logprobs": logprobs}
        return choice | _end(update, self._shape)


class ChatChoice:
    """One choice of /v1/chat/completions."""

    whole_object, chunk_object = "chat.completion", "chat.completion.chunk"

    def __init__(self, shape: AnswerShape, index: int) -> None:
        self._shape = shape
        self._index = index

    def first(self) -> dict[str, Any] | None:
        """Return the chunk that names the role."""
        choice = {
            "index": self._index,
            "delta": {"role": "assistant", "content": ""},
            "logprobs": None,
            "finish_reason": None,
        }
        return _chunk(self._shape, self.chunk_object, choice)

    def whole(self, update: GenerationUpdate) -> dict[str, Any]:
        """Return the whole choice."""
        calls = [_whole_call(call) for call in whole_calls(update.tool_calls)]
        content = None if calls and not update.text else update.text
        message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
        if update.reasoning:
            message["reasoning_content"] = update.reasoning
        if calls:
            message["tool_calls"] = calls
        return {"index": self._index, "message": message, "logprobs": self._logprobs(update)} | _end(
            update, self._shape
        )

    def chunk(self, update: GenerationUpdate) -> dict[str, Any]:
        """Return a chunk of a stream."""
        delta: dict[str, Any] = {"content": update.text} if update.text else {}
        if update.reasoning:
            delta["reasoning_content"] = update.reasoning
        if calls := [_call_delta(call) for call in update.tool_calls if not call.broken]:
            delta["tool_calls"] = calls
        choice: dict[str, Any] = {"index": self._index, "delta": delta, "logprobs": self._logprobs(update)}
        choice |= _end(update, self._shape)
        if broken := [call.index for call in update.tool_calls if call.broken]:
            # OpenAI has no word for it, and what has been sent cannot be taken back.
            choice["llorch"] = choice.get("llorch", {}) | {"broken_tool_calls": broken}
        return _chunk(self._shape, self.chunk_object, choice)

    def _logprobs(self, update: GenerationUpdate) -> dict[str, Any] | None:
        return chat_logprobs(update.logprobs) if self._shape.logprobs else None


def _call_delta(call: ToolCallDelta) -> dict[str, Any]:
    """Return a part of a call; its id and name come with its first part alone."""
    function: dict[str, Any] = {"arguments": call.arguments}
    delta: dict[str, Any] = {"index": call.index, "function": function}
    if call.id or call.name:
        delta |= {"id": call.id, "type": "function"}
        function["name"] = call.name
    return delta


def _whole_call(call: ToolCallDelta) -> dict[str, Any]:
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": call.id, "type": "function", "function": function}


Choice = CompletionChoice | ChatChoice


def whole_answer(
    shape: AnswerShape, kind: type[Choice], choices: list[msgspec.Raw], completions: Iterable[Completion]
) -> dict[str, Any]:
    """Return a whole answer of several choices, which are JSON already."""
    body = _head(shape, kind.whole_object) | {"choices": choices, "usage": usage(completions)}
    return body | _left_aside(shape)


def usage_chunk(shape: AnswerShape, kind: type[Choice], completions: Iterable[Completion]) -> dict[str, Any]:
    """Return the last chunk of a stream that was to tell its usage."""
    return _head(shape, kind.chunk_object) | {"choices": [], "usage": usage(completions)}


def _head(shape: AnswerShape, name: str) -> dict[str, Any]:
    return {"id": shape.answer_id, "object": name, "created": shape.created, "model": shape.model}


def _end(update: GenerationUpdate, shape: AnswerShape) -> dict[str, Any]:
    if update.completion is None:
        return {"finish_reason": None}
    told = extra(update.completion)
    if shape.ignored:
        told["ignored"] = shape.ignored
    return {"finish_reason": finish_reason(update.completion), "llorch": told}


def _left_aside(shape: AnswerShape) -> dict[str, Any]:
    """Return what is told of a body whose fields were not all read, beside its choices as in each."""
    return {"llorch": {"ignored": shape.ignored}} if shape.ignored else {}


def _chunk(shape: AnswerShape, name: str, choice: dict[str, Any]) -> dict[str, Any]:
    body = _head(shape, name) | {"choices": [choice]}
    if choice["finish_reason"] is not None:
        body |= _left_aside(shape)
    return body | {"usage": None} if shape.include_usage else body
