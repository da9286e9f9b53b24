"""LangChain's ChatOpenAI."""

from __future__ import annotations

from typing import Literal

from langchain_core.messages import HumanMessage, ToolMessage
from langchain_openai import ChatOpenAI
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

real = ChatOpenAI(
    base_url=REAL.url, api_key=KEY, model=REAL.model, max_retries=0, temperature=0, max_tokens=400
)
scripted = ChatOpenAI(base_url=SCRIPTED.url, api_key=KEY, model=SCRIPTED.model, max_retries=0)


class Verdict(BaseModel):
    """A verdict."""

    fair: bool
    color: Literal["red", "blue"]


def streamed() -> str:
    return "".join(chunk.content for chunk in scripted.stream(CAPITAL))


def tools() -> tuple[dict, str]:
    model = scripted.bind_tools([TOOL])
    asked = [HumanMessage(WEATHER)]
    message = model.invoke(asked)
    (call,) = message.tool_calls
    answer = model.invoke([*asked, message, ToolMessage("sunny", tool_call_id=call["id"])])
    return call["args"], answer.content


def parallel() -> list[str]:
    return [call["args"]["city"] for call in scripted.bind_tools([TOOL]).invoke(WEATHER_TWICE).tool_calls]


def structured(method: str) -> object:
    model = scripted if method == "function_calling" else real
    found = model.with_structured_output(Verdict, method=method)
    return found.invoke(
        "Give a verdict as JSON with the fields fair (true or false) and color (red or blue)."
    )


def json_mode() -> dict:
    model = real.with_structured_output(None, method="json_mode")
    return model.invoke('Answer with this JSON: {"city": "Paris"}')


def usage() -> dict:
    return [
        part.usage_metadata for part in scripted.stream(CAPITAL, stream_usage=True) if part.usage_metadata
    ][-1]


def cancel() -> bool:
    stream = scripted.stream(COUNT)
    next(stream)
    stream.close()
    return idle()


row("plain", lambda: real.invoke(CAPITAL).content, lambda saw: "Paris" in saw)
row("streamed", streamed, TALK.__eq__)
row("tools", tools, lambda saw: saw == ({"city": "Paris"}, AFTER))
row("parallel tools", parallel, lambda saw: saw == ["Rome", "Oslo"])
row("structured output", lambda: structured("json_schema"), lambda saw: isinstance(saw, Verdict))
row(
    "structured output by function_calling",
    lambda: structured("function_calling"),
    lambda saw: isinstance(saw, Verdict),
)
row("structured output by json_mode", json_mode, lambda saw: isinstance(saw, dict))
row("usage", usage, lambda saw: saw["input_tokens"] > 0 and saw["output_tokens"] > 0)
row("cancel", cancel, lambda saw: saw)
row("error", lambda: refusal(lambda: scripted.invoke("Hi", temperature=9)), lambda saw: "temperature" in saw)
