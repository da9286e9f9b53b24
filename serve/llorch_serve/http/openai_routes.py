"""OpenAI's two generation routes: what connects reading, the running calls and the shapes of answers.

Input: plans made by ``openai_requests.py`` and their live calls. Output: one JSON document, or chunks as
events and ``[DONE]``. Several prompts of one body run at once, and their chunks come as they are made.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Sequence
from itertools import chain

import msgspec

from llorch_serve.calls.callers import Caller
from llorch_serve.calls.live_call import LiveCall, check_completed
from llorch_serve.calls.long_answers import places_of, written
from llorch_serve.http.exchange import Exchange, as_json
from llorch_serve.http.ignored_fields import Read, noting
from llorch_serve.http.openai_answers import ChatChoice, Choice, CompletionChoice, usage_chunk, whole_answer
from llorch_serve.http.openai_requests import AnswerShape, read_chat, read_completion
from llorch_serve.http.problems import Problem
from llorch_serve.http.service import AnswerPlan, Plan
from llorch_serve.http.unknown_fields import UnknownFields
from llorch_serve.requests import Completion, GenerationUpdate, ModelInfo


class OpenAIDialect:
    """One of the two routes. Implements :class:`llorch_serve.http.service.Dialect`."""

    def __init__(self, read: Read, kind: type[Choice], unknown: UnknownFields) -> None:
        self._read = noting(read, unknown)
        self._kind = kind

    def read(self, raw: bytes, info: ModelInfo, caller: Caller) -> Plan:
        """Return what a body asks for."""
        return self._read(raw, info, caller)

    async def answer(self, plan: AnswerPlan, calls: list[LiveCall], exchange: Exchange) -> None:
        """Take the calls' updates and send the answer."""
        shape: AnswerShape = plan.detail
        if plan.stream:
            await self._stream(shape, calls, exchange)
            return
        choices, completions = [], []
        for base, call in enumerate(calls):
            for update in sorted(await call.take(), key=lambda update: update.index):
                check_completed(update)
                assert update.completion is not None
                choice = self._kind(shape, base * shape.answers + update.index)
                whole = functools.partial(_whole, choice, update)
                choices.append(await written(places_of([update]), whole))
                completions.append(update.completion)
        await exchange.send_json(whole_answer(shape, self._kind, choices, completions))

    async def _stream(self, shape: AnswerShape, calls: list[LiveCall], exchange: Exchange) -> None:
        await exchange.start_events()
        pump = asyncio.Lock()  # one write at a time, so that a slow reader stops every choice
        tasks = [
            asyncio.ensure_future(self._pump(shape, base * shape.answers, call, exchange, pump))
            for base, call in enumerate(calls)
        ]
        try:
            completions = await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
        if shape.include_usage:
            told = usage_chunk(shape, self._kind, chain.from_iterable(completions))
            await exchange.send_events((None, told))
        await exchange.end_events()

    async def _pump(
        self, shape: AnswerShape, base: int, call: LiveCall, exchange: Exchange, pump: asyncio.Lock
    ) -> list[Completion]:
        """Send the chunks of one prompt's choices as they come."""
        choices = [self._kind(shape, base + index) for index in range(shape.answers)]
        opening = [(None, first) for choice in choices if (first := choice.first()) is not None]
        if opening:
            async with pump:
                await exchange.send_events(*opening)
        completions: list[Completion] = []
        ended = False
        while not ended:
            updates = await call.take()
            for update in updates:
                check_completed(update)
                if update.completion is not None:
                    completions.append(update.completion)
                ended = ended or update.is_last
            chunks = await written(places_of(updates), functools.partial(_chunks, choices, updates))
            if chunks:
                async with pump:
                    await exchange.send_events(*chunks)
        return completions

    def refusal(self, problem: Problem) -> object:
        """Return the body of a refusal."""
        return problem.openai()

    async def send_failure(self, problem: Problem, exchange: Exchange) -> None:
        """Tell of a failure inside a stream, and end it."""
        await exchange.send_events((None, problem.openai()))
        await exchange.end_events()


def _whole(choice: Choice, update: GenerationUpdate) -> msgspec.Raw:
    return as_json(choice.whole(update))


def _chunks(choices: Sequence[Choice], updates: Sequence[GenerationUpdate]) -> list[tuple[None, msgspec.Raw]]:
    """Return the chunks of updates that say anything."""
    return [
        (None, as_json(choices[update.index].chunk(update)))
        for update in updates
        if update.text
        or update.reasoning
        or update.tool_calls
        or update.logprobs
        or update.completion is not None
    ]


def completions_dialect(unknown: UnknownFields = UnknownFields.REFUSE) -> OpenAIDialect:
    """Return the dialect of POST /v1/completions. unknown: what becomes of fields that it does not know."""
    return OpenAIDialect(read_completion, CompletionChoice, unknown)


def chat_dialect(unknown: UnknownFields = UnknownFields.REFUSE) -> OpenAIDialect:
    """Return the dialect of POST /v1/chat/completions. unknown: as above."""
    return OpenAIDialect(read_chat, ChatChoice, unknown)
