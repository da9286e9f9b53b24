"""Answers in OpenAI's shapes: whole, and as chunks of a stream.

Input: what :class:`llorch_serve.rpc.calls.LiveCall` collects. Output: dictionaries that become JSON. ``llorch``, beyond
OpenAI's schema, carries what our own contract promises with every answer: seed, matched stop and timings.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from llorch_serve.http.openai_requests import AnswerShape
from llorch_serve.requests import Completion
from llorch_serve.sequence import FinishReason


def finish_reason(completion: Completion) -> str:
    """Return OpenAI's word for how an answer ended."""
    return "stop" if completion.reason is FinishReason.STOP else "length"


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


class CompletionShapes:
    """The shapes of /v1/completions."""

    def whole(self, shape: AnswerShape, answers: list[tuple[str, Completion]]) -> dict[str, Any]:
        """Return a whole answer, with one choice for each prompt."""
        choices = [
            {
                "index": index,
                "text": text,
                "logprobs": None,
                "finish_reason": finish_reason(completion),
                "llorch": extra(completion),
            }
            for index, (text, completion) in enumerate(answers)
        ]
        return _head(shape, "text_completion") | {"choices": choices, "usage": usage(c for _, c in answers)}

    def first(self, shape: AnswerShape, index: int) -> dict[str, Any] | None:
        """Return the chunk that opens a choice, if there is one."""
        return None

    def chunk(
        self, shape: AnswerShape, index: int, text: str, completion: Completion | None
    ) -> dict[str, Any]:
        """Return one chunk of a choice."""
        choice: dict[str, Any] = {"index": index, "text": text, "logprobs": None}
        return _chunk(shape, "text_completion", choice, completion)

    def usage(self, shape: AnswerShape, completions: Iterable[Completion]) -> dict[str, Any]:
        """Return the last chunk of a stream that was to tell its usage."""
        return _head(shape, "text_completion") | {"choices": [], "usage": usage(completions)}


class ChatShapes:
    """The shapes of /v1/chat/completions."""

    def whole(self, shape: AnswerShape, answers: list[tuple[str, Completion]]) -> dict[str, Any]:
        """Return a whole answer."""
        choices = [
            {
                "index": index,
                "message": {"role": "assistant", "content": text, "refusal": None},
                "logprobs": None,
                "finish_reason": finish_reason(completion),
                "llorch": extra(completion),
            }
            for index, (text, completion) in enumerate(answers)
        ]
        return _head(shape, "chat.completion") | {"choices": choices, "usage": usage(c for _, c in answers)}

    def first(self, shape: AnswerShape, index: int) -> dict[str, Any] | None:
        """Return the chunk that names the role."""
        choice = {"index": index, "delta": {"role": "assistant", "content": ""}, "logprobs": None}
        return _chunk(shape, "chat.completion.chunk", choice, None)

    def chunk(
        self, shape: AnswerShape, index: int, text: str, completion: Completion | None
    ) -> dict[str, Any]:
        """Return one chunk of a choice."""
        choice: dict[str, Any] = {
            "index": index,
            "delta": {"content": text} if text else {},
            "logprobs": None,
        }
        return _chunk(shape, "chat.completion.chunk", choice, completion)

    def usage(self, shape: AnswerShape, completions: Iterable[Completion]) -> dict[str, Any]:
        """Return the last chunk of a stream that was to tell its usage."""
        return _head(shape, "chat.completion.chunk") | {"choices": [], "usage": usage(completions)}


def _head(shape: AnswerShape, kind: str) -> dict[str, Any]:
    return {"id": shape.answer_id, "object": kind, "created": shape.created, "model": shape.model}


def _chunk(
    shape: AnswerShape, kind: str, choice: dict[str, Any], completion: Completion | None
) -> dict[str, Any]:
    choice["finish_reason"] = None if completion is None else finish_reason(completion)
    if completion is not None:
        choice["llorch"] = extra(completion)
    body = _head(shape, kind) | {"choices": [choice]}
    if shape.include_usage:
        body["usage"] = None
    return body
