"""What LiteLLM is asked, as a library and behind its proxy."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from shown import AFTER, CAPITAL, COUNT, PERSON, TALK, TOOL, WEATHER, WEATHER_TWICE, idle, refusal, row

Complete = Callable[..., Any]


def user(text: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": text}]


def show(real: Complete, scripted: Complete) -> None:
    """Show all rows with functions that complete a chat."""

    def streamed() -> str:
        stream = scripted(messages=user(CAPITAL), stream=True)
        return "".join(chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices)

    def tools() -> tuple[str, str]:
        messages = user(WEATHER)
        message = scripted(messages=messages, tools=[TOOL]).choices[0].message
        call = message.tool_calls[0]
        messages += [message.model_dump(), {"role": "tool", "tool_call_id": call.id, "content": "sunny"}]
        answer = scripted(messages=messages, tools=[TOOL])
        return json.loads(call.function.arguments)["city"], answer.choices[0].message.content

    def parallel() -> list[str]:
        message = scripted(messages=user(WEATHER_TWICE), tools=[TOOL]).choices[0].message
        return [json.loads(call.function.arguments)["city"] for call in message.tool_calls]

    def structured() -> dict[str, Any]:
        form = {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON, "strict": True}}
        answer = real(messages=user("Describe a person."), response_format=form, max_tokens=120)
        return json.loads(answer.choices[0].message.content)

    def usage() -> Any:
        stream = scripted(messages=user(CAPITAL), stream=True, stream_options={"include_usage": True})
        return [chunk.usage for chunk in stream if getattr(chunk, "usage", None)][-1]

    def cancel() -> bool:
        stream = scripted(messages=user(COUNT), stream=True)
        next(iter(stream))
        close = getattr(stream, "close", None) or stream.completion_stream.close
        close()
        return idle()

    row(
        "plain",
        lambda: real(messages=user(CAPITAL), max_tokens=20, temperature=0).choices[0].message.content,
        lambda saw: "Paris" in saw,
    )
    row("streamed", streamed, TALK.__eq__)
    row("tools", tools, lambda saw: saw == ("Paris", AFTER))
    row("parallel tools", parallel, lambda saw: saw == ["Rome", "Oslo"])
    row("structured output", structured, lambda saw: set(saw) == {"name", "adult"})
    row("usage", usage, lambda saw: saw.prompt_tokens > 0 and saw.completion_tokens > 0)
    row("cancel", cancel, lambda saw: saw)
    row(
        "error",
        lambda: refusal(lambda: scripted(messages=user("Hi"), temperature=9)),
        lambda saw: "temperature" in saw,
    )
