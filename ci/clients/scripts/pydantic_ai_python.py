"""Pydantic AI."""

from __future__ import annotations

import asyncio
from typing import Literal

from pydantic import BaseModel
from pydantic_ai import Agent, NativeOutput
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider
from pydantic_ai.settings import ModelSettings
from shown import (
    AFTER,
    CAPITAL,
    COUNT,
    KEY,
    REAL,
    SCRIPTED,
    TALK,
    WEATHER,
    WEATHER_TWICE,
    Served,
    idle,
    refusal,
    row,
)


class Verdict(BaseModel):
    """A verdict."""

    fair: bool
    color: Literal["red", "blue"]


def model(served: Served) -> OpenAIChatModel:
    return OpenAIChatModel(served.model, provider=OpenAIProvider(base_url=served.url, api_key=KEY))


greedy = ModelSettings(temperature=0, max_tokens=60)
real, scripted = Agent(model(REAL), model_settings=greedy), Agent(model(SCRIPTED))
with_tool = Agent(model(SCRIPTED), retries=0)
asked: list[str] = []


@with_tool.tool_plain
def get_weather(city: str) -> str:
    """Tell the weather of a city."""
    asked.append(city)
    return "sunny"


def tools(text: str) -> tuple[list[str], str]:
    asked.clear()
    output = with_tool.run_sync(text).output
    return list(asked), output


async def streamed() -> str:
    async with scripted.run_stream(CAPITAL) as answer:
        return "".join([text async for text in answer.stream_text(delta=True)])


def structured() -> object:
    agent = Agent(model(REAL), output_type=NativeOutput(Verdict), model_settings=greedy)
    return agent.run_sync("Give a verdict.").output


def by_tool() -> object:
    return Agent(model(SCRIPTED), output_type=Verdict, retries=0).run_sync("Give a verdict.").output


async def cancel() -> bool:
    async with scripted.run_stream(COUNT) as answer:
        async for _ in answer.stream_text(delta=True):
            break
    return await asyncio.to_thread(idle)


def error() -> str:
    return refusal(lambda: scripted.run_sync("Hi", model_settings=ModelSettings(temperature=9)))


row("plain", lambda: real.run_sync(CAPITAL).output, lambda saw: "Paris" in saw)
row("streamed", lambda: asyncio.run(streamed()), TALK.__eq__)
row("tools", lambda: tools(WEATHER), lambda saw: saw == (["Paris"], AFTER))
row("parallel tools", lambda: tools(WEATHER_TWICE), lambda saw: sorted(saw[0]) == ["Oslo", "Rome"])
row("structured output", structured, lambda saw: isinstance(saw, Verdict))
row("structured output by a tool", by_tool, lambda saw: isinstance(saw, Verdict))
row(
    "usage",
    lambda: scripted.run_sync(CAPITAL).usage,
    lambda saw: (saw() if callable(saw) else saw).output_tokens > 0,
)
row("cancel", lambda: asyncio.run(cancel()), lambda saw: saw)
row("error", error, lambda saw: "temperature" in saw)
