"""OpenAI's two generation routes: what connects reading, the running calls and the shapes of answers.

Input: plans made by ``openai_requests.py`` and their live calls. Output: one JSON document, or chunks as events and
``[DONE]``. Several prompts of one body run at once, and their chunks come as they are made.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from typing import Any, Protocol

from llorch_serve.http.exchange import Exchange
from llorch_serve.http.openai_answers import ChatShapes, CompletionShapes
from llorch_serve.http.openai_requests import AnswerShape, read_chat, read_completion
from llorch_serve.http.problems import Problem
from llorch_serve.http.service import Caller, Plan, completed
from llorch_serve.requests import Completion, ModelInfo
from llorch_serve.rpc.calls import LiveCall


class Shapes(Protocol):
    """The shapes of one route's answers, see ``openai_answers.py``."""

    def whole(self, shape: AnswerShape, answers: list[tuple[str, Completion]]) -> dict[str, Any]:
        """Return a whole answer."""

    def first(self, shape: AnswerShape, index: int) -> dict[str, Any] | None:
        """Return the chunk that opens a choice, if there is one."""

    def chunk(
        self, shape: AnswerShape, index: int, text: str, completion: Completion | None
    ) -> dict[str, Any]:
        """Return one chunk of a choice."""

    def usage(self, shape: AnswerShape, completions: Iterable[Completion]) -> dict[str, Any]:
        """Return the chunk that tells the usage."""


class OpenAIDialect:
    """One of the two routes. Implements :class:`llorch_serve.http.service.Dialect`."""

    def __init__(self, read: Callable[[bytes, ModelInfo, Caller], Plan], shapes: Shapes) -> None:
        self._read = read
        self._shapes = shapes

    def read(self, raw: bytes, info: ModelInfo, caller: Caller) -> Plan:
        """Return what a body asks for."""
        return self._read(raw, info, caller)

    async def answer(self, plan: Plan, calls: list[LiveCall], exchange: Exchange) -> None:
        """Take the calls' updates and send the answer."""
        shape: AnswerShape = plan.detail
        if plan.stream:
            await self._stream(shape, calls, exchange)
            return
        answers = []
        for call in calls:
            text, _, completion = await call.take()
            assert completion is not None
            answers.append((text, completed(completion)))
        await exchange.send_json(self._shapes.whole(shape, answers))

    async def _stream(self, shape: AnswerShape, calls: list[LiveCall], exchange: Exchange) -> None:
        await exchange.start_events()
        pump = asyncio.Lock()  # one write at a time, so that a slow reader stops every choice
        if len(calls) == 1:
            completions = [await self._pump(shape, 0, calls[0], exchange, pump)]
        else:
            tasks = [
                asyncio.ensure_future(self._pump(shape, index, call, exchange, pump))
                for index, call in enumerate(calls)
            ]
            try:
                completions = await asyncio.gather(*tasks)
            finally:
                for task in tasks:
                    task.cancel()
        if shape.include_usage:
            await exchange.send_events((None, self._shapes.usage(shape, completions)))
        await exchange.end_events()

    async def _pump(
        self, shape: AnswerShape, index: int, call: LiveCall, exchange: Exchange, pump: asyncio.Lock
    ) -> Completion:
        """Send one choice's chunks as they come."""
        first = self._shapes.first(shape, index)
        if first is not None:
            async with pump:
                await exchange.send_events((None, first))
        while True:
            text, _, completion = await call.take()
            if completion is not None:
                completed(completion)
            if text or completion is not None:
                async with pump:
                    await exchange.send_events((None, self._shapes.chunk(shape, index, text, completion)))
            if completion is not None:
                return completion

    def refusal(self, problem: Problem) -> object:
        """Return the body of a refusal."""
        return problem.openai()

    async def send_failure(self, problem: Problem, exchange: Exchange) -> None:
        """Tell of a failure inside a stream, and end it."""
        await exchange.send_events((None, problem.openai()))
        await exchange.end_events()


def completions_dialect() -> OpenAIDialect:
    """Return the dialect of POST /v1/completions."""
    return OpenAIDialect(read_completion, CompletionShapes())


def chat_dialect() -> OpenAIDialect:
    """Return the dialect of POST /v1/chat/completions."""
    return OpenAIDialect(read_chat, ChatShapes())
