"""LlamaIndex's OpenAILike."""

from __future__ import annotations

from llama_index.core.llms import ChatMessage
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai_like import OpenAILike
from pydantic import BaseModel
from shown import (
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


def model(served: Served, **more: object) -> OpenAILike:
    return OpenAILike(
        model=served.model,
        api_base=served.url,
        api_key=KEY,
        is_chat_model=True,
        is_function_calling_model=True,
        context_window=4096,
        max_retries=0,
        **more,
    )


def get_weather(city: str) -> str:
    """Tell the weather of a city."""
    return f"sunny in {city}"


class Verdict(BaseModel):
    """A verdict."""

    fair: bool


real, scripted = model(REAL, max_tokens=60, temperature=0), model(SCRIPTED, max_tokens=400)
tool = FunctionTool.from_defaults(get_weather)


def asked(text: str) -> list[ChatMessage]:
    return [ChatMessage(role="user", content=text)]


def streamed() -> str:
    return "".join(part.delta or "" for part in scripted.stream_chat(asked(CAPITAL)))


def calls(text: str, **more: object) -> list[dict]:
    answer = scripted.chat_with_tools([tool], user_msg=text, **more)
    return [call.tool_kwargs for call in scripted.get_tool_calls_from_response(answer)]


def structured() -> object:
    return scripted.structured_predict(Verdict, _template("Give a verdict."))


def _template(text: str) -> object:
    from llama_index.core import PromptTemplate

    return PromptTemplate(text)


def usage() -> object:
    return scripted.chat(asked(CAPITAL)).raw.usage


def cancel() -> bool:
    stream = model(SCRIPTED).stream_chat(asked(COUNT))
    next(stream)
    stream.close()
    return idle()


def completion() -> str:
    plain = OpenAILike(
        model=REAL.model, api_base=REAL.url, api_key=KEY, is_chat_model=False, max_tokens=6, temperature=0
    )
    return plain.complete("The capital of France is").text


row("plain", lambda: real.chat(asked(CAPITAL)).message.content, lambda saw: "Paris" in saw)
row("streamed", streamed, TALK.__eq__)
row("tools", lambda: calls(WEATHER), lambda saw: saw == [{"city": "Paris"}])
row(
    "parallel tools",
    lambda: calls(WEATHER_TWICE, allow_parallel_tool_calls=True),
    lambda saw: saw == [{"city": "Rome"}, {"city": "Oslo"}],
)
row("structured output", structured, lambda saw: isinstance(saw, Verdict))
row("usage", usage, lambda saw: saw.prompt_tokens > 0 and saw.completion_tokens > 0)
row("cancel", cancel, lambda saw: saw)
row(
    "error",
    lambda: refusal(lambda: scripted.chat(asked("Hi"), temperature=9)),
    lambda saw: "temperature" in saw,
)
row("completions", completion, lambda saw: "Paris" in saw)
