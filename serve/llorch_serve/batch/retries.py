"""Asking again for lines that were refused for want of room, or that failed by no fault of their own."""

from __future__ import annotations

import asyncio
import itertools
import random
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Final

from llorch_serve.batch.answering import Answerer, BatchStoppedError, LineAnswer
from llorch_serve.batch.lines import BatchLine

TOO_MANY: Final = 429
UNAVAILABLE: Final = 503
UNAUTHENTICATED: Final = 401
_TRANSIENT: Final = (408, 500, 502, 504)
_FIRST_WAIT_S: Final = 0.5
_LONGEST_WAIT_S: Final = 30.0
_MAX_SHOWN: Final = 300


@dataclass(frozen=True, slots=True)
class Clock:
    """The time, and chance: tests bring their own. random: from 0 to 1."""

    now: Callable[[], float] = time.monotonic
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep
    random: Callable[[], float] = random.random  # spreads callers; nothing secret


class PatientAnswerer:
    """Asks again where that may help, and ends the batch where nobody answers any more.

    attempts: how often a line is asked for that fails on the other side.
    patience_s: how long lines are refused, and none is answered, before the batch is stopped; and how long
        one line finds nobody there, while others are answered again and again, before it fails: it may be
        what ends the worker.
    """

    def __init__(self, answerer: Answerer, attempts: int, patience_s: float, clock: Clock) -> None:
        self.retries = 0
        self._answerer = answerer
        self._attempts = attempts
        self._patience_s = patience_s
        self._clock = clock
        self._moved = clock.now()  # when somebody last answered
        self._answered = 0  # calls, by anything but a refusal for now
        self._asking = 0  # calls that nobody has answered yet

    async def answer(self, line: BatchLine) -> LineAnswer:
        """Return an answer, or the last failure. Raises BatchStoppedError."""
        failures = 0
        refused_since: float | None = None
        lost, answered_before = 0, self._answered
        for turn in itertools.count():
            answer = await self._ask(line)
            now = self._clock.now()
            if answer.status == UNAUTHENTICATED:
                raise BatchStoppedError(f"line {line.number} was refused: {_shown(answer)}")
            if answer.status in (TOO_MANY, UNAVAILABLE):
                refused_since = now if refused_since is None else refused_since
                lost += answer.status == UNAVAILABLE and self._answered > answered_before
                if lost >= self._attempts and now - refused_since >= self._patience_s:
                    return answer
                answered_before = self._answered
                self._check_patience(line, answer, now - max(self._moved, refused_since))
            else:
                self._moved = now
                self._answered += 1
                failures += answer.status in _TRANSIENT
                if answer.status not in _TRANSIENT or failures >= self._attempts:
                    return answer
            await self._wait(turn, answer.retry_after_s)
        raise AssertionError("unreachable")

    async def _ask(self, line: BatchLine) -> LineAnswer:
        self._asking += 1
        try:
            return await self._answerer.answer(line)
        finally:
            self._asking -= 1

    def _check_patience(self, line: BatchLine, answer: LineAnswer, waited_s: float) -> None:
        # A worker that says it is busy is; one that is not there may leave calls unanswered for long.
        is_busy = answer.status == TOO_MANY and self._asking
        if waited_s >= self._patience_s and not is_busy:
            raise BatchStoppedError(
                f"no line was answered for {self._patience_s:g} s; line {line.number} was refused last: "
                f"{_shown(answer)}; run the same command again to go on"
            )

    async def _wait(self, turn: int, retry_after_s: float | None) -> None:
        self.retries += 1
        wait_s = min(_FIRST_WAIT_S * 2 ** min(turn, 10), _LONGEST_WAIT_S)
        if retry_after_s is not None:
            wait_s = min(max(retry_after_s, 0.0), self._patience_s)
        await self._clock.sleep(wait_s * (1 + self._clock.random() / 2))


def _shown(answer: LineAnswer) -> str:
    text = answer.body[:_MAX_SHOWN].decode("utf-8", "backslashreplace")
    return f"{answer.status} {text}"
