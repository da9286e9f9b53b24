"""The dialect of an API that is translated to a chat: one answer, whole or as the API's own events.

Input: a plan, and the updates of its one call. Output: what the API's :class:`Answer` makes of them. Whole
and streamed answers go the same way, so that they say the same.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Protocol

import msgspec

from llorch_serve.calls.callers import Caller
from llorch_serve.calls.live_call import LiveCall, check_completed
from llorch_serve.calls.long_answers import written
from llorch_serve.http.exchange import Exchange, as_json
from llorch_serve.http.problems import Problem
from llorch_serve.http.service import AnswerPlan, Plan
from llorch_serve.requests import GenerationUpdate, ModelInfo

Event = tuple[str, dict[str, Any]]
"""An event's name, and what becomes its JSON."""


class Answer(Protocol):
    """One answer as it grows."""

    def opening(self) -> list[Event]:
        """Return the events that come before anything has been generated."""

    def take(self, update: GenerationUpdate) -> list[Event]:
        """Take an update; return its events. The last one's are those of the end."""

    def whole(self) -> dict[str, Any]:
        """Return the whole answer, once it has ended."""

    def failed(self, problem: Problem) -> list[Event]:
        """Return the events that tell of a failure in the middle."""

    def close(self) -> None:
        """Let go of what is kept for the end: it has come, or never will."""


class TranslatedDialect:
    """Implements :class:`llorch_serve.http.service.Dialect`.

    read: makes a plan of a body. begin: makes an answer of a plan's detail. refusal: see Dialect.
    """

    def __init__(
        self,
        read: Callable[[bytes, ModelInfo, Caller], Plan],
        begin: Callable[[Any], Answer],
        refusal: Callable[[Problem], object],
    ) -> None:
        self._read = read
        self._begin = begin
        self._refusal = refusal

    def read(self, raw: bytes, info: ModelInfo, caller: Caller) -> Plan:
        """Return what a body asks for."""
        return self._read(raw, info, caller)

    async def answer(self, plan: AnswerPlan, calls: list[LiveCall], exchange: Exchange) -> None:
        """Take the call's updates and send the answer."""
        (call,) = calls
        exchange.progress = answer = self._begin(plan.detail)
        try:
            if plan.stream:
                await exchange.start_events()
                await exchange.send_events(*answer.opening())
            ended, places = False, 0
            while not ended:
                for update in await call.take():
                    check_completed(update)
                    places += len(update.logprobs)
                    # What ends tells everything once more.
                    told = (
                        places if update.completion is not None or update.tool_calls else len(update.logprobs)
                    )
                    take = functools.partial(_take, answer, update, stream=plan.stream)
                    events = await written(told, take)
                    ended = update.is_last
                    if events:
                        await exchange.send_events(*events)
        finally:
            answer.close()
        if plan.stream:
            await exchange.close_events()
        else:
            await exchange.send_json(await written(places, lambda: as_json(answer.whole())))

    def refusal(self, problem: Problem) -> object:
        """Return the body of a refusal."""
        return self._refusal(problem)

    async def send_failure(self, problem: Problem, exchange: Exchange) -> None:
        """Tell of a failure inside a stream, and end it."""
        answer: Answer = exchange.progress
        await exchange.send_events(*answer.failed(problem))
        await exchange.close_events()


def _take(answer: Answer, update: GenerationUpdate, *, stream: bool) -> list[tuple[str, msgspec.Raw]]:
    """Have an answer take an update; return its events as JSON, if there is a stream of them."""
    events = answer.take(update)
    return [(name, as_json(data)) for name, data in events] if stream else []
