"""OpenAI's Responses API through OpenAI's own client, over a real socket, around a fake generator."""

from __future__ import annotations

import json

import openai
import pydantic
import pytest

from llorch_serve.engine.sequence import FinishReason
from llorch_serve.errors import FieldViolation, InvalidRequestError, NonFiniteLogitsError
from llorch_serve.http.responses import items
from llorch_serve.http.responses.items import wrapped_thoughts
from llorch_serve.http.responses.shape import MAX_ECHOED_BYTES
from llorch_serve.http.settings import HttpSettings
from llorch_serve.http.unknown_fields import UnknownFields
from llorch_serve.requests import ChatMessage, ToolCall, ToolCallDelta, ToolChoice, ToolMode
from llorch_serve.sampling.logprobs import TokenLogprob, TokenLogprobs
from llorch_serve.structured.spec import JsonObject, JsonSchema
from support.fakes.generator import INFO, PATIENCE_S
from support.fakes.scripted import ScriptedGenerator
from support.harness.http import fake_front, running_front, send

pytestmark = pytest.mark.usefixtures("way_at_leisure")

WEATHER = {
    "type": "function",
    "name": "weather",
    "description": "Tell the weather",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    "strict": False,
}
THOUGHT_TEXT_CALLS = (
    {"reasoning": "It may "},
    {"reasoning": "rain."},
    {"text": "Let me "},
    {"text": "look."},
    {"tool_calls": (ToolCallDelta(0, "c1", "weather", ""),)},
    {"tool_calls": (ToolCallDelta(0, arguments='{"city":'),)},
    {"tool_calls": (ToolCallDelta(0, arguments=' "Rome"}'), ToolCallDelta(1, "c2", "time", "{}"))},
)


@pytest.fixture
def served():
    """A front, its generator, and OpenAI's client of it."""
    with fake_front() as (front, generator), client_of(front) as client:
        yield front, generator, client


def client_of(front, key="none"):
    return openai.OpenAI(base_url=f"{front.base}/v1", api_key=key, max_retries=0, timeout=PATIENCE_S)


def ask(client, **more):
    return client.responses.create(**{"model": INFO.model_id, "input": "Hi", "max_output_tokens": 3} | more)


def refusals(front, **more):
    """Return what a body is refused for, by field."""
    answer = send(front.port, "POST", "/v1/responses", {"input": "Hi", "max_output_tokens": 1} | more)
    assert answer.status == 400, answer.body
    return {item["field"]: item["message"] for item in answer.document["error"]["errors"]}


def plain(item):
    """Return an item without its id, and without what the streaming helper reads out of it."""
    found = item.model_dump(exclude={"id", "parsed_arguments"})
    for part in found.get("content") or ():
        part.pop("parsed", None)
    return found


def text(words, kind="input_text"):
    return {"type": kind, "text": words}


def test_an_answer_comes_whole(served):
    _, generator, client = served
    response = ask(client, instructions="Be brief", metadata={"a": "b"}, temperature=0.5)
    assert response.output_text == "w0 w1 w2 "
    (item,) = response.output
    assert (item.type, item.role, item.status) == ("message", "assistant", "incomplete")
    assert (response.object, response.status, response.model) == ("response", "incomplete", INFO.model_id)
    assert response.incomplete_details.reason == "max_output_tokens"
    prompt = len("<system>Be brief<user>Hi")
    usage = response.usage
    assert (usage.input_tokens, usage.output_tokens, usage.total_tokens) == (prompt, 3, prompt + 3)
    assert response.id == generator.submitted[0].request_id
    assert response.id.startswith("resp_")
    assert (response.instructions, response.metadata, response.temperature) == ("Be brief", {"a": "b"}, 0.5)
    assert (response.tool_choice, response.tools, response.parallel_tool_calls) == ("auto", [], True)
    assert response.llorch["seed"] == 4711
    assert generator.submitted[0].prompt.messages == (
        ChatMessage("system", "Be brief"),
        ChatMessage("user", "Hi"),
    )


def test_a_stream_says_what_the_whole_answer_says():
    generator = ScriptedGenerator(THOUGHT_TEXT_CALLS, FinishReason.TOOL_CALLS, reused=2)
    with running_front(generator) as front, client_of(front) as client:
        whole = ask(client, max_output_tokens=50, tools=[WEATHER])
        with client.responses.stream(model=INFO.model_id, input="Hi", tools=[WEATHER]) as stream:
            events = list(stream)
            last = stream.get_final_response()
    generator.close()
    varying = {"id", "created_at", "completed_at", "max_output_tokens"}
    thought, said, weather, time = last.output
    assert [item.id[: item.id.index("_")] for item in last.output] == ["rs", "msg", "fc", "fc"]
    for one, other in zip(whole.output, last.output, strict=True):
        assert plain(one) == plain(other)
    assert whole.model_dump(exclude=varying | {"output"}) == last.model_dump(exclude=varying | {"output"})
    assert thought.content[0].text == "It may rain."
    assert said.content[0].text == last.output_text == "Let me look."
    assert (weather.call_id, weather.name, weather.arguments) == ("c1", "weather", '{"city": "Rome"}')
    assert (time.call_id, time.name, time.arguments) == ("c2", "time", "{}")
    assert last.usage.input_tokens_details.cached_tokens == 2
    assert [event.sequence_number for event in events] == list(range(len(events)))
    texts = [["content_part.added"], ["content_part.done"]]
    kinds = [
        [*texts[0], "reasoning_text.delta", "reasoning_text.delta", "reasoning_text.done", *texts[1]],
        [*texts[0], "output_text.delta", "output_text.delta", "output_text.done", *texts[1]],
        ["function_call_arguments.delta", "function_call_arguments.delta", "function_call_arguments.done"],
        ["function_call_arguments.delta", "function_call_arguments.done"],
    ]
    items = [["output_item.added", *inner, "output_item.done"] for inner in kinds]
    expected = ["created", "in_progress", *(name for item in items for name in item), "completed"]
    # Deltas that come together are joined.
    assert list(dict.fromkeys(event.type for event in events)) == list(
        dict.fromkeys(f"response.{name}" for name in expected)
    )
    if len(events) == len(expected):
        assert [event.type for event in events] == [f"response.{name}" for name in expected]


def test_an_answer_of_nothing_has_one_empty_text():
    generator = ScriptedGenerator(())
    with running_front(generator) as front, client_of(front) as client:
        response = ask(client)
    generator.close()
    assert (response.status, response.output_text, len(response.output)) == ("completed", "", 1)


def test_items_reach_the_template(served):
    _, generator, client = served
    ask(
        client,
        instructions="Be brief",
        tools=[WEATHER],
        input=[
            {"role": "developer", "content": "Mind the time"},
            {"type": "message", "role": "user", "content": [text("Weather"), text("?")]},
            {"type": "reasoning", "id": "rs_1", "summary": [], "content": [text("Rain?", "reasoning_text")]},
            {
                "type": "message",
                "id": "msg_1",
                "status": "completed",
                "role": "assistant",
                "content": [text("Let me look.", "output_text") | {"annotations": [], "logprobs": []}],
            },
            {"type": "function_call", "id": "fc_1", "call_id": "c1", "name": "weather", "arguments": "{}"},
            {"type": "function_call", "call_id": "c2", "name": "time", "arguments": ""},
            {"type": "function_call_output", "call_id": "c1", "output": "rain"},
            {"type": "function_call_output", "call_id": "c2", "output": [text("no"), text("on")]},
            {"role": "assistant", "content": "It rains."},
            {"role": "assistant", "content": "At noon."},
            {"type": "reasoning", "summary": [text("Hm", "summary_text")], "encrypted_content": "gAAAA"},
            {"role": "user", "content": "Thanks"},
        ],
    )
    prompt = generator.submitted[0].prompt
    assert prompt.messages == (
        ChatMessage("system", "Be brief\n\nMind the time"),
        ChatMessage("user", "Weather?"),
        ChatMessage(
            "assistant",
            "Let me look.",
            tool_calls=(ToolCall("weather", "{}", "c1"), ToolCall("time", "{}", "c2")),
            reasoning_content="Rain?",
        ),
        ChatMessage("tool", "rain", tool_call_id="c1"),
        ChatMessage("tool", "noon", tool_call_id="c2"),
        ChatMessage("assistant", "It rains."),
        ChatMessage("assistant", "At noon."),
        ChatMessage("assistant", "", reasoning_content="Hm"),
        ChatMessage("user", "Thanks"),
    )
    assert [json.loads(tool) for tool in prompt.tools] == [
        {"type": "function", "function": {name: WEATHER[name] for name in WEATHER if name != "type"}}
    ]


def test_an_answer_goes_on_from_one_that_is_kept():
    generator = ScriptedGenerator(THOUGHT_TEXT_CALLS, FinishReason.TOOL_CALLS)
    with running_front(generator) as front, client_of(front) as client:
        first = ask(client, instructions="Be brief", max_output_tokens=50)
        output = {"type": "function_call_output", "call_id": "c1", "output": "rain"}
        second = ask(client, previous_response_id=first.id, input=[output], max_output_tokens=50)
        ask(client, previous_response_id=second.id, input="Go on")
        ask(client, previous_response_id=first.id, input=[{"role": "assistant", "content": "Rain"}])
    generator.close()
    said = ChatMessage(
        "assistant",
        "Let me look.",
        tool_calls=(ToolCall("weather", '{"city": "Rome"}', "c1"), ToolCall("time", "{}", "c2")),
        reasoning_content="It may rain.",
    )
    begun = (ChatMessage("user", "Hi"), said, ChatMessage("tool", "rain", tool_call_id="c1"))
    assert [request.prompt.messages for request in generator.submitted[1:]] == [
        begun,  # instructions are of one request alone
        (*begun, said, ChatMessage("user", "Go on")),
        (ChatMessage("user", "Hi"), said, ChatMessage("assistant", "Rain")),
    ]
    assert second.previous_response_id == first.id


def test_what_is_kept_can_be_fetched_and_deleted(served):
    _, generator, client = served
    response = ask(client)
    assert client.responses.retrieve(response.id).model_dump() == response.model_dump()
    reference = {"type": "item_reference", "id": response.output[0].id}
    ask(client, input=[{"role": "user", "content": "Hi"}, reference])
    assert generator.submitted[1].prompt.messages[1] == ChatMessage("assistant", "w0 w1 w2 ")
    client.responses.delete(response.id)
    with pytest.raises(openai.NotFoundError, match="is not kept here"):
        client.responses.retrieve(response.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.delete(response.id)
    other = send(served[0].port, "PUT", f"/v1/responses/{response.id}")
    assert (other.status, set(other.headers["allow"].split(", "))) == (405, {"GET", "HEAD", "DELETE"})
    with pytest.raises(openai.BadRequestError, match="is not kept here") as caught:
        ask(client, previous_response_id=response.id)
    assert caught.value.param == "previous_response_id"
    with pytest.raises(openai.BadRequestError, match="send the item itself") as caught:
        ask(client, input=[reference])
    assert caught.value.param == "input[0].id"


def test_what_is_not_to_be_kept_is_not(served):
    client = served[2]
    response = ask(client, store=False)
    assert response.store is False
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(response.id)
    with pytest.raises(openai.BadRequestError, match="comes whole"):
        client.get(f"/responses/{ask(client).id}?stream=true", cast_to=object)


def test_an_answer_is_kept_for_its_caller_alone():
    with fake_front(token="open sesame") as (front, _):
        with client_of(front, "open sesame") as client:
            response = ask(client)
            assert client.responses.retrieve(response.id).id == response.id
        with client_of(front, "another") as client:
            with pytest.raises(openai.NotFoundError):
                client.responses.retrieve(response.id)
            with pytest.raises(openai.NotFoundError):
                client.responses.delete(response.id)
            with pytest.raises(openai.BadRequestError):
                ask(client, previous_response_id=response.id)


def test_sampling_forms_and_choices_reach_the_generator(served):
    _, generator, client = served
    ask(
        client,
        temperature=0.5,
        top_p=0.9,
        reasoning={"effort": "low", "summary": "auto"},
        text={"format": {"type": "json_object"}},
        extra_body={"top_k": 4, "seed": 5, "stop": "END", "chat_template_kwargs": {"a": 1}},
    )
    request = generator.submitted[0]
    sampling = request.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.max_tokens) == (0.5, 0.9, 4, 3)
    assert (sampling.stop, sampling.seed, sampling.structured) == (("END",), 5, JsonObject())
    assert json.loads(request.prompt.template_arguments) == {
        "enable_thinking": True,
        "reasoning_effort": "low",
        "a": 1,
    }
    ask(client, tools=[WEATHER], tool_choice="none", reasoning={"effort": "none"})
    assert generator.submitted[1].prompt.tools == ()
    assert json.loads(generator.submitted[1].prompt.template_arguments)["enable_thinking"] is False


@pytest.mark.parametrize(
    ("choice", "read"),
    [
        ("required", ToolChoice(ToolMode.REQUIRED)),
        ({"type": "function", "name": "weather"}, ToolChoice(ToolMode.REQUIRED, ("weather",))),
        (
            {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "weather"}]},
            ToolChoice(ToolMode.AUTO, ("weather",)),
        ),
    ],
    ids=("required", "one", "allowed"),
)
def test_the_choice_of_tools_reaches_the_generator(served, choice, read):
    response = ask(served[2], tools=[WEATHER], tool_choice=choice, parallel_tool_calls=False)
    prompt = served[1].submitted[0].prompt
    assert (prompt.tool_choice, prompt.parallel_tool_calls) == (read, False)
    assert response.parallel_tool_calls is False
    assert len(response.tools) == 1


def test_a_call_that_breaks_off_is_not_gone_on_from():
    pieces = (
        {"tool_calls": (ToolCallDelta(0, "c1", "weather", '{"ci'),)},
        {"text": '<tool_call>{"ci', "tool_calls": (ToolCallDelta(0, broken=True),)},
    )
    generator = ScriptedGenerator(pieces, FinishReason.STOP, free_running=False)
    with running_front(generator) as front, client_of(front) as client:
        stream = ask(client, tools=[WEATHER], stream=True, max_output_tokens=9)
        generator.step()
        assert any(event.type == "response.function_call_arguments.delta" for event in stream)
        generator.run_freely()
        *_, last = stream
        ask(client, previous_response_id=last.response.id)
    generator.close()
    call, said = last.response.output
    assert (call.type, call.status, said.status) == ("function_call", "incomplete", "completed")
    assert said.content[0].text == '<tool_call>{"ci'
    assert generator.submitted[1].prompt.messages[1] == ChatMessage("assistant", '<tool_call>{"ci')


class City(pydantic.BaseModel):
    name: str


class Place(pydantic.BaseModel):
    city: str


CALL = ToolCallDelta(0, "c1", "weather", '{"city": "Rome"}')
STRICT = openai.pydantic_function_tool(Place, name="weather")


def test_a_model_of_the_client_becomes_the_form_and_the_answer():
    generator = ScriptedGenerator(({"text": '{"name": '}, {"text": '"Rome"}'}))
    with running_front(generator) as front, client_of(front) as client:
        parsed = client.responses.parse(model=INFO.model_id, input="Hi", text_format=City)
        with client.responses.stream(model=INFO.model_id, input="Hi", text_format=City) as stream:
            streamed = stream.get_final_response()
    generator.close()
    assert parsed.output_parsed == streamed.output_parsed == City(name="Rome")
    form = generator.submitted[0].sampling.structured
    assert isinstance(form, JsonSchema)
    assert json.loads(form.schema)["properties"]["name"]["type"] == "string"


@pytest.mark.filterwarnings("ignore:Pydantic serializer warnings")  # of older clients, about their own models
def test_what_came_back_can_be_sent_again():
    pieces = ({"reasoning": "Hm"}, {"text": '{"name": "Rome"}'}, {"tool_calls": (CALL,)})
    generator = ScriptedGenerator(pieces, FinishReason.TOOL_CALLS)
    with running_front(generator) as front, client_of(front) as client:
        answers = [
            ask(client, max_output_tokens=9, include=["message.output_text.logprobs"]),
            client.responses.parse(model=INFO.model_id, input="Hi", text_format=City, tools=[STRICT]),
        ]
        with client.responses.stream(
            model=INFO.model_id, input="Hi", text_format=City, tools=[STRICT]
        ) as stream:
            answers.append(stream.get_final_response())
        for answer in answers:
            ask(client, input=[{"role": "user", "content": "Hi"}, *answer.output])
            ask(client, input=[item.model_dump() for item in answer.output])
    generator.close()
    said = ChatMessage(
        "assistant",
        '{"name": "Rome"}',
        tool_calls=(ToolCall("weather", '{"city": "Rome"}', "c1"),),
        reasoning_content="Hm",
    )
    sent = [request.prompt.messages for request in generator.submitted[3:]]
    assert sent == [(ChatMessage("user", "Hi"), said), (said,)] * 3


def test_logprobs_come_where_they_are_asked_for():
    place = TokenLogprobs(TokenLogprob(1, -0.5, "a", b"a"), (TokenLogprob(2, -1.5, "b", b"b"),))
    generator = ScriptedGenerator(({"text": "", "logprobs": (place,)}, {"text": "aa", "logprobs": (place,)}))
    with running_front(generator) as front, client_of(front) as client:
        response = ask(client, include=["message.output_text.logprobs"], top_logprobs=1)
    generator.close()
    assert generator.submitted[0].sampling.logprobs == 1
    told = response.output[0].content[0].logprobs
    assert [(one.token, one.logprob, one.top_logprobs[0].token) for one in told] == [("a", -0.5, "b")] * 2


def test_thoughts_can_be_sent_back_by_a_client_that_keeps_none():
    generator = ScriptedGenerator(({"reasoning": "It may rain. ☂"}, {"text": "Yes"}))
    with running_front(generator) as front, client_of(front) as client:
        response = ask(client, include=["reasoning.encrypted_content"], store=False)
        wrapped = response.output[0].encrypted_content
        item = {"type": "reasoning", "summary": [], "content": None, "encrypted_content": wrapped}
        ask(client, input=[item, {"role": "user", "content": "Hi"}])
        ask(client)
        with pytest.raises(openai.BadRequestError, match="another server encrypted"):
            ask(client, input=[item | {"encrypted_content": "gAAAA"}])
        with pytest.raises(openai.BadRequestError, match="as this worker gave it"):
            ask(client, input=[item | {"encrypted_content": wrapped + "="}])
    generator.close()
    assert wrapped == wrapped_thoughts("It may rain. ☂")
    assert generator.submitted[1].prompt.messages[0].reasoning_content == "It may rain. ☂"


def test_every_bad_field_has_the_name_that_the_api_has(served):
    found = refusals(
        served[0],
        background=True,
        truncation="auto",
        conversation="conv_1",
        prompt={"id": "pmpt_1"},
        include=["everything"],
        text={"verbosity": "low"},
        previous_response_id="resp_none",
        input=[
            {"role": "user", "content": [{"type": "input_image", "image_url": "data:,"}]},
            {"type": "web_search_call", "id": "ws_1", "status": "completed"},
            {"type": "function_call", "name": "a"},
            {"role": "robot", "content": "a"},
        ],
        tools=[{"type": "web_search"}, {"type": "function"}],
    )
    assert list(found) == [
        "background",
        "conversation",
        "prompt",
        "truncation",
        "text.verbosity",
        "include[0]",
        "previous_response_id",
        "input[0].content[0].type",
        "input[1].type",
        "input[2]",
        "input[3].role",
        "tools[0].type",
        "tools[1]",
    ]
    assert "found 'input_image', expected one of input_text" in found["input[0].content[0].type"]
    assert "--unknown-fields ignore" in found["tools[0].type"]
    found = refusals(
        served[0],
        temperature=3,
        max_output_tokens=-2,
        text={"format": {"type": "json_schema", "name": "a"}},
    )
    assert list(found) == ["text.format"]
    assert list(refusals(served[0], temperature=3, max_output_tokens=-2)) == [
        "temperature",
        "max_output_tokens",
    ]
    assert list(refusals(served[0], input=[])) == ["input"]
    padded = {"include_obfuscation": True}
    found = refusals(served[0], stream=True, stream_options=padded)
    assert list(found) == ["stream_options.include_obfuscation"]
    assert list(refusals(served[0], top_logprobs=21)) == ["top_logprobs"]


def test_what_shows_late_has_the_name_that_the_api_has(served):
    front, generator, _ = served
    late = ("sampling.json_schema", "input.chat.tools[0].function.parameters.a", "input.chat.messages[1]")
    generator.fail_submit = InvalidRequestError([FieldViolation(name, "is bad") for name in late])
    assert list(refusals(front, instructions="a")) == ["text.format.schema", "tools[0].parameters.a", "input"]


def test_a_failure_inside_a_stream_reaches_the_client():
    with fake_front(free_running=False) as (front, generator), client_of(front) as client:
        stream = ask(client, stream=True)
        generator.step()
        generator.fail_step = NonFiniteLogitsError("the logits are not finite")
        generator.step()
        *_, last = stream
        assert last.type == "response.failed"
        assert (last.response.status, last.response.error.code) == ("failed", "non_finite_logits")
        with pytest.raises(openai.NotFoundError):
            client.responses.retrieve(last.response.id)


def test_an_answer_whose_client_leaves_is_not_kept():
    with fake_front(free_running=False) as (front, generator), client_of(front) as client:
        stream = ask(client, stream=True, max_output_tokens=50)
        response_id = next(iter(stream)).response.id
        stream.close()
        generator.wait_for(lambda g: g.aborted)
        with pytest.raises(openai.NotFoundError):
            client.responses.retrieve(response_id)


def test_empty_instructions_are_none(served):
    ask(served[2], instructions="")
    assert served[1].submitted[0].prompt.messages == (ChatMessage("user", "Hi"),)


def test_long_words_are_not_repeated(served):
    for words in ({"instructions": "a" * MAX_ECHOED_BYTES}, {"metadata": {"a": "b" * MAX_ECHOED_BYTES}}):
        response = ask(served[2], **words)
        assert (response.instructions, response.metadata, response.tools) == (None, {}, [])
        assert (response.text.format.type, response.tool_choice) == ("text", "auto")


def test_items_that_are_referred_to_are_as_long_as_a_body_at_most(served, monkeypatch):
    front, _, client = served
    reference = {"type": "item_reference", "id": ask(client).output[0].id}
    monkeypatch.setattr(items, "MAX_BODY_BYTES", 1000)
    found = refusals(front, input=[reference] * 50)
    (name,) = found
    assert name.startswith("input[")
    assert "more than 1000 bytes" in found[name]


def test_what_has_no_effect_is_not_listed_without_end():
    settings = HttpSettings(unknown=UnknownFields.IGNORE)
    with fake_front(settings=settings) as (front, _):
        body = {"input": "Hi", "tools": [{"type": "web_search"}] * 1000, "max_output_tokens": 1}
        answer = send(front.port, "POST", "/v1/responses", body)
    assert answer.document["llorch"]["ignored"] == ["tools[]"]


def test_tokens_are_counted_without_an_answer(served):
    _, generator, client = served
    counted = client.responses.input_tokens.count(model=INFO.model_id, input="Hi", instructions="Be brief")
    assert counted.input_tokens == len("<system>Be brief<user>Hi")
    assert generator.submitted == []


def test_a_body_of_codex_is_answered_and_says_what_had_no_effect(served):
    _, generator, client = served
    environment = "<environment_context>\n  <cwd>/home</cwd>\n</environment_context>"
    response = client.responses.create(
        model=INFO.model_id,
        instructions="You are a coding agent.",
        input=[
            {"type": "message", "role": "developer", "content": [text("<permissions>none</permissions>")]},
            {"type": "message", "role": "user", "content": [text(environment)]},
            {"type": "message", "role": "user", "content": [text("List the files")]},
            {"type": "function_call", "name": "shell", "arguments": '{"command":["ls"]}', "call_id": "c1"},
            {"type": "function_call_output", "call_id": "c1", "output": "a.py\n"},
        ],
        tools=[WEATHER | {"name": "shell"}],
        tool_choice="auto",
        parallel_tool_calls=True,
        reasoning={"effort": "medium", "summary": "auto"},
        store=False,
        stream=True,
        include=["reasoning.encrypted_content"],
        prompt_cache_key="0199",
        text={"verbosity": "medium"},
        extra_body={"client_metadata": {"x-codex-installation-id": "1"}},
        max_output_tokens=2,
    )
    *_, last = response
    assert last.type == "response.incomplete"
    assert last.response.llorch["ignored"] == ["reasoning.summary"]
    roles = [message.role for message in generator.submitted[0].prompt.messages]
    assert roles == ["system", "user", "user", "assistant", "tool"]


def test_what_is_not_known_is_left_aside_where_the_worker_is_told_to():
    settings = HttpSettings(unknown=UnknownFields.IGNORE)
    thought = {"type": "reasoning", "summary": [], "encrypted_content": "gAAAA", "colour": "red"}
    with fake_front(settings=settings) as (front, generator), client_of(front) as client:
        response = ask(
            client,
            input=[thought, {"role": "user", "content": "Hi"}],
            tools=[{"type": "web_search"}, {"type": "custom", "name": "apply_patch"}, WEATHER],
            extra_body={"temprature": 1},
        )
        with pytest.raises(openai.BadRequestError, match="found 'web_search_call'"):
            ask(client, input=[{"type": "web_search_call", "id": "ws_1", "status": "completed"}])
    assert response.llorch["ignored"] == ["temprature", "input[0].colour", "input[0]", "tools[0]", "tools[1]"]
    assert len(generator.submitted[0].prompt.tools) == 1
    assert [message.role for message in generator.submitted[0].prompt.messages] == ["user"]


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"input": None},
        {"input": [[]]},
        {"input": [{"type": 1}]},
        {"input": [{"role": "user", "content": [1]}]},
        {"input": [{"role": "user", "content": [{"type": "input_text"}]}]},
        {"input": [{"type": "sound"}] * 5000},
        {"input": "Hi", "tools": [[]]},
        {"input": "Hi", "text": {"format": {"type": "tree"}}},
        {"input": "Hi", "tool_choice": {"type": "function"}},
        {"input": "Hi", "metadata": {"a": 1}},
        {"input": "Hi", "reasoning": {"effort": "low"}, "chat_template_kwargs": []},
    ],
)
def test_malformed_bodies_are_refused(body):
    with fake_front() as (front, _):
        answer = send(front.port, "POST", "/v1/responses", body)
        assert (answer.status, answer.document["error"]["type"]) == (400, "invalid_request_error")
