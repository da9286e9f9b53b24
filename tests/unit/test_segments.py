"""Calls that break off, as APIs of blocks and items tell them."""

from __future__ import annotations

from dataclasses import replace

from llorch_serve.engine.sequence import FinishReason
from llorch_serve.http.translated.segments import SegmentKind, Segments, Stage
from llorch_serve.requests import Completion, GenerationUpdate, Timings, ToolCallDelta

END = Completion(FinishReason.STOP, None, 1, 1, 0, Timings(0, 0, 0))
BEGUN = GenerationUpdate("r", "", (1,), tool_calls=(ToolCallDelta(0, "a", "f", "{"),))
BROKEN = GenerationUpdate("r", "<tool_call>{", (2,), END, tool_calls=(ToolCallDelta(0, broken=True),))


def test_a_call_that_breaks_off_in_a_stream_is_closed_as_broken() -> None:
    segments = Segments()
    segments.take(BEGUN)
    changes = segments.take(BROKEN)
    assert [(change.stage, change.segment.kind) for change in changes] == [
        (Stage.CLOSED, SegmentKind.CALL),
        (Stage.OPENED, SegmentKind.TEXT),
        (Stage.GREW, SegmentKind.TEXT),
        (Stage.CLOSED, SegmentKind.TEXT),
    ]
    assert [segment.broken for segment in segments.found] == [True, False]


def test_a_call_that_nobody_was_told_of_is_text_alone() -> None:
    segments = Segments()
    segments.take(replace(BROKEN, tool_calls=(ToolCallDelta(0, "a", "f", "{", broken=True),)))
    assert [(segment.kind, segment.text) for segment in segments.found] == [
        (SegmentKind.TEXT, "<tool_call>{")
    ]


def test_a_call_behind_a_broken_one_is_told() -> None:
    segments = Segments()
    segments.take(BEGUN)
    later = (ToolCallDelta(0, broken=True), ToolCallDelta(1, "b", "g", "{}"))
    segments.take(replace(BROKEN, tool_calls=later))
    assert [segment.kind for segment in segments.found] == [
        SegmentKind.CALL,
        SegmentKind.TEXT,
        SegmentKind.CALL,
    ]
    assert [segment.broken for segment in segments.found] == [True, False, False]
