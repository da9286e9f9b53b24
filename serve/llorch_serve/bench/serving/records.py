"""What a client saw of requests: plain times and counts, from which ``figures.py`` computes everything.

Input: what a transport yields while ``load.py`` reads it. Every time is in seconds after the run's start, on
one clock.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

INCOMPLETE: Final = "INCOMPLETE"
"""The status of a stream that ended well as a call, but without its answer's end."""

EMPTY: Final = "EMPTY"
"""The status of an answer that ended without a token."""


class CallError(Exception):
    """A call failed, before its stream or in it. status: what failures are counted by, like UNAVAILABLE or
    HTTP 429.
    """

    def __init__(self, status: str, message: str) -> None:
        self.status = status
        super().__init__(message)


@dataclass(frozen=True, slots=True)
class Usage:
    """A request's tokens, as the worker counts them when it ends."""

    prompt_tokens: int
    cached_tokens: int
    generated_tokens: int


@dataclass(frozen=True, slots=True)
class Piece:
    """One message of a stream. tokens: how many it carries; None: some, it does not say how many. usage: it
    ends the answer.
    """

    tokens: int | None
    usage: Usage | None = None


@dataclass(frozen=True, slots=True)
class Arrival:
    """A message that carried tokens. tokens: how many; None: it did not say."""

    at_s: float
    tokens: int | None


@dataclass(slots=True)
class RequestRecord:
    """One request.

    scheduled_s: when it was to be sent. sent_s: when it was. ended_s: when its answer's end came, or its
        failure.
    arrivals: messages with tokens, in order. usage: told by the answer's end.
    failure: status under which it failed; None: it has not. message: the failure in words.
    """

    scheduled_s: float
    sent_s: float
    ended_s: float = 0.0
    arrivals: list[Arrival] = field(default_factory=list)
    usage: Usage | None = None
    failure: str | None = None
    message: str = ""

    def take(self, at_s: float, piece: Piece) -> None:
        """Note a message."""
        if piece.tokens is None or piece.tokens > 0:
            self.arrivals.append(Arrival(at_s, piece.tokens))
        if piece.usage is not None:
            self.usage = piece.usage
            self.ended_s = at_s

    def close(self, at_s: float) -> None:
        """Note that its stream is over, and judge whether the answer is whole."""
        if self.usage is None:
            self.fail(at_s, INCOMPLETE, "the stream ended without the answer's end")
        elif not self.arrivals:
            self.fail(at_s, EMPTY, "the answer ended without a token")

    def fail(self, at_s: float, status: str, message: str) -> None:
        """Note how it failed."""
        self.ended_s, self.failure, self.message = at_s, status, message

    @property
    def tokens(self) -> int:
        """Tokens received: as messages say, else as the answer's end does."""
        counts = [arrival.tokens for arrival in self.arrivals]
        if None in counts:
            return 0 if self.usage is None else self.usage.generated_tokens
        return sum(count for count in counts if count is not None)


@dataclass(frozen=True, slots=True)
class LoadRun:
    """All requests of a run. duration_s: from its start to the end of its last request."""

    records: tuple[RequestRecord, ...]
    duration_s: float
