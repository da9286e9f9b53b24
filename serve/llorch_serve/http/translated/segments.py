"""Cuts an answer into its successive thoughts, texts and calls, as APIs of blocks and items tell it.

Input: the updates of one answer. Output: what opened, grew and closed with each, in order. An API turns these
changes into its events, and the segments at the end into its whole answer.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from llorch_serve.requests import GenerationUpdate
from llorch_serve.sampling.logprobs import TokenLogprobs


class SegmentKind(enum.Enum):
    """What a segment holds."""

    THOUGHT = enum.auto()
    TEXT = enum.auto()
    CALL = enum.auto()


@dataclass(slots=True)
class Segment:
    """A part of an answer of one kind. place: from 0, in the answer. call_id, name: of a call, whose pieces
    are its arguments as JSON text. broken: the call broke off, and is told as text too.
    """

    kind: SegmentKind
    place: int
    call_id: str = ""
    name: str = ""
    pieces: list[str] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    broken: bool = False

    @property
    def text(self) -> str:
        """All of its pieces."""
        return "".join(self.pieces)


class Stage(enum.Enum):
    """What happened to a segment."""

    OPENED = enum.auto()
    GREW = enum.auto()
    CLOSED = enum.auto()


@dataclass(frozen=True, slots=True)
class Change:
    """One step of an answer. text: what a segment grew by; logprobs: of its tokens, where asked for."""

    stage: Stage
    segment: Segment
    text: str = ""
    logprobs: tuple[TokenLogprobs, ...] = ()


class Segments:
    """The segments of one answer. One is open at a time, the last."""

    def __init__(self) -> None:
        self.found: list[Segment] = []
        self._open = False
        self._pending: tuple[TokenLogprobs, ...] = ()  # of tokens whose text has not come yet
        self._call = -1  # which of the answer's calls is open, or was last

    def take(self, update: GenerationUpdate) -> list[Change]:
        """Take an update; return what it changes. An answer that ends closes what is open, and has at least
        one segment.
        """
        changes: list[Change] = []
        broken = {call.index for call in update.tool_calls if call.broken}
        if self._open and self.found[-1].kind is SegmentKind.CALL:
            self.found[-1].broken = self._call in broken
        if update.reasoning:
            changes += self._grow(SegmentKind.THOUGHT, update.reasoning)
        if update.text:
            changes += self._grow(SegmentKind.TEXT, update.text, self._pending + update.logprobs)
            self._pending = ()
        else:
            silent = not (update.reasoning or update.tool_calls)
            self._pending = self._pending + update.logprobs if silent else ()
        for call in update.tool_calls:
            if call.index in broken:  # one that nobody has been told of is text alone
                continue
            if call.index != self._call:
                changes += self._begin(Segment(SegmentKind.CALL, len(self.found), call.id, call.name))
                self._call = call.index
            if call.arguments:
                changes += self._grow(SegmentKind.CALL, call.arguments)
        if update.completion is not None:
            if not self.found:
                changes += self._begin(Segment(SegmentKind.TEXT, 0))
            changes += self._close()
        return changes

    def _grow(self, kind: SegmentKind, text: str, logprobs: tuple[TokenLogprobs, ...] = ()) -> list[Change]:
        changes = []
        if not self._open or self.found[-1].kind is not kind:
            changes += self._begin(Segment(kind, len(self.found)))
        segment = self.found[-1]
        segment.pieces.append(text)
        segment.logprobs += logprobs
        return [*changes, Change(Stage.GREW, segment, text, logprobs)]

    def _begin(self, segment: Segment) -> list[Change]:
        changes = self._close()
        self.found.append(segment)
        self._open = True
        return [*changes, Change(Stage.OPENED, segment)]

    def _close(self) -> list[Change]:
        if not self._open:
            return []
        self._open = False
        return [Change(Stage.CLOSED, self.found[-1])]
