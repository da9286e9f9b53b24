"""OpenAI's Agents SDK, over chat completions and over responses."""

from __future__ import annotations

import asyncio
from typing import Literal

from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from openai import AsyncOpenAI
from pydantic import BaseModel
from shown import AFTER, CAPITAL, COUNT, KEY, REAL, SCRIPTED, TALK, WEATHER, WEATHER_TWICE, idle, refusal, row

set_tracing_disabled(disabled=True)


class Verdict(BaseModel):
    """A verdict."""

    fair: bool
    color: Literal["red", "blue"]


asked: list[str] = []


@function_tool
def get_weather(city: str) -> str:
    """Tell the weather of a city."""
    asked.append(city)
    return "sunny"


def agent(served: object, kind: type = OpenAIChatCompletionsModel, **more: object) -> Agent:
    client = AsyncOpenAI(base_url=served.url, api_key=KEY, max_retries=0)
    return Agent(name="tester", model=kind(model=served.model, openai_client=client), **more)


async def answer(who: Agent, text: str) -> object:
    asked.clear()
    return (await Runner.run(who, text)).final_output


async def streamed(kind: type = OpenAIChatCompletionsModel) -> str:
    return "".join(
        [
            event.data.delta
            async for event in Runner.run_streamed(agent(SCRIPTED, kind), CAPITAL).stream_events()
            if event.type == "raw_response_event" and event.data.type == "response.output_text.delta"
        ]
    )


async def tools(text: str, kind: type = OpenAIChatCompletionsModel) -> tuple[list[str], object]:
    output = await answer(agent(SCRIPTED, kind, tools=[get_weather]), text)
    return list(asked), output


async def usage() -> object:
    return (await Runner.run(agent(SCRIPTED), CAPITAL)).context_wrapper.usage


async def cancel() -> bool:
    running = Runner.run_streamed(agent(SCRIPTED), COUNT)
    async for _ in running.stream_events():
        running.cancel()
        break
    return await asyncio.to_thread(idle)


greedy = ModelSettings(temperature=0, max_tokens=60)
row(
    "plain",
    lambda: asyncio.run(answer(agent(REAL, model_settings=greedy), CAPITAL)),
    lambda saw: "Paris" in saw,
)
row("streamed", lambda: asyncio.run(streamed()), TALK.__eq__)
row("tools", lambda: asyncio.run(tools(WEATHER)), lambda saw: saw == (["Paris"], AFTER))
row("parallel tools", lambda: asyncio.run(tools(WEATHER_TWICE)), lambda saw: saw[0] == ["Rome", "Oslo"])
row(
    "structured output",
    lambda: asyncio.run(answer(agent(REAL, output_type=Verdict, model_settings=greedy), "Give a verdict.")),
    lambda saw: isinstance(saw, Verdict),
)
row("usage", lambda: asyncio.run(usage()), lambda saw: saw.input_tokens > 0 and saw.output_tokens > 0)
row("cancel", lambda: asyncio.run(cancel()), lambda saw: saw)
row(
    "error",
    lambda: refusal(
        lambda: asyncio.run(answer(agent(SCRIPTED, model_settings=ModelSettings(temperature=9)), "Hi"))
    ),
    lambda saw: "temperature" in saw,
)
row("responses, streamed", lambda: asyncio.run(streamed(OpenAIResponsesModel)), TALK.__eq__)
row(
    "responses with tools",
    lambda: asyncio.run(tools(WEATHER, OpenAIResponsesModel)),
    lambda saw: saw == (["Paris"], AFTER),
)
