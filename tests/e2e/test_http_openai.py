"""OpenAI's routes through OpenAI's own client, over a real socket, around a fake generator."""

from __future__ import annotations

import json
from dataclasses import replace

import openai
import pydantic
import pytest

from llorch_serve.engine.sequence import FinishReason
from llorch_serve.errors import NonFiniteLogitsError, ResourceError
from llorch_serve.http.fields import MAX_LISTED
from llorch_serve.requests import (
    ChatMessage,
    ChatPrompt,
    TextPrompt,
    TokenPrompt,
    ToolCall,
    ToolCallDelta,
    ToolChoice,
    ToolMode,
)
from support.fakes.generator import INFO, PATIENCE_S, FakeGenerator
from support.harness.http import fake_front, running_front, send

pytestmark = pytest.mark.usefixtures("way_at_leisure")

MESSAGES = [{"role": "user", "content": "Hi"}]


@pytest.fixture
def served():
    """A front, its generator, and OpenAI's client of it."""
    with fake_front() as (front, generator), client_of(front) as client:
        yield front, generator, client


def client_of(front, key="none"):
    return openai.OpenAI(base_url=f"{front.base}/v1", api_key=key, max_retries=0, timeout=PATIENCE_S)


def test_a_chat_is_answered_whole(served):
    _, generator, client = served
    answer = client.chat.completions.create(
        model=INFO.model_id, messages=[{"role": "system", "content": "Be brief"}, *MESSAGES], max_tokens=3
    )
    (choice,) = answer.choices
    assert (choice.message.role, choice.message.content) == ("assistant", "w0 w1 w2 ")
    assert choice.finish_reason == "length"
    assert (answer.object, answer.model) == ("chat.completion", INFO.model_id)
    prompt = len("<system>Be brief<user>Hi")
    usage = answer.usage
    assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (prompt, 3, prompt + 3)
    assert generator.submitted[0].prompt == ChatPrompt(
        (ChatMessage("system", "Be brief"), ChatMessage("user", "Hi"))
    )


def test_a_chat_streams_what_the_whole_answer_says(served):
    _, generator, client = served
    stream = client.chat.completions.create(
        model=INFO.model_id,
        messages=MESSAGES,
        max_tokens=20,
        stream=True,
        stream_options={"include_usage": True},
    )
    *chunks, last = stream
    assert {chunk.id for chunk in chunks} == {last.id} == {generator.submitted[0].request_id}
    deltas = [chunk.choices[0].delta for chunk in chunks]
    assert deltas[0].role == "assistant"
    assert "".join(delta.content or "" for delta in deltas) == "".join(f"w{i} " for i in range(20))
    assert [chunk.choices[0].finish_reason for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert chunks[-1].choices[0].finish_reason == "length"
    assert (last.choices, last.usage.completion_tokens) == ([], 20)


def test_a_stream_tells_no_usage_unless_asked(served):
    stream = served[2].chat.completions.create(
        model=INFO.model_id, messages=MESSAGES, max_tokens=2, stream=True
    )
    assert all(chunk.choices and chunk.usage is None for chunk in stream)


def test_tokens_stream_one_by_one():
    with fake_front(free_running=False) as (front, generator), client_of(front) as client:
        stream = client.completions.create(model=INFO.model_id, prompt="Hi", max_tokens=3, stream=True)
        texts = []
        for _ in range(3):
            generator.step()
            texts.append(next(stream).choices[0].text)
        assert texts == ["w0 ", "w1 ", "w2 "]
        assert list(stream) == []


def test_a_text_is_completed(served):
    answer = served[2].completions.create(model=INFO.model_id, prompt="Hi", stop=["w2"], seed=5)
    (choice,) = answer.choices
    assert (choice.text, choice.finish_reason) == ("w0 w1 ", "stop")
    assert choice.llorch["seed"] == 5
    assert choice.llorch["stop_matched"] == "w2"
    assert answer.object == "text_completion"


def test_a_completion_has_16_tokens_unless_told(served):
    answer = served[2].completions.create(model=INFO.model_id, prompt="Hi")
    assert answer.usage.completion_tokens == 16


def test_several_prompts_of_one_body_run_at_once(served):
    _, generator, client = served
    answer = client.completions.create(model=INFO.model_id, prompt=["a", "bc"], max_tokens=2)
    assert [(c.index, c.text) for c in answer.choices] == [(0, "w0 w1 "), (1, "w0 w1 ")]
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (3, 4)
    assert [r.prompt for r in generator.submitted] == [TextPrompt("a"), TextPrompt("bc")]
    stream = client.completions.create(model=INFO.model_id, prompt=[[1, 2], [3]], max_tokens=2, stream=True)
    texts = ["", ""]
    for chunk in stream:
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert texts == ["w0 w1 ", "w0 w1 "]
    assert [r.prompt for r in generator.submitted[2:]] == [TokenPrompt((1, 2)), TokenPrompt((3,))]


def test_sampling_reaches_the_generator(served):
    _, generator, client = served
    client.chat.completions.create(
        model=INFO.model_id,
        messages=[
            {"role": "user", "content": [{"type": "text", "text": "H"}, {"type": "text", "text": "i"}]}
        ],
        temperature=0.5,
        top_p=0.25,
        seed=7,
        stop="x",
        max_completion_tokens=1,
        user="someone",
        metadata={"a": "b"},
        store=True,
        extra_body={"top_k": 3, "min_p": 0.125, "repetition_penalty": 1.5, "stop_token_ids": [9]},
    )
    (request,) = generator.submitted
    assert request.prompt == ChatPrompt((ChatMessage("user", "Hi"),))
    sampling = request.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (0.5, 0.25, 3, 0.125)
    assert (sampling.repetition_penalty, sampling.seed, sampling.max_tokens) == (1.5, 7, 1)
    assert (sampling.stop, sampling.stop_token_ids) == (("x",), (9,))


def test_all_bad_fields_are_named_as_they_were_sent(served):
    with pytest.raises(openai.BadRequestError) as caught:
        served[2].chat.completions.create(
            model=INFO.model_id,
            messages=MESSAGES,
            temperature=3,
            top_p=-0.5,
            max_completion_tokens=-2,
            stop=[""],
        )
    error = caught.value
    fields = [item["field"] for item in error.body["errors"]]
    assert fields == ["temperature", "top_p", "max_completion_tokens", "stop[0]"]
    assert (error.type, error.param, error.code) == ("invalid_request_error", "temperature", "invalid_value")
    assert "found 3.0, expected a number from 0 to 2" in error.message


@pytest.mark.parametrize(
    "field",
    [
        {"reasoning_effort": "low"},
        {"modalities": ["audio"]},
        {"web_search_options": {}},
        {"prediction": {"type": "content", "content": "a"}},
        {"verbosity": "low"},
    ],
    ids=lambda field: next(iter(field)),
)
def test_what_cannot_be_honoured_is_refused_by_name(served, field):
    (name,) = field
    with pytest.raises(openai.BadRequestError, match="accepted: ") as caught:
        served[2].chat.completions.create(model=INFO.model_id, messages=MESSAGES, extra_body=field)
    assert [item["field"] for item in caught.value.body["errors"]] == [name]


def test_what_openai_does_not_know_is_refused_by_name(served):
    with pytest.raises(openai.BadRequestError, match="unknown field") as caught:
        served[2].chat.completions.create(
            model=INFO.model_id, messages=MESSAGES, extra_body={"temprature": 1}
        )
    assert caught.value.param == "temprature"


def test_pictures_are_refused_by_their_place(served):
    picture = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}
    with pytest.raises(openai.BadRequestError) as caught:
        served[2].chat.completions.create(
            model=INFO.model_id, messages=[{"role": "user", "content": [picture]}]
        )
    assert caught.value.param == "messages[0].content[0]"


@pytest.mark.parametrize(
    "messages",
    [
        [{"role": "user", "content": [{"type": "sound"}] * 2000}],
        [{"role": "user", "content": "a", "refusal": "no"}] * 2000,
    ],
    ids=("parts", "messages"),
)
def test_a_flood_of_bad_messages_is_not_listed_whole(served, messages):
    with pytest.raises(openai.BadRequestError) as caught:
        served[2].chat.completions.create(model=INFO.model_id, messages=messages)
    *listed, more = caught.value.body["errors"]
    assert len(listed) == MAX_LISTED
    assert more["field"] == "body"
    assert "more fields are bad" in more["message"]


@pytest.mark.parametrize(("n", "best_of"), [(3, 1), (1, 0), (1, -5)])
@pytest.mark.parametrize("stream", [False, True])
def test_fewer_best_answers_than_are_asked_for_are_refused(served, n, best_of, stream):
    with pytest.raises(openai.BadRequestError) as caught:
        served[2].completions.create(
            model=INFO.model_id, prompt="Hi", n=n, best_of=best_of, stream=stream, max_tokens=1
        )
    assert caught.value.param == "best_of"


def test_another_model_is_not_found(served):
    with pytest.raises(openai.NotFoundError, match=f"serves '{INFO.model_id}'") as caught:
        served[2].completions.create(model="gpt-4", prompt="Hi")
    assert caught.value.code == "model_not_found"


def test_the_model_is_listed(served):
    (model,) = served[2].models.list().data
    assert (model.id, model.object, model.owned_by) == (INFO.model_id, "model", "llorch")
    assert model.llorch["context_length"] == INFO.context_length
    assert served[2].models.retrieve(INFO.model_id).id == INFO.model_id
    with pytest.raises(openai.NotFoundError):
        served[2].models.retrieve("other")


def test_a_full_queue_says_when_to_come_again():
    with fake_front(free_running=False, capacity=0) as (front, _), client_of(front) as client:
        with pytest.raises(openai.RateLimitError, match="requests are live") as caught:
            client.completions.create(model=INFO.model_id, prompt="Hi")
        assert caught.value.response.headers["retry-after"] == "2"


def test_a_full_memory_says_when_to_come_again():
    with fake_front() as (front, generator), client_of(front) as client:
        generator.fail_submit = ResourceError("no memory for one more sequence; choose fewer --slots")
        with pytest.raises(openai.RateLimitError, match="memory is full") as caught:
            client.completions.create(model=INFO.model_id, prompt="Hi")
        assert caught.value.code == "out_of_memory"
        assert caught.value.response.headers["retry-after"] == "1"
        assert "--slots" not in str(caught.value)


def test_a_failure_inside_a_stream_reaches_the_client():
    with fake_front(free_running=False) as (front, generator), client_of(front) as client:
        stream = client.completions.create(model=INFO.model_id, prompt="Hi", stream=True)
        generator.step()
        assert next(stream).choices[0].text == "w0 "
        generator.fail_step = NonFiniteLogitsError("the logits are not finite")
        generator.step()
        with pytest.raises(openai.APIError, match="not finite"):
            next(stream)


def test_a_bug_is_told_by_an_error_id_alone(served):
    _, generator, client = served
    generator.fail_submit = RuntimeError("a secret of the inside")
    with pytest.raises(openai.InternalServerError, match=r"error id [0-9a-f]{8}") as caught:
        client.completions.create(model=INFO.model_id, prompt="Hi")
    assert "secret" not in str(caught.value)
    generator.fail_submit = None
    assert client.completions.create(model=INFO.model_id, prompt="Hi", max_tokens=1).choices[0].text == "w0 "


def test_a_token_is_asked_for():
    with fake_front(token="open sesame") as (front, _):
        for key in ("open sesame", "another"):
            with client_of(front, key) as client:
                assert client.models.list().data
        with client_of(front, "open") as client, pytest.raises(openai.AuthenticationError):
            client.models.list()
        for path in ("/health", "/", "/page/page.js"):
            assert send(front.port, "GET", path).status == 200
        for method, path in (("GET", "/metrics"), ("GET", "/load"), ("POST", "/cancel"), ("GET", "/other")):
            answer = send(front.port, method, path)
            assert (answer.status, answer.headers["www-authenticate"]) == (401, "Bearer")


TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}


def test_tools_and_their_messages_reach_the_template(served):
    _, generator, client = served
    call = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"a": 1}'}}
    messages = [
        *MESSAGES,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "rain"},
    ]
    extra = {"chat_template_kwargs": {"enable_thinking": False}}
    client.chat.completions.create(
        model=INFO.model_id, messages=messages, tools=[TOOL], max_tokens=1, extra_body=extra
    )
    prompt = generator.submitted[0].prompt
    assert [json.loads(tool) for tool in prompt.tools] == [TOOL]
    assert json.loads(prompt.template_arguments) == {"enable_thinking": False}
    assert prompt.messages[1].tool_calls == (ToolCall("weather", '{"a": 1}', "c1"),)
    assert prompt.messages[1].content is None
    assert prompt.messages[2].tool_call_id == "c1"
    client.chat.completions.create(
        model=INFO.model_id, messages=MESSAGES, tools=[TOOL], tool_choice="none", max_tokens=1
    )
    assert generator.submitted[1].prompt.tools == ()


NAMED = {"type": "function", "function": {"name": "weather"}}
CHOICES = [
    (None, ToolChoice()),
    ("auto", ToolChoice()),
    ("none", ToolChoice(ToolMode.NONE)),
    ("required", ToolChoice(ToolMode.REQUIRED)),
    (NAMED, ToolChoice(ToolMode.REQUIRED, ("weather",))),
    (
        {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [NAMED]}},
        ToolChoice(ToolMode.AUTO, ("weather",)),
    ),
    (
        {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [NAMED]}},
        ToolChoice(ToolMode.REQUIRED, ("weather",)),
    ),
]


@pytest.mark.parametrize(("sent", "read"), CHOICES)
@pytest.mark.parametrize("parallel", [None, True, False])
def test_a_choice_of_tools_reaches_the_worker(served, sent, read, parallel):
    front, generator, _ = served
    body = {"messages": MESSAGES, "tools": [TOOL], "max_tokens": 1}
    body |= {"tool_choice": sent, "parallel_tool_calls": parallel}
    assert send(front.port, "POST", "/v1/chat/completions", body).status == 200
    prompt = generator.submitted[0].prompt
    several = parallel is not False and sent != NAMED  # a function that is named is called once
    assert (prompt.tool_choice, prompt.parallel_tool_calls) == (read, several)


@pytest.mark.parametrize(
    "choice",
    [
        "any",
        3,
        [],
        {"type": "function", "name": "weather"},
        {"type": "function", "function": {}},
        {"type": "custom", "custom": {"name": "weather"}},
        {"type": "allowed_tools", "allowed_tools": {"mode": "none", "tools": [NAMED]}},
        {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": []}},
    ],
)
def test_a_choice_of_tools_of_another_shape_is_refused(served, choice):
    body = {"messages": MESSAGES, "tools": [TOOL], "tool_choice": choice}
    answer = send(served[0].port, "POST", "/v1/chat/completions", body)
    error = answer.document["error"]
    assert (answer.status, error["param"]) == (400, "tool_choice")
    assert "expected" in error["message"]


class JsonGenerator(FakeGenerator):
    """Answers with an object."""

    def _advance(self, request_id, live):
        update = super()._advance(request_id, live)
        return replace(update, text='{"a": 1}' if live.produced == 1 else "")


class Parsed(pydantic.BaseModel):
    a: int


@pytest.mark.filterwarnings("ignore:Pydantic serializer warnings")  # of OpenAI's client about itself
def test_a_parsed_answer_is_sent_back_as_it_came():
    generator = JsonGenerator()
    with running_front(generator) as front, client_of(front) as client:
        messages = list(MESSAGES)
        for _ in range(2):
            answer = client.chat.completions.parse(
                model=INFO.model_id, messages=messages, response_format=Parsed, max_tokens=1000, stop=["w2"]
            )
            message = answer.choices[0].message
            assert message.parsed == Parsed(a=1)
            messages += [message, {"role": "user", "content": "again"}]
    generator.close()
    assert generator.submitted[1].prompt.messages[1] == ChatMessage("assistant", '{"a": 1}')


class CallingGenerator(FakeGenerator):
    """Answers with thoughts and the call of a tool, in parts."""

    def _advance(self, request_id, live):
        update = super()._advance(request_id, live)
        parts = {
            1: {"reasoning": "It may "},
            2: {"reasoning": "rain."},
            3: {"tool_calls": (ToolCallDelta(0, "c1", "weather", ""),)},
            4: {"tool_calls": (ToolCallDelta(0, arguments='{"a":'),)},
            5: {"tool_calls": (ToolCallDelta(0, arguments=" 1}"), ToolCallDelta(1, "c2", "time", "{}"))},
        }
        completion = update.completion
        if completion is not None:
            completion = replace(completion, reason=FinishReason.TOOL_CALLS)
        return replace(update, text="", completion=completion, **parts[live.produced])


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_calls_and_thoughts_come_back(stream):
    generator = CallingGenerator()
    with running_front(generator) as front, client_of(front) as client:
        answer = client.chat.completions.create(
            model=INFO.model_id, messages=MESSAGES, tools=[TOOL], max_tokens=5, stream=stream
        )
        calls, thoughts, reason = {}, "", None
        for event in answer if stream else [answer]:
            choice = event.choices[0]
            part = choice.delta if stream else choice.message
            assert not part.content
            thoughts += getattr(part, "reasoning_content", None) or ""
            reason = choice.finish_reason or reason
            for place, call in enumerate(part.tool_calls or ()):
                found = calls.setdefault(call.index if stream else place, ["", "", ""])
                for at, text in enumerate((call.id, call.function.name, call.function.arguments)):
                    found[at] += text or ""
    generator.close()
    assert calls == {0: ["c1", "weather", '{"a": 1}'], 1: ["c2", "time", "{}"]}
    assert (thoughts, reason) == ("It may rain.", "tool_calls")
