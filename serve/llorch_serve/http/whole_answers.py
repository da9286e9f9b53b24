"""Routes whose one call is answered with one body when all of it has ended: embeddings, ranks, scores."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

from llorch_serve.calls.callers import Caller
from llorch_serve.calls.live_call import LiveCall, check_completed
from llorch_serve.http.exchange import Exchange, as_json
from llorch_serve.http.problems import Problem
from llorch_serve.http.service import AnswerPlan, Plan
from llorch_serve.requests import GenerationUpdate, ModelInfo


class WholeAnswers:
    """One such route. Implements :class:`llorch_serve.http.service.Dialect`.

    read: what a body asks for; raises InvalidRequestError or ModelMismatchError.
    written: the answer's body, of the plan's detail and the last updates in the order of their index.
    """

    def __init__(
        self,
        read: Callable[[bytes, ModelInfo, Caller], Plan],
        written: Callable[[Any, Sequence[GenerationUpdate]], dict[str, Any]],
    ) -> None:
        self._read, self._written = read, written

    def read(self, raw: bytes, info: ModelInfo, caller: Caller) -> Plan:
        """Return what a body asks for."""
        return self._read(raw, info, caller)

    async def answer(self, plan: AnswerPlan, calls: list[LiveCall], exchange: Exchange) -> None:
        """Take what the call gives and send it."""
        (call,) = calls
        updates = sorted(await call.take(), key=lambda update: update.index)
        for update in updates:
            check_completed(update)
        # Millions of numbers take as long to write as other calls would notice.
        await exchange.send_json(
            await asyncio.to_thread(lambda: as_json(self._written(plan.detail, updates)))
        )

    def refusal(self, problem: Problem) -> object:
        """Return the body of a refusal."""
        return problem.openai()

    async def send_failure(self, problem: Problem, exchange: Exchange) -> None:
        """Nothing is sent in parts, so nothing fails in the middle."""
