"""Instructor, in the modes that local models are used with."""

from __future__ import annotations

from typing import Literal

import instructor
import openai
from pydantic import BaseModel
from shown import CAPITAL, KEY, REAL, SCRIPTED, Served, refusal, row


class Verdict(BaseModel):
    """A verdict."""

    fair: bool
    color: Literal["red", "blue"]


def verdict(served: Served, mode: instructor.Mode, **more: object) -> object:
    client = openai.OpenAI(base_url=served.url, api_key=KEY, max_retries=0)
    return instructor.from_openai(client, mode=mode).chat.completions.create(
        model=served.model,
        messages=[
            {"role": "user", "content": "Give a verdict: fair is true or false, color is red or blue."}
        ],
        response_model=Verdict,
        max_retries=0,
        **{"max_tokens": 400, "temperature": 0, **more},
    )


def plain() -> str:
    client = instructor.from_openai(openai.OpenAI(base_url=REAL.url, api_key=KEY, max_retries=0))
    answer = client.chat.completions.create(
        model=REAL.model,
        messages=[{"role": "user", "content": CAPITAL}],
        response_model=None,
        max_tokens=20,
        temperature=0,
    )
    return answer.choices[0].message.content


def partial() -> object:
    client = openai.OpenAI(base_url=REAL.url, api_key=KEY, max_retries=0)
    stream = instructor.from_openai(client, mode=instructor.Mode.JSON_SCHEMA).chat.completions.create_partial(
        model=REAL.model,
        messages=[{"role": "user", "content": "Give a verdict."}],
        response_model=Verdict,
        max_tokens=80,
        temperature=0,
    )
    *_, last = stream
    return last


row("plain", plain, lambda saw: "Paris" in saw)
row("streamed", partial, lambda saw: saw.fair is not None and saw.color is not None)
row("tools", lambda: verdict(SCRIPTED, instructor.Mode.TOOLS), lambda saw: isinstance(saw, Verdict))
row(
    "structured output",
    lambda: verdict(REAL, instructor.Mode.JSON_SCHEMA),
    lambda saw: isinstance(saw, Verdict),
)
row(
    "strict tools",
    lambda: verdict(SCRIPTED, instructor.Mode.TOOLS_STRICT),
    lambda saw: isinstance(saw, Verdict),
)
row(
    "error",
    lambda: refusal(lambda: verdict(REAL, instructor.Mode.JSON_SCHEMA, temperature=9)),
    lambda saw: "temperature" in saw,
)
