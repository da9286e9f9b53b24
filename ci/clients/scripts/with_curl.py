"""curl, as the pages of OpenAI show it."""

from __future__ import annotations

import json
import subprocess

from shown import (
    AFTER,
    CAPITAL,
    COUNT,
    PERSON,
    REAL,
    SCRIPTED,
    TALK,
    TOOL,
    WEATHER,
    WEATHER_TWICE,
    Served,
    idle,
    row,
)


def curl(served: Served, body: dict, *flags: str, route: str = "chat/completions") -> str:
    command = ["curl", "-sS", *flags, f"{served.url}/{route}", "-H", "Content-Type: application/json"]
    command += ["-H", "Authorization: Bearer none", "-d", json.dumps({"model": served.model, **body})]
    return subprocess.run(command, check=False, capture_output=True, text=True).stdout


def chat(served: Served, text: str, **more: object) -> dict:
    return json.loads(curl(served, {"messages": [{"role": "user", "content": text}], **more}))


def events(**more: object) -> list[dict]:
    body = {"messages": [{"role": "user", "content": CAPITAL}], "stream": True, **more}
    lines = curl(SCRIPTED, body, "-N").splitlines()
    data = [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]
    assert data.pop() == "[DONE]"
    return [json.loads(one) for one in data]


def streamed() -> str:
    chunks = (event["choices"][0]["delta"] for event in events() if event["choices"])
    return "".join(delta.get("content") or "" for delta in chunks)


def tools() -> tuple[str, str]:
    first = chat(SCRIPTED, WEATHER, tools=[TOOL])["choices"][0]["message"]
    (call,) = first["tool_calls"]
    messages = [{"role": "user", "content": WEATHER}, first]
    messages.append({"role": "tool", "tool_call_id": call["id"], "content": "sunny"})
    second = json.loads(curl(SCRIPTED, {"messages": messages, "tools": [TOOL]}))
    return json.loads(call["function"]["arguments"])["city"], second["choices"][0]["message"]["content"]


def parallel() -> list[str]:
    calls = chat(SCRIPTED, WEATHER_TWICE, tools=[TOOL])["choices"][0]["message"]["tool_calls"]
    return [json.loads(call["function"]["arguments"])["city"] for call in calls]


def structured() -> dict:
    form = {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON}}
    answer = chat(REAL, "Describe a person.", response_format=form, max_tokens=120)
    return json.loads(answer["choices"][0]["message"]["content"])


def cancel() -> bool:
    body = {"messages": [{"role": "user", "content": COUNT}], "stream": True}
    curl(SCRIPTED, body, "-N", "--max-time", "2")
    return idle()


row(
    "plain",
    lambda: chat(REAL, CAPITAL, max_tokens=20, temperature=0)["choices"][0]["message"]["content"],
    lambda saw: "Paris" in saw,
)
row("streamed", streamed, TALK.__eq__)
row("tools", tools, lambda saw: saw == ("Paris", AFTER))
row("parallel tools", parallel, lambda saw: saw == ["Rome", "Oslo"])
row("structured output", structured, lambda saw: set(saw) == {"name", "adult"})
row(
    "usage",
    lambda: events(stream_options={"include_usage": True})[-1]["usage"],
    lambda saw: saw["prompt_tokens"] > 0 and saw["completion_tokens"] > 0,
)
row("cancel", cancel, lambda saw: saw)
row("error", lambda: chat(SCRIPTED, "Hi", temperature=9), lambda saw: saw["error"]["param"] == "temperature")
row(
    "a path without /v1",
    lambda: (
        subprocess.run(
            ["curl", "-sS", f"{REAL.root}/chat/completions", "-d", "{}"],
            check=False,
            capture_output=True,
            text=True,
        ).stdout
    ),
    lambda saw: "/v1/chat/completions" in saw,
)
