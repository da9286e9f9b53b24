"""The models of ``import llorch``, asking a source that is no model."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Generator

import pytest

import llorch
from llorch.asking import chat_prompt
from llorch.asynchronous import AsyncModel
from llorch.blocking import Model
from llorch_serve.errors import FieldViolation, InvalidRequestError
from llorch_serve.requests import GenerationRequest, GenerationUpdate, TextPrompt

PATIENCE_S = 20.0
TEXT = GenerationUpdate("r", "text", ())


class AsyncSource:
    """Refuses the prompt "bad", and never answers others. left: requests that were given up."""

    def __init__(self) -> None:
        self.left = 0

    async def complete(self, request: GenerationRequest) -> list[GenerationUpdate]:
        if request.prompt == TextPrompt("bad"):
            raise InvalidRequestError([FieldViolation("input", "found bad")])
        try:
            await asyncio.sleep(PATIENCE_S)
        finally:
            self.left += 1
        return []

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[GenerationUpdate, None]:
        try:
            while True:
                yield TEXT
        finally:
            self.left += 1


class Source:
    """Answers without end. left: as above."""

    def __init__(self) -> None:
        self.left = 0
        self.held: Generator[GenerationUpdate, None, None] | None = None

    def generate(self, request: GenerationRequest) -> Generator[GenerationUpdate, None, None]:
        self.held = self._updates()  # as a debugger or a traceback would
        return self.held

    def _updates(self) -> Generator[GenerationUpdate, None, None]:
        try:
            while True:
                yield TEXT
        finally:
            self.left += 1


def test_one_bad_text_of_several_raises_its_own_error_and_ends_the_others() -> None:
    source = AsyncSource()

    async def main() -> None:
        model = AsyncModel(source)  # type: ignore[arg-type]  # nothing else is asked of it
        with pytest.raises(llorch.InvalidRequestError, match="found bad"):
            await model.generate_all(["good", "bad", "good"])

    asyncio.run(main())
    assert source.left == 2


def test_a_stream_that_is_closed_ends_its_request_on_an_event_loop() -> None:
    source = AsyncSource()

    async def main() -> None:
        stream = AsyncModel(source).stream("a")  # type: ignore[arg-type]  # as above
        assert (await anext(stream)).text == "text"
        await stream.aclose()
        assert source.left == 1

    asyncio.run(main())


def test_a_stream_that_is_closed_ends_its_request() -> None:
    source = Source()
    stream = Model(source).stream("a")  # type: ignore[arg-type]  # as above
    assert next(stream).text == "text"
    stream.close()
    assert source.left == 1


def test_a_function_that_is_named_is_called_once_as_over_http() -> None:
    named = {"type": "function", "function": {"name": "add"}}
    assert not chat_prompt("a", tools=[named], tool_choice=named).parallel_tool_calls
    assert chat_prompt("a", tools=[named], tool_choice="required").parallel_tool_calls


def test_a_message_may_ask_by_itself_to_be_continued() -> None:
    question, begun = {"role": "user", "content": "a"}, {"role": "assistant", "content": "b", "prefix": True}
    assert chat_prompt([question, begun]).continue_final_message
    with pytest.raises(llorch.InvalidRequestError, match=r"^messages\[0\]\.prefix: "):
        chat_prompt([begun, question])


def test_a_field_that_no_message_has_is_refused_by_its_place() -> None:
    with pytest.raises(
        llorch.InvalidRequestError, match=r"^messages\[0\]\.contnet: unknown field; known are"
    ):
        chat_prompt([{"role": "user", "content": "a", "contnet": "b"}])
    # As OpenAI's client gives answers back, with an object of the caller's own.
    assert chat_prompt([{"role": "assistant", "content": "a", "parsed": object(), "refusal": None}])
