"""smolagents: its model, and an agent that calls tools."""

from __future__ import annotations

from shown import CAPITAL, COUNT, KEY, REAL, SCRIPTED, TALK, WEATHER, Served, idle, refusal, row
from smolagents import OpenAIModel, Tool


def model(served: Served, **more: object) -> OpenAIModel:
    return OpenAIModel(
        model_id=served.model, api_base=served.url, api_key=KEY, client_kwargs={"max_retries": 0}, **more
    )


class Weather(Tool):
    """The weather of a city."""

    name = "get_weather"
    description = "Tells the weather of a city."
    inputs = {"city": {"type": "string", "description": "A city."}}  # noqa: RUF012 - as smolagents reads it
    output_type = "string"

    def forward(self, city: str) -> str:
        """Tell it."""
        return f"sunny in {city}"


def asked(text: str) -> list[dict]:
    return [{"role": "user", "content": [{"type": "text", "text": text}]}]


def streamed() -> str:
    return "".join(part.content or "" for part in model(SCRIPTED).generate_stream(asked(CAPITAL)))


def tools() -> object:
    answer = model(SCRIPTED).generate(asked(WEATHER), tools_to_call_from=[Weather()])
    return answer.tool_calls[0].function.name


def cancel() -> bool:
    stream = model(SCRIPTED).generate_stream(asked(COUNT))
    next(stream)
    stream.close()
    return idle()


row(
    "plain",
    lambda: model(REAL, temperature=0, max_tokens=20).generate(asked(CAPITAL)).content,
    lambda saw: "Paris" in saw,
)
row("streamed", streamed, TALK.__eq__)
row("tools", tools, lambda saw: saw == "get_weather")
row("usage", lambda: model(SCRIPTED).generate(asked(CAPITAL)).token_usage, lambda saw: saw.output_tokens > 0)
row("cancel", cancel, lambda saw: saw)
row(
    "error",
    lambda: refusal(lambda: model(SCRIPTED, temperature=9).generate(asked("Hi"))),
    lambda saw: "temperature" in saw,
)
