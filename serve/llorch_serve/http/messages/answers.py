"""Answers in the shapes of Anthropic's Messages API: whole, and as the events of a stream.

Input: the updates of one answer. Output: dictionaries that become JSON. ``llorch``, beyond the API's schema,
carries what our own contract promises with every answer, and the fields that had no effect.
"""

from __future__ import annotations

from typing import Any, Final

import msgspec

from llorch_serve.engine.sequence import FinishReason
from llorch_serve.files.json_errors import NOT_JSON
from llorch_serve.http.messages.errors import error_body
from llorch_serve.http.messages.reading import MessageShape
from llorch_serve.http.openai_answers import extra
from llorch_serve.http.problems import Problem
from llorch_serve.http.translated.answering import Event
from llorch_serve.http.translated.segments import Change, Segment, SegmentKind, Segments, Stage
from llorch_serve.requests import Completion, GenerationUpdate

UNSIGNED: Final = "unsigned"
"""The signature of thoughts. Nothing looks at it here, but some clients send back signed thoughts alone."""


class MessageAnswer:
    """One answer. Implements :class:`llorch_serve.http.translated.answering.Answer`."""

    def __init__(self, shape: MessageShape) -> None:
        self._shape = shape
        self._segments = Segments()
        self._end: Completion | None = None

    def opening(self) -> list[Event]:
        """Return the beginning, with nothing counted yet."""
        return [_event("message_start", message=self._message()), _event("ping")]

    def take(self, update: GenerationUpdate) -> list[Event]:
        """Take an update; return its events."""
        events = [event for change in self._segments.take(update) for event in _block_events(change)]
        if update.completion is not None:
            self._end = update.completion
            told = self._message()
            delta = {name: told[name] for name in ("stop_reason", "stop_sequence")}
            events.append(_event("message_delta", delta=delta, usage=told["usage"], llorch=told["llorch"]))
            events.append(_event("message_stop"))
        return events

    def whole(self) -> dict[str, Any]:
        """Return the whole answer."""
        return self._message() | {"content": [_whole_block(segment) for segment in self._segments.found]}

    def failed(self, problem: Problem) -> list[Event]:
        """Return the event that tells of a failure."""
        return [("error", error_body(problem))]

    def close(self) -> None:
        """Nothing is kept."""

    def _message(self) -> dict[str, Any]:
        end = self._end
        reason, sequence = (None, None) if end is None else self._reason(end)
        message: dict[str, Any] = {
            "id": self._shape.message_id,
            "type": "message",
            "role": "assistant",
            "model": self._shape.model,
            "content": [],
            "stop_reason": reason,
            "stop_sequence": sequence,
            "usage": _usage(end),
        }
        if end is not None:
            message["llorch"] = extra(end)
            if self._shape.ignored:
                message["llorch"]["ignored"] = self._shape.ignored
        return message

    def _reason(self, end: Completion) -> tuple[str, str | None]:
        """Return why the answer ended, and the caller's stop sequence that ended it."""
        match end.reason:
            case FinishReason.TOOL_CALLS:
                return "tool_use", None
            case FinishReason.LENGTH if end.generated_tokens == self._shape.limit:
                return "max_tokens", None
            case FinishReason.LENGTH:
                return "model_context_window_exceeded", None
        if end.stop_matched in self._shape.stops:
            return "stop_sequence", end.stop_matched
        return "end_turn", None


def _usage(end: Completion | None) -> dict[str, Any]:
    """Return the tokens; those read from the cache are not among ``input_tokens``, as the API has it."""
    prompt, cached = (0, 0) if end is None else (end.prompt_tokens, end.cached_tokens)
    return {
        "input_tokens": prompt - cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
        "output_tokens": 0 if end is None else end.generated_tokens,
    }


def _block_events(change: Change) -> list[Event]:
    segment = change.segment
    match change.stage, segment.kind:
        case Stage.OPENED, _:
            return [_event("content_block_start", index=segment.place, content_block=_new_block(segment))]
        case Stage.GREW, SegmentKind.TEXT:
            return [_delta(segment, "text_delta", text=change.text)]
        case Stage.GREW, SegmentKind.THOUGHT:
            return [_delta(segment, "thinking_delta", thinking=change.text)]
        case Stage.GREW, SegmentKind.CALL:
            return [_delta(segment, "input_json_delta", partial_json=change.text)]
    end = _event("content_block_stop", index=segment.place)
    if segment.kind is SegmentKind.THOUGHT:
        return [_delta(segment, "signature_delta", signature=UNSIGNED), end]
    return [end]


def _new_block(segment: Segment) -> dict[str, Any]:
    match segment.kind:
        case SegmentKind.THOUGHT:
            return {"type": "thinking", "thinking": "", "signature": ""}
        case SegmentKind.TEXT:
            return {"type": "text", "text": ""}
    return {"type": "tool_use", "id": segment.call_id, "name": segment.name, "input": {}}


def _whole_block(segment: Segment) -> dict[str, Any]:
    block = _new_block(segment)
    match segment.kind:
        case SegmentKind.THOUGHT:
            return block | {"thinking": segment.text, "signature": UNSIGNED}
        case SegmentKind.TEXT:
            return block | {"text": segment.text}
    return block | {"input": _arguments(segment.text)}


def _arguments(text: str) -> Any:
    """Return a call's arguments as an object; of a call that broke off there is none."""
    try:
        return msgspec.json.decode(text or "{}")
    except NOT_JSON:
        return {}


def _delta(segment: Segment, kind: str, **more: str) -> Event:
    return _event("content_block_delta", index=segment.place, delta={"type": kind, **more})


def _event(name: str, **more: Any) -> Event:
    return name, {"type": name, **more}
