"""Anthropic's Messages API through Anthropic's own client, over a real socket, around a fake generator."""

from __future__ import annotations

import json
import logging

import anthropic
import pydantic
import pytest

from llorch_serve.engine.sequence import FinishReason
from llorch_serve.errors import FieldViolation, InvalidRequestError, NonFiniteLogitsError
from llorch_serve.http.messages.answers import UNSIGNED
from llorch_serve.http.settings import HttpSettings
from llorch_serve.http.unknown_fields import UnknownFields
from llorch_serve.requests import ChatMessage, ToolCall, ToolCallDelta, ToolChoice, ToolMode
from llorch_serve.structured.spec import JsonSchema
from support.fakes.generator import INFO, PATIENCE_S
from support.fakes.scripted import ScriptedGenerator
from support.harness.http import fake_front, running_front, send

pytestmark = pytest.mark.usefixtures("way_at_leisure")

MESSAGES = [{"role": "user", "content": "Hi"}]
WEATHER = {
    "name": "weather",
    "description": "Tell the weather",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}},
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
    """A front, its generator, and Anthropic's client of it."""
    with fake_front() as (front, generator), client_of(front) as client:
        yield front, generator, client


def client_of(front, key="none"):
    return anthropic.Anthropic(base_url=front.base, api_key=key, max_retries=0, timeout=PATIENCE_S)


def ask(client, **more):
    return client.messages.create(**{"model": INFO.model_id, "messages": MESSAGES, "max_tokens": 3} | more)


def refusals(front, **more):
    """Return what a body is refused for, by field."""
    answer = send(front.port, "POST", "/v1/messages", {"messages": MESSAGES, "max_tokens": 1} | more)
    assert answer.status == 400, answer.body
    assert answer.document["type"] == "error"
    assert answer.document["error"]["type"] == "invalid_request_error"
    return {item["field"]: item["message"] for item in answer.document["error"]["errors"]}


def test_a_message_is_answered_whole(served):
    _, generator, client = served
    message = ask(client, system="Be brief")
    (block,) = message.content
    assert (block.type, block.text) == ("text", "w0 w1 w2 ")
    assert (message.type, message.role, message.model) == ("message", "assistant", INFO.model_id)
    assert (message.stop_reason, message.stop_sequence) == ("max_tokens", None)
    prompt = len("<system>Be brief<user>Hi")
    assert (message.usage.input_tokens, message.usage.output_tokens) == (prompt, 3)
    assert message.id == generator.submitted[0].request_id
    assert message.id.startswith("msg_")
    assert generator.submitted[0].prompt.messages == (
        ChatMessage("system", "Be brief"),
        ChatMessage("user", "Hi"),
    )
    assert message.llorch["seed"] == 4711


def test_a_stream_says_what_the_whole_answer_says(served):
    client = served[2]
    whole = ask(client, max_tokens=20)
    with client.messages.stream(model=INFO.model_id, messages=MESSAGES, max_tokens=20) as stream:
        text = "".join(stream.text_stream)
        last = stream.get_final_message()
    assert text == whole.content[0].text
    assert last.model_dump(exclude={"id"}) == whole.model_dump(exclude={"id", "llorch"})


def test_the_events_come_in_the_order_of_the_api():
    generator = ScriptedGenerator(THOUGHT_TEXT_CALLS, FinishReason.TOOL_CALLS, reused=2)
    with running_front(generator) as front, client_of(front) as client:
        events = list(ask(client, stream=True, max_tokens=50))
        whole = ask(client, max_tokens=50)
    generator.close()
    assert [event.type for event in events if event.type != "content_block_delta"] == [
        "message_start",
        *["content_block_start", "content_block_stop"] * 4,
        "message_delta",
        "message_stop",
    ]
    deltas = [(e.index, e.delta.type) for e in events if e.type == "content_block_delta"]
    assert list(dict.fromkeys(deltas)) == [
        (0, "thinking_delta"),
        (0, "signature_delta"),
        (1, "text_delta"),
        (2, "input_json_delta"),
        (3, "input_json_delta"),
    ]
    assert events[-2].delta.stop_reason == whole.stop_reason == "tool_use"
    thought, text, weather, time = whole.content
    assert (thought.thinking, thought.signature, text.text) == ("It may rain.", UNSIGNED, "Let me look.")
    assert (weather.id, weather.name, weather.input) == ("c1", "weather", {"city": "Rome"})
    assert (time.id, time.name, time.input) == ("c2", "time", {})
    assert whole.usage.cache_read_input_tokens == events[-2].usage.cache_read_input_tokens == 2
    assert whole.usage.input_tokens == events[-2].usage.input_tokens == len("<user>Hi") - 2


def test_an_answer_of_nothing_has_one_empty_text():
    generator = ScriptedGenerator(())
    with running_front(generator) as front, client_of(front) as client:
        assert [block.text for block in ask(client).content] == [""]
    generator.close()


@pytest.mark.parametrize(
    ("reason", "matched", "limit", "told"),
    [
        (FinishReason.STOP, None, 9, ("end_turn", None)),
        (FinishReason.STOP, "END", 9, ("stop_sequence", "END")),
        (FinishReason.STOP, "<|im_end|>", 9, ("end_turn", None)),
        (FinishReason.LENGTH, None, 1, ("max_tokens", None)),
        (FinishReason.LENGTH, None, 9, ("model_context_window_exceeded", None)),
        (FinishReason.TOOL_CALLS, None, 9, ("tool_use", None)),
    ],
)
def test_why_an_answer_ended_has_the_words_of_the_api(reason, matched, limit, told):
    generator = ScriptedGenerator(({"text": "a"},), reason, matched=matched)
    with running_front(generator) as front, client_of(front) as client:
        message = ask(client, max_tokens=limit, stop_sequences=["END"])
    generator.close()
    assert (message.stop_reason, message.stop_sequence) == told


def test_a_conversation_with_tools_reaches_the_template(served):
    _, generator, client = served
    ask(
        client,
        system=[{"type": "text", "text": "Be ", "cache_control": {"type": "ephemeral"}}, text("brief")],
        tools=[WEATHER],
        messages=[
            {"role": "user", "content": [text("Weather"), text("?")]},
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "It may rain.", "signature": "s"},
                    text("Let me look."),
                    {"type": "tool_use", "id": "c1", "name": "weather", "input": {"city": "Rome"}},
                ],
            },
            {
                "role": "user",
                "content": [
                    {"type": "tool_result", "tool_use_id": "c1", "content": [text("rain")]},
                    {"type": "tool_result", "tool_use_id": "c2"},
                    text("And now?"),
                ],
            },
        ],
    )
    prompt = generator.submitted[0].prompt
    assert prompt.messages == (
        ChatMessage("system", "Be brief"),
        ChatMessage("user", "Weather?"),
        ChatMessage(
            "assistant",
            "Let me look.",
            tool_calls=(ToolCall("weather", '{"city":"Rome"}', "c1"),),
            reasoning_content="It may rain.",
        ),
        ChatMessage("tool", "rain", tool_call_id="c1"),
        ChatMessage("tool", "", tool_call_id="c2"),
        ChatMessage("user", "And now?"),
    )
    assert [json.loads(tool) for tool in prompt.tools] == [
        {
            "type": "function",
            "function": {
                "name": "weather",
                "description": "Tell the weather",
                "parameters": WEATHER["input_schema"],
            },
        }
    ]
    assert not prompt.continue_final_message


def text(words):
    return {"type": "text", "text": words}


def test_a_last_message_of_the_assistant_is_gone_on_with(served):
    _, generator, client = served
    ask(client, messages=[*MESSAGES, {"role": "assistant", "content": "The answer is"}])
    assert generator.submitted[0].prompt.continue_final_message


def test_sampling_thinking_and_form_reach_the_generator(served):
    _, generator, client = served
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    message = ask(
        client,
        stop_sequences=["END"],
        thinking={"type": "enabled", "budget_tokens": 2000},
        output_config={"effort": "high", "format": {"type": "json_schema", "schema": schema}},
        metadata={"user_id": "u"},
        extra_body={
            "temperature": 0.5,
            "top_p": 0.9,
            "top_k": 4,
            "seed": 5,
            "repetition_penalty": 1.1,
            "chat_template_kwargs": {"a": 1},
        },
    )
    request = generator.submitted[0]
    sampling = request.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.max_tokens) == (0.5, 0.9, 4, 3)
    assert (sampling.stop, sampling.seed, sampling.repetition_penalty) == (("END",), 5, 1.1)
    assert isinstance(sampling.structured, JsonSchema)
    assert json.loads(sampling.structured.schema) == schema
    assert json.loads(request.prompt.template_arguments) == {
        "enable_thinking": True,
        "reasoning_effort": "high",
        "a": 1,
    }
    assert message.llorch["ignored"] == ["thinking.budget_tokens"]


def test_thinking_can_be_turned_off(served):
    ask(served[2], thinking={"type": "disabled"})
    assert json.loads(served[1].submitted[0].prompt.template_arguments) == {"enable_thinking": False}


def test_no_tool_is_shown_where_none_is_to_be_called(served):
    ask(served[2], tools=[WEATHER], tool_choice={"type": "none"})
    assert served[1].submitted[0].prompt.tools == ()


class City(pydantic.BaseModel):
    name: str


def test_what_came_back_can_be_sent_again():
    call = ToolCallDelta(0, "c1", "weather", '{"city":"Rome"}')
    pieces = ({"reasoning": "Hm"}, {"text": '{"name": "Rome"}'}, {"tool_calls": (call,)})
    generator = ScriptedGenerator(pieces, FinishReason.TOOL_CALLS)
    asked = {"model": INFO.model_id, "messages": MESSAGES, "max_tokens": 9, "output_format": City}
    with running_front(generator) as front, client_of(front) as client:
        with client.messages.stream(**asked) as stream:
            answers = [ask(client), client.messages.parse(**asked), stream.get_final_message()]
        for answer in answers:
            for content in (answer.content, [block.model_dump() for block in answer.content]):
                ask(client, messages=[*MESSAGES, {"role": "assistant", "content": content}])
    generator.close()
    assert answers[1].parsed_output == answers[2].parsed_output == City(name="Rome")
    said = ChatMessage(
        "assistant",
        '{"name": "Rome"}',
        tool_calls=(ToolCall("weather", '{"city":"Rome"}', "c1"),),
        reasoning_content="Hm",
    )
    assert [request.prompt.messages[1] for request in generator.submitted[3:]] == [said] * 6


@pytest.mark.parametrize(
    ("choice", "read"),
    [
        ({"type": "auto"}, ToolChoice()),
        ({"type": "any"}, ToolChoice(ToolMode.REQUIRED)),
        ({"type": "tool", "name": "weather"}, ToolChoice(ToolMode.REQUIRED, ("weather",))),
        ({"type": "none"}, ToolChoice(ToolMode.NONE)),
    ],
    ids=lambda value: value.get("type") if isinstance(value, dict) else "",
)
def test_the_choice_of_tools_reaches_the_generator(served, choice, read):
    ask(served[2], tools=[WEATHER], tool_choice=choice)
    ask(served[2], tools=[WEATHER], tool_choice={"type": "auto", "disable_parallel_tool_use": True})
    prompt, alone = (request.prompt for request in served[1].submitted)
    assert (prompt.tool_choice, prompt.parallel_tool_calls) == (read, choice["type"] != "tool")
    assert (alone.tool_choice, alone.parallel_tool_calls) == (ToolChoice(), False)


def test_a_call_that_breaks_off_in_a_stream_is_followed_by_its_text():
    pieces = (
        {"tool_calls": (ToolCallDelta(0, "c1", "weather", '{"ci'),)},
        {"text": '<tool_call>{"ci', "tool_calls": (ToolCallDelta(0, broken=True),)},
    )
    generator = ScriptedGenerator(pieces, FinishReason.STOP)
    with running_front(generator) as front, client_of(front) as client:
        whole = ask(client, tools=[WEATHER], max_tokens=9)
        with client.messages.stream(
            model=INFO.model_id, messages=MESSAGES, tools=[WEATHER], max_tokens=9
        ) as stream:
            streamed = stream.get_final_message()
    generator.close()
    assert [block.type for block in whole.content] == ["text"]
    assert whole.content[0].text == streamed.content[-1].text == '<tool_call>{"ci'
    assert streamed.stop_reason == whole.stop_reason == "end_turn"


@pytest.mark.parametrize(
    ("block", "kind"),
    [
        ({"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AA=="}}, "image"),
        ({"type": "document", "source": {"type": "url", "url": "http://a"}}, "document"),
        ({"type": "redacted_thinking", "data": "AA=="}, "redacted_thinking"),
        ({"type": "tool_use", "id": "a", "name": "b", "input": {}}, "tool_use"),
    ],
)
def test_what_the_model_cannot_read_is_refused_by_its_place(served, block, kind):
    with pytest.raises(anthropic.BadRequestError, match=f"found '{kind}', expected one of text") as caught:
        ask(served[2], messages=[*MESSAGES, {"role": "user", "content": [text("a"), block]}])
    (error,) = caught.value.body["error"]["errors"]
    assert error["field"] == "messages[1].content[1].type"
    result = {"type": "tool_result", "tool_use_id": "c", "content": [block]}
    assert list(refusals(served[0], messages=[{"role": "user", "content": [result]}])) == [
        "messages[0].content[0].content[0].type"
    ]


def test_every_bad_field_has_the_name_that_the_api_has(served):
    found = refusals(
        served[0],
        max_tokens=-1,
        temperature=3,
        stop_sequences=[""],
        stop=["a"],
        tool_choice={"type": "tool"},
        tools=[{"type": "web_search_20250305", "name": "web_search"}, {"name": "a"}],
        mcp_servers=[{"url": "http://a"}],
        messages=[{"role": "robot", "content": "a"}],
    )
    assert list(found) == ["stop", "messages[0].role"]
    found = refusals(
        served[0],
        tool_choice={"type": "tool"},
        tools=[{"type": "web_search_20250305", "name": "web_search"}, {"name": "a"}],
        mcp_servers=[{"url": "http://a"}],
        messages=[{"role": "user", "content": [text("a") | {"citations": [{"cited_text": "b"}]}]}],
    )
    assert list(found) == [
        "mcp_servers",
        "messages[0].content[0].citations",
        "tools[0].type",
        "tools[1]",
        "tool_choice",
    ]
    found = refusals(served[0], max_tokens=-2, temperature=3, stop_sequences=[""])
    assert list(found) == ["temperature", "max_tokens", "stop_sequences[0]"]
    assert list(refusals(served[0], messages=[])) == ["messages"]


def test_what_shows_late_has_the_name_that_the_api_has(served):
    front, generator, _ = served
    late = ("sampling.json_schema", "input.chat.tools[0].function.parameters.a", "input.chat.messages[1]")
    generator.fail_submit = InvalidRequestError([FieldViolation(name, "is bad") for name in late])
    assert list(refusals(front, system="a")) == [
        "output_config.format.schema",
        "tools[0].input_schema.a",
        "messages[0]",
    ]


def test_another_model_and_another_version_are_refused(served):
    with pytest.raises(anthropic.NotFoundError, match="claude-nine") as caught:
        ask(served[2], model="claude-nine")
    assert caught.value.body["error"]["type"] == "not_found_error"
    answer = send(
        served[0].port, "POST", "/v1/messages", {"messages": MESSAGES}, {"anthropic-version": "2023-01-01"}
    )
    assert (answer.status, answer.document["type"]) == (400, "error")
    assert "expected 2026-10-21 or 2023-06-01" in answer.document["error"]["message"]


def test_a_token_is_taken_from_either_header():
    with fake_front(token="open sesame") as (front, _):
        with client_of(front, "open sesame") as client:
            assert ask(client).content[0].text == "w0 w1 w2 "
        with anthropic.Anthropic(base_url=front.base, auth_token="open sesame", api_key=None) as client:
            assert ask(client).content[0].text == "w0 w1 w2 "
        both = {"Authorization": "Bearer old", "x-api-key": "open sesame"}
        assert send(front.port, "GET", "/v1/models", headers=both).status == 200
        with client_of(front, "open") as client, pytest.raises(anthropic.AuthenticationError) as caught:
            ask(client)
        assert caught.value.body["error"]["type"] == "authentication_error"


def test_a_failure_inside_a_stream_reaches_the_client():
    with fake_front(free_running=False) as (front, generator), client_of(front) as client:
        stream = ask(client, stream=True)
        generator.step()
        generator.fail_step = NonFiniteLogitsError("the logits are not finite")
        generator.step()
        with pytest.raises(anthropic.APIStatusError, match="not finite"):
            list(stream)


def test_a_full_queue_says_when_to_come_again():
    with fake_front(free_running=False, capacity=0) as (front, _), client_of(front) as client:
        with pytest.raises(anthropic.RateLimitError, match="requests are live") as caught:
            ask(client)
        assert caught.value.response.headers["retry-after"] == "2"
        assert caught.value.body["error"]["type"] == "rate_limit_error"


def test_tokens_are_counted_without_an_answer(served):
    _, generator, client = served
    counted = client.messages.count_tokens(
        model=INFO.model_id, system="Be brief", messages=MESSAGES, tools=[WEATHER]
    )
    assert counted.input_tokens == len("<system>Be brief<user>Hi")
    assert generator.submitted == []
    with pytest.raises(anthropic.BadRequestError, match="image"):
        client.messages.count_tokens(
            model=INFO.model_id, messages=[{"role": "user", "content": [{"type": "image", "source": {}}]}]
        )


def test_a_body_of_claude_code_is_answered_and_says_what_had_no_effect(served):
    _, generator, client = served
    header = {"type": "text", "text": "x-anthropic-billing-header: cc_version=2.1.0; cch=1f3a;"}
    prompt = {"type": "text", "text": "You are an agent.", "cache_control": {"type": "ephemeral"}}
    failed = {"type": "tool_result", "tool_use_id": "c1", "content": "Exit code 1", "is_error": True}
    message = client.beta.messages.create(
        model=INFO.model_id,
        max_tokens=32000,
        betas=["interleaved-thinking-2025-05-14", "context-management-2025-06-27"],
        system=[header, prompt],
        tools=[WEATHER | {"eager_input_streaming": True}],
        metadata={"user_id": "user_1_account__session_2"},
        thinking={"type": "adaptive"},
        output_config={"effort": "medium"},
        context_management={"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        messages=[
            {"role": "user", "content": [text("<system-reminder>a</system-reminder>"), text("Go on")]},
            {
                "role": "assistant",
                "content": [{"type": "tool_use", "id": "c1", "name": "weather", "input": {}}],
            },
            {"role": "user", "content": [failed | {"cache_control": {"type": "ephemeral"}}]},
        ],
        stop_sequences=["w2"],
    )
    assert message.stop_reason == "stop_sequence"
    assert generator.submitted[0].prompt.messages[0] == ChatMessage("system", "You are an agent.")
    assert generator.submitted[0].prompt.messages[2].content is None
    assert message.llorch["ignored"] == [
        "system[0]",
        "messages[2].content[0].is_error",
        "context_management",
    ]


def test_what_is_not_known_is_left_aside_where_the_worker_is_told_to(caplog):
    caplog.set_level(logging.WARNING, logger="llorch_serve.http")
    settings = HttpSettings(unknown=UnknownFields.IGNORE)
    marked = text("Hi") | {"colour": "red"}
    with fake_front(settings=settings) as (front, generator), client_of(front) as client:
        message = ask(
            client,
            messages=[{"role": "user", "content": [marked]}],
            tools=[{"type": "web_search_20250305", "name": "web_search", "max_uses": 5}, WEATHER],
            extra_body={"temprature": 1},
        )
        with pytest.raises(anthropic.BadRequestError, match="found 'image'"):
            ask(client, messages=[{"role": "user", "content": [{"type": "image", "source": {}}]}])
    assert message.llorch["ignored"] == ["temprature", "messages[0].content[0].colour", "tools[0]"]
    (line,) = [record.getMessage() for record in caplog.records]
    assert line.endswith(": messages[].content[].colour, temprature, tools[]")
    assert len(generator.submitted[0].prompt.tools) == 1
    with fake_front() as (front, _):
        assert list(refusals(front, messages=[{"role": "user", "content": [marked]}])) == [
            "messages[0].content[0].colour"
        ]


@pytest.mark.parametrize(
    "body",
    [
        {"messages": [{"role": "user", "content": [[]]}]},
        {"messages": [{"role": "user", "content": [{"type": None}]}]},
        {"messages": [{"role": "user", "content": [{"type": ["text"]}]}]},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "\ud800"}]}]},
        {
            "messages": [
                {"role": "assistant", "content": [{"type": "tool_use", "id": "", "name": "", "input": 1}]}
            ]
        },
        {"messages": [{"role": "user", "content": [{"type": "text", "text": 1}] * 5000}]},
        {"messages": MESSAGES, "system": [1]},
        {"messages": MESSAGES, "tools": [1]},
        {"messages": MESSAGES, "chat_template_kwargs": 1, "thinking": {"type": "enabled"}},
        {"messages": MESSAGES, "output_config": {"format": {"type": "json_schema"}}},
    ],
)
def test_malformed_bodies_are_refused(body):
    with fake_front() as (front, _):
        answer = send(front.port, "POST", "/v1/messages", body)
        # Arguments of calls are judged by the real generator alone.
        assert answer.status == (200 if "tool_use" in json.dumps(body) else 400), answer.body


def test_a_stream_whose_client_leaves_ends_its_request():
    with fake_front(free_running=False) as (front, generator), client_of(front) as client:
        with client.messages.stream(model=INFO.model_id, messages=MESSAGES, max_tokens=50) as stream:
            generator.step()
            assert next(iter(stream)).type == "message_start"
            generator.wait_for(lambda g: g.live_ids)
        generator.wait_for(lambda g: g.aborted)
