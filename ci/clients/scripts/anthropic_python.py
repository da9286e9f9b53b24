"""Anthropic's own client for Python."""

from __future__ import annotations

from typing import Any

import anthropic
from shown import (
    AFTER,
    CAPITAL,
    COUNT,
    KEY,
    REAL,
    SCRIPTED,
    TALK,
    TOOL,
    WEATHER,
    WEATHER_TWICE,
    idle,
    refusal,
    row,
)

real = anthropic.Anthropic(base_url=REAL.root, api_key=KEY, max_retries=0)
scripted = anthropic.Anthropic(base_url=SCRIPTED.root, api_key=KEY, max_retries=0)
tool = {
    "name": TOOL["function"]["name"],
    "description": TOOL["function"]["description"],
    "input_schema": TOOL["function"]["parameters"],
}


def ask(text: str, **more: Any) -> Any:
    messages = more.pop("messages", [{"role": "user", "content": text}])
    return scripted.messages.create(model=SCRIPTED.model, max_tokens=60, messages=messages, **more)


def plain() -> str:
    messages = [{"role": "user", "content": CAPITAL}]
    return (
        real.messages.create(
            model=REAL.model, max_tokens=20, messages=messages, extra_body={"temperature": 0}
        )
        .content[0]
        .text
    )


def streamed() -> str:
    messages = [{"role": "user", "content": CAPITAL}]
    with scripted.messages.stream(model=SCRIPTED.model, max_tokens=60, messages=messages) as stream:
        return "".join(stream.text_stream)


def thoughts() -> str:
    return next(block.thinking for block in ask(CAPITAL).content if block.type == "thinking")


def tools() -> tuple[object, str]:
    first = ask(WEATHER, tools=[tool])
    call = next(block for block in first.content if block.type == "tool_use")
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "sunny"}
    messages = [
        {"role": "user", "content": WEATHER},
        {"role": "assistant", "content": first.content},
        {"role": "user", "content": [result]},
    ]
    second = ask("", messages=messages, tools=[tool])
    return call.input, next(block.text for block in second.content if block.type == "text")


def parallel() -> list[str]:
    messages = [{"role": "user", "content": WEATHER_TWICE}]
    with scripted.messages.stream(
        model=SCRIPTED.model, max_tokens=60, messages=messages, tools=[tool]
    ) as stream:
        final = stream.get_final_message()
    return [block.input["city"] for block in final.content if block.type == "tool_use"]


def cancel() -> bool:
    messages = [{"role": "user", "content": COUNT}]
    with scripted.messages.stream(model=SCRIPTED.model, max_tokens=4000, messages=messages) as stream:
        for _ in stream:
            break
    return idle()


def count() -> int:
    messages = [{"role": "user", "content": CAPITAL}]
    return scripted.messages.count_tokens(model=SCRIPTED.model, messages=messages).input_tokens


row("plain", plain, lambda saw: "Paris" in saw)
row("streamed", streamed, TALK.__eq__)
row("thoughts", thoughts, lambda saw: "city" in saw)
row("tools", tools, lambda saw: saw == ({"city": "Paris"}, AFTER))
row("parallel tools", parallel, lambda saw: saw == ["Rome", "Oslo"])
row("usage", lambda: ask(CAPITAL).usage, lambda saw: saw.input_tokens > 0 and saw.output_tokens > 0)
row("cancel", cancel, lambda saw: saw)
row(
    "error",
    lambda: refusal(lambda: ask("Hi", extra_body={"temperature": 9})),
    lambda saw: "temperature" in saw,
)
row("count_tokens", count, lambda saw: saw > 0)
