"""Answers in the shapes of the Responses API: whole, and as the events of a stream.

Input: the updates of one answer. Output: dictionaries that become JSON; and, once it has ended, what is kept
of it. ``llorch``, beyond the API's schema, carries what our own contract promises with every answer, and the
fields that had no effect.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from llorch_serve.engine.sequence import FinishReason
from llorch_serve.http.openai_answers import extra
from llorch_serve.http.openai_logprobs import chat_logprobs
from llorch_serve.http.openai_schema import CalledFunction, Message, MessageCall
from llorch_serve.http.problems import Problem
from llorch_serve.http.responses.items import wrapped_thoughts
from llorch_serve.http.responses.kept import KeptResponses
from llorch_serve.http.responses.shape import ResponseShape
from llorch_serve.http.translated.answering import Event
from llorch_serve.http.translated.segments import Change, Segment, SegmentKind, Segments, Stage
from llorch_serve.requests import Completion, GenerationUpdate
from llorch_serve.sampling.logprobs import TokenLogprobs

_PREFIXES = {SegmentKind.THOUGHT: "rs_", SegmentKind.TEXT: "msg_", SegmentKind.CALL: "fc_"}


class ResponseAnswer:
    """One answer. Implements :class:`llorch_serve.http.translated.answering.Answer`."""

    def __init__(self, shape: ResponseShape, kept: KeptResponses) -> None:
        self._shape = shape
        self._kept = kept
        self._segments = Segments()
        self._done: list[dict[str, Any]] = []  # the items that have ended
        self._sent = 0
        self._end: Completion | None = None
        self._completed: float | None = None
        if shape.beginning:
            begins = shape.beginning.pop()
            kept.begin(shape.response_id, begins.owner, begins.messages, begins.size)

    def opening(self) -> list[Event]:
        """Return the events that say that there is an answer, and that it has begun."""
        response = self._response("in_progress")
        return [
            self._event("response.created", response=response),
            self._event("response.in_progress", response=response),
        ]

    def take(self, update: GenerationUpdate) -> list[Event]:
        """Take an update; return its events."""
        events: list[Event] = []
        cut = update.completion is not None and update.completion.reason is FinishReason.LENGTH
        for change in self._segments.take(update):
            segment = change.segment
            if change.stage is Stage.CLOSED:
                broken = segment.broken or (cut and segment is self._segments.found[-1])
                item = self._item(segment, "incomplete" if broken else "completed")
                self._done.append(item)
                events += self._closing(segment, item)
            else:
                events += self._growing(change)
        if update.completion is not None:
            self._end, self._completed = update.completion, self._shape.now()
            self._keep()
            status = self._status
            events.append(self._event(f"response.{status}", response=self._response(status)))
        return events

    def whole(self) -> dict[str, Any]:
        """Return the whole answer."""
        return self._response(self._status)

    def failed(self, problem: Problem) -> list[Event]:
        """Return the event that tells of a failure."""
        error = {"code": problem.code, "message": problem.message}
        return [self._event("response.failed", response=self._response("failed") | {"error": error})]

    def close(self) -> None:
        """Let go of what is kept of an answer that never ends."""
        self._kept.abandon(self._shape.response_id)

    @property
    def _status(self) -> str:
        assert self._end is not None
        return "incomplete" if self._end.reason is FinishReason.LENGTH else "completed"

    def _event(self, kind: str, /, **more: Any) -> Event:
        self._sent += 1
        return kind, {"type": kind, "sequence_number": self._sent - 1, **more}

    def _item_id(self, segment: Segment) -> str:
        """Return an id that no other item has, as no other answer has this one's."""
        return f"{_PREFIXES[segment.kind]}{self._shape.response_id.partition('_')[2]}{segment.place:x}"

    def _growing(self, change: Change) -> list[Event]:
        segment = change.segment
        place = {"item_id": self._item_id(segment), "output_index": segment.place}
        part = place | {"content_index": 0}
        match change.stage, segment.kind:
            case Stage.OPENED, kind:
                new = self._item(segment, "in_progress")
                opened = [self._event("response.output_item.added", output_index=segment.place, item=new)]
                if kind is SegmentKind.CALL:
                    return opened
                return [*opened, self._event("response.content_part.added", **part, part=_part(segment))]
            case _, SegmentKind.THOUGHT:
                return [self._event("response.reasoning_text.delta", **part, delta=change.text)]
            case _, SegmentKind.TEXT:
                told = self._logprobs(change.logprobs)
                return [self._event("response.output_text.delta", **part, delta=change.text, logprobs=told)]
        return [self._event("response.function_call_arguments.delta", **place, delta=change.text)]

    def _closing(self, segment: Segment, item: dict[str, Any]) -> list[Event]:
        place = {"item_id": item["id"], "output_index": segment.place}
        part = place | {"content_index": 0}
        if segment.kind is SegmentKind.CALL:
            whole = {"name": segment.name, "arguments": item["arguments"]}
            events = [self._event("response.function_call_arguments.done", **place, **whole)]
        else:
            name = "reasoning_text" if segment.kind is SegmentKind.THOUGHT else "output_text"
            (told,) = item["content"]
            logprobs = {"logprobs": told["logprobs"]} if segment.kind is SegmentKind.TEXT else {}
            events = [
                self._event(f"response.{name}.done", **part, text=told["text"], **logprobs),
                self._event("response.content_part.done", **part, part=told),
            ]
        return [*events, self._event("response.output_item.done", output_index=segment.place, item=item)]

    def _item(self, segment: Segment, status: str) -> dict[str, Any]:
        """Return an item; one that has only begun is empty."""
        begun = status == "in_progress"
        item: dict[str, Any] = {"id": self._item_id(segment), "status": status}
        match segment.kind:
            case SegmentKind.CALL:
                arguments = "" if begun else segment.text or "{}"
                return item | {
                    "type": "function_call",
                    "call_id": segment.call_id,
                    "name": segment.name,
                    "arguments": arguments,
                }
            case SegmentKind.THOUGHT:
                wrapped = wrapped_thoughts(segment.text) if self._shape.wraps and not begun else None
                content = [] if begun else [_part(segment)]
                return item | {
                    "type": "reasoning",
                    "summary": [],
                    "content": content,
                    "encrypted_content": wrapped,
                }
        text = _part(segment) | {"logprobs": self._logprobs(segment.logprobs)}
        return item | {"type": "message", "role": "assistant", "content": [] if begun else [text]}

    def _logprobs(self, places: Sequence[TokenLogprobs]) -> list[dict[str, Any]]:
        if not self._shape.logprobs:
            return []
        found: list[dict[str, Any]] = chat_logprobs(tuple(places))["content"]
        return found

    def _response(self, status: str) -> dict[str, Any]:
        end = self._end
        response: dict[str, Any] = {
            "id": self._shape.response_id,
            "object": "response",
            "created_at": self._shape.created,
            "completed_at": self._completed if status == "completed" else None,
            "status": status,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "model": self._shape.model,
            "output": list(self._done),
            "usage": None if end is None else _usage(end),
            **self._shape.echoed,
        }
        if end is not None:
            response["llorch"] = extra(end)
            if self._shape.ignored:
                response["llorch"]["ignored"] = self._shape.ignored
        return response

    def _keep(self) -> None:
        """Keep the answer, if room is kept for it."""
        items = {item["id"]: msgspec.json.encode(item) for item in self._done}
        document = msgspec.json.encode(self._response(self._status))
        self._kept.complete(self._shape.response_id, _message(self._segments.found), document, items)


def _part(segment: Segment) -> dict[str, Any]:
    if segment.kind is SegmentKind.THOUGHT:
        return {"type": "reasoning_text", "text": segment.text}
    return {"type": "output_text", "text": segment.text, "annotations": [], "logprobs": []}


def _message(segments: list[Segment]) -> Message:
    """Return an answer as the message of a chat."""

    def joined(kind: SegmentKind) -> str:
        return "".join(segment.text for segment in segments if segment.kind is kind)

    calls = [
        MessageCall(CalledFunction(segment.name, segment.text or "{}"), segment.call_id)
        for segment in segments
        if segment.kind is SegmentKind.CALL and not segment.broken
    ]
    text = joined(SegmentKind.TEXT)
    return Message(
        "assistant",
        None if calls and not text else text,
        tool_calls=calls or None,
        reasoning_content=joined(SegmentKind.THOUGHT) or None,
    )


def _usage(end: Completion) -> dict[str, Any]:
    """Return the tokens; those of thoughts are not counted apart."""
    return {
        "input_tokens": end.prompt_tokens,
        "input_tokens_details": {"cached_tokens": end.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": end.generated_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": end.prompt_tokens + end.generated_tokens,
    }
