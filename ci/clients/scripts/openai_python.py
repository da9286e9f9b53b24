"""OpenAI's own client for Python."""

from __future__ import annotations

import json

import openai
from pydantic import BaseModel
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

real = openai.OpenAI(base_url=REAL.url, api_key=KEY, max_retries=0)
scripted = openai.OpenAI(base_url=SCRIPTED.url, api_key=KEY, max_retries=0)


def user(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def plain() -> str:
    answer = real.chat.completions.create(
        model=REAL.model, messages=user(CAPITAL), max_tokens=20, temperature=0
    )
    return answer.choices[0].message.content


def streamed() -> str:
    stream = scripted.chat.completions.create(model=SCRIPTED.model, messages=user(CAPITAL), stream=True)
    return "".join(chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices)


def thoughts() -> str:
    message = (
        scripted.chat.completions.create(model=SCRIPTED.model, messages=user(CAPITAL)).choices[0].message
    )
    return message.reasoning_content


def tools() -> tuple[str, str, str]:
    messages = user(WEATHER)
    first = scripted.chat.completions.create(model=SCRIPTED.model, messages=messages, tools=[TOOL])
    message = first.choices[0].message
    call = message.tool_calls[0]
    messages += [message, {"role": "tool", "tool_call_id": call.id, "content": "sunny"}]
    second = scripted.chat.completions.create(model=SCRIPTED.model, messages=messages, tools=[TOOL])
    return first.choices[0].finish_reason, call.function.arguments, second.choices[0].message.content


def parallel() -> list[str]:
    with scripted.chat.completions.stream(
        model=SCRIPTED.model, messages=user(WEATHER_TWICE), tools=[TOOL]
    ) as stream:
        message = stream.get_final_completion().choices[0].message
    return [json.loads(call.function.arguments)["city"] for call in message.tool_calls]


class Person(BaseModel):
    name: str
    adult: bool


def structured() -> Person:
    messages = user("Describe a person as JSON.")
    answer = real.chat.completions.parse(
        model=REAL.model, messages=messages, response_format=Person, max_tokens=120, temperature=0
    )
    message = answer.choices[0].message
    real.chat.completions.create(
        model=REAL.model, messages=[*messages, message, *user("Thanks.")], max_tokens=4
    )
    return message.parsed


def usage() -> tuple[int, int, int]:
    stream = scripted.chat.completions.create(
        model=SCRIPTED.model, messages=user(CAPITAL), stream=True, stream_options={"include_usage": True}
    )
    last = list(stream)[-1].usage
    return last.prompt_tokens, last.completion_tokens, last.total_tokens


def cancel() -> bool:
    stream = scripted.chat.completions.create(model=SCRIPTED.model, messages=user(COUNT), stream=True)
    for _ in stream:
        break
    stream.close()
    return idle()


def error() -> str:
    return refusal(
        lambda: scripted.chat.completions.create(model=SCRIPTED.model, messages=user("Hi"), temperature=9)
    )


def completion() -> str:
    return (
        real.completions.create(
            model=REAL.model, prompt="The capital of France is", max_tokens=6, temperature=0
        )
        .choices[0]
        .text
    )


def responses() -> tuple[str, str]:
    with scripted.responses.stream(model=SCRIPTED.model, input=CAPITAL) as stream:
        final = stream.get_final_response()
    return final.output_text, final.status


row("plain", plain, lambda saw: "Paris" in saw)
row("streamed", streamed, TALK.__eq__)
row("thoughts", thoughts, lambda saw: "city" in saw)
row("tools", tools, lambda saw: saw[0] == "tool_calls" and "Paris" in saw[1] and saw[2] == AFTER)
row("parallel tools", parallel, lambda saw: saw == ["Rome", "Oslo"])
row("structured output", structured, lambda saw: isinstance(saw, Person))
row("usage", usage, lambda saw: saw[0] > 0 and saw[0] + saw[1] == saw[2])
row("cancel", cancel, lambda saw: saw)
row("error", error, lambda saw: saw.startswith("BadRequestError") and "temperature" in saw)
row("completions", completion, lambda saw: "Paris" in saw)
row("responses", responses, lambda saw: saw == (TALK, "completed"))
row("models", lambda: [m.id for m in real.models.list()], lambda saw: saw == [REAL.model])
