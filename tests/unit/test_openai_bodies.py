"""What clients send to OpenAI's routes, and what becomes of it: read as they mean it, or refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from llorch_serve.calls.callers import Caller
from llorch_serve.errors import InvalidRequestError
from llorch_serve.http.fields import read_struct
from llorch_serve.http.messages.schema import MessagesBody
from llorch_serve.http.openai_requests import read_chat, read_completion
from llorch_serve.http.rank_routes import RerankBody
from llorch_serve.http.responses.schema import ResponsesBody
from llorch_serve.requests import ChatMessage, ChatPrompt, GenerationRequest
from llorch_serve.sampling.params import MAX_SEED
from llorch_serve.structured.spec import JsonObject, JsonSchema
from support.fakes.generator import INFO

CALLER = Caller("", "somebody", "an-id")
PUBLISHED = Path(__file__).parent.parent / "data" / "published" / "client_bodies.jsonl"
BODIES = [json.loads(line) for line in PUBLISHED.read_text(encoding="utf-8").splitlines()]
HELLO = {"role": "user", "content": "Hi"}


def asked(ignored: list[str] | None = None, **fields: Any) -> GenerationRequest:
    """Return the request that the body of a chat is."""
    body = {"messages": [HELLO]} | fields
    (request,) = read_chat(json.dumps(body).encode(), INFO, CALLER, ignored).requests
    return request


def chat(**fields: Any) -> ChatPrompt:
    """Return the prompt of a chat's body."""
    prompt = asked(**fields).prompt
    assert isinstance(prompt, ChatPrompt)
    return prompt


def refused(**fields: Any) -> dict[str, str]:
    """Return what is said of each field of a chat's body that is refused."""
    with pytest.raises(InvalidRequestError) as caught:
        asked(**fields)
    return {violation.field: violation.description for violation in caught.value.violations}


@pytest.mark.parametrize("case", BODIES, ids=lambda case: case["from"])
def test_bodies_of_real_clients_are_read(case: dict[str, Any]) -> None:
    plan = read_chat(json.dumps(case["body"]).encode(), INFO, CALLER)
    (request,) = plan.requests
    assert isinstance(request.prompt, ChatPrompt)
    sent = case["body"]["messages"]
    assert [message.role for message in request.prompt.messages] == [message["role"] for message in sent]
    assert not request.sampling.violations(vocab_size=INFO.vocab_size)


# Messages.


def test_what_a_message_says_of_itself_has_no_effect() -> None:
    plain = chat()
    for field in (
        {"id": 7},
        {"index": 0},
        {"timestamp": 1.5},
        {"opts": {"visible": False}},
        {"metadata": {"trimmed_by": "a filter"}},
        {"parsed": {"a": 1}},
    ):
        assert chat(messages=[HELLO | field]) == plain


@pytest.mark.parametrize("empty", [None, "", [], {}])
@pytest.mark.parametrize(
    "name", ["refusal", "audio", "annotations", "provider_specific_fields", "never_seen"]
)
def test_what_is_null_or_empty_in_a_message_asks_for_nothing(name: str, empty: object) -> None:
    assert chat(messages=[HELLO | {name: empty}]) == chat()
    call = {"id": "c", "function": {"name": "f", "arguments": "{}"}}
    plain = chat(messages=[{"role": "assistant", "tool_calls": [call]}])
    assert chat(messages=[{"role": "assistant", "tool_calls": [call | {name: empty}]}]) == plain
    function = call["function"] | {name: empty}
    assert chat(messages=[{"role": "assistant", "tool_calls": [call | {"function": function}]}]) == plain
    part = {"type": "text", "text": "Hi"}
    assert chat(messages=[{"role": "user", "content": [part | {name: empty}]}]) == chat()


@pytest.mark.parametrize("name", ["name", "tool_call_id", "reasoning_content", "reasoning"])
def test_a_text_that_is_empty_is_none(name: str) -> None:
    assert chat(messages=[HELLO | {name: ""}]) == chat()


@pytest.mark.parametrize("empty", [{"refusal": None}, {"a": {"b": [], "c": ""}}, [None], [[{}]]])
def test_what_holds_nothing_asks_for_nothing(empty: object) -> None:
    assert chat(messages=[HELLO | {"provider_specific_fields": empty}]) == chat()


@pytest.mark.parametrize("held", [{"refusal": "no"}, {"a": {"b": [0]}}, [False], "[" * 200 + "]" * 200])
def test_what_holds_something_is_named(held: object) -> None:
    value = json.loads(held) if isinstance(held, str) else held
    field = "messages[0].provider_specific_fields"
    assert list(refused(messages=[HELLO | {"provider_specific_fields": value}])) == [field]


@pytest.mark.parametrize(
    ("message", "field"),
    [
        ({"refusal": "I cannot"}, "messages[0].refusal"),
        ({"audio": {"id": "a"}}, "messages[0].audio"),
        ({"images": ["AA=="]}, "messages[0].images"),
        ({"reasoning_details": [{"type": "reasoning.encrypted"}]}, "messages[0].reasoning_details"),
        ({"content": [{"type": "text", "text": "a", "image": "AA=="}]}, "messages[0].content[0].image"),
        ({"content": [{"type": "text", "text": "a", "file": {"file_id": "f"}}]}, "messages[0].content[0]"),
        (
            {"tool_calls": [{"function": {"name": "f", "arguments": "{}", "code": "x"}}]},
            "messages[0].tool_calls[0].function.code",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_would_change_the_answer_and_is_not_understood_is_named(
    message: dict[str, Any], field: str
) -> None:
    assert list(refused(messages=[HELLO | message])) == [field]


def test_an_answer_that_says_nothing_is_an_empty_one() -> None:
    for silent in ({"content": None}, {"content": None, "tool_calls": []}, {}):
        assert chat(messages=[{"role": "assistant"} | silent]).messages == (ChatMessage("assistant", ""),)


def test_reasoning_is_an_older_name_of_reasoning_content() -> None:
    message = {"role": "assistant", "content": "Hello"}
    (read,) = chat(messages=[message | {"reasoning": "a greeting"}]).messages
    assert read == ChatMessage("assistant", "Hello", reasoning_content="a greeting")
    both = message | {"reasoning": "a greeting", "reasoning_content": "a greeting"}
    assert chat(messages=[both]).messages == (read,)
    different = message | {"reasoning": "a", "reasoning_content": "b"}
    assert "reasoning_content" in refused(messages=[different])["messages[0].reasoning"]


def test_a_hint_for_caches_changes_no_text() -> None:
    part = {"type": "text", "text": "Hi", "cache_control": {"type": "ephemeral"}}
    assert chat(messages=[{"role": "user", "content": [part]}]) == chat()


# Unknown fields.


@pytest.mark.parametrize(
    ("field", "instead"),
    [
        ({"think": False}, "chat_template_kwargs"),
        ({"enable_thinking": False}, "chat_template_kwargs"),
        ({"num_ctx": 4096}, "--max-context"),
        ({"repeat_penalty": 1.1}, "repetition_penalty"),
        ({"chat_id": "a"}, "--unknown-fields ignore"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_an_unknown_field_is_refused_with_what_to_do(field: dict[str, Any], instead: str) -> None:
    (name,) = field
    description = refused(**field)[name]
    assert description.startswith("unknown field")
    assert instead in description


@pytest.mark.parametrize(
    ("body", "name", "instead"),
    [
        ({"input": "Hi", "max_tokens": 5}, "max_tokens", "send max_output_tokens"),
        ({"input": "Hi", "response_format": {"type": "json_object"}}, "response_format", "send text.format"),
        ({"messages": [HELLO], "num_predict": 5}, "num_predict", "send max_tokens"),
        ({"messages": [HELLO], "stop": ["a"]}, "stop", "send stop_sequences"),
        ({"messages": [HELLO], "guided_json": {}}, "guided_json", "send output_config.format"),
        ({"query": "a", "documents": [], "guided_json": {}}, "guided_json", ""),
        ({"query": "a", "documents": [], "think": False}, "think", ""),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_to_send_instead_is_a_field_of_the_same_route(
    body: dict[str, Any], name: str, instead: str
) -> None:
    kinds = {"input": ResponsesBody, "messages": MessagesBody, "query": RerankBody}
    kind: type[msgspec.Struct] = kinds[next(iter(body))]
    with pytest.raises(InvalidRequestError) as caught:
        read_struct(json.dumps(body).encode(), kind)
    (found,) = [violation for violation in caught.value.violations if violation.field == name]
    assert found.description.startswith("unknown field")
    assert instead in found.description
    assert ("send " in found.description) == bool(instead)


def test_a_worker_may_ignore_what_it_does_not_know() -> None:
    ignored: list[str] = []
    request = asked(
        ignored,
        messages=[HELLO | {"images": ["AA=="]}],
        think=False,
        options={"num_ctx": 4096},
        keep_alive=None,
        stream=True,
        stream_options={"include_usage": True, "chunk": 3},
    )
    assert request.prompt == chat()
    assert sorted(ignored) == ["messages[0].images", "options", "stream_options.chunk", "think"]


def test_what_is_left_aside_of_many_messages_is_told_once() -> None:
    ignored: list[str] = []
    asked(ignored, messages=[HELLO | {"images": ["AA=="]}] * 100)
    assert ignored == ["messages[].images"]


def test_a_flood_of_what_is_left_aside_is_counted() -> None:
    ignored: list[str] = []
    asked(ignored, **{f"field{i}": 1 for i in range(100)})
    assert ignored[:2] == ["field0", "field1"]
    assert ignored[31:] == ["and 69 more"]


def test_what_is_known_and_cannot_be_honoured_is_never_ignored() -> None:
    with pytest.raises(InvalidRequestError) as caught:
        asked([], modalities=["audio"], temperature="hot")
    assert [violation.field for violation in caught.value.violations] == ["temperature"]
    with pytest.raises(InvalidRequestError) as caught:
        asked([], modalities=["audio"])
    assert [violation.field for violation in caught.value.violations] == ["modalities"]


def test_a_field_that_is_null_is_not_there() -> None:
    assert asked(keep_alive=None, num_ctx=None).prompt == chat()


# Numbers.


def test_integral_floats_are_integers() -> None:
    sampling = asked(max_tokens=16.0, seed=42.0, top_k=5.0, stop_token_ids=[1.0, 2]).sampling
    assert (sampling.max_tokens, sampling.seed, sampling.top_k) == (16, 42, 5)
    assert sampling.stop_token_ids == (1, 2)
    assert "`int`" in refused(stop_token_ids=[1.5])["stop_token_ids[0]"]
    for bad in (16.5, "16", True, 1e300):
        assert "max_tokens" in refused(max_tokens=bad)


@pytest.mark.parametrize(
    ("sent", "name", "meant"),
    [
        ({"top_p": 0}, "top_k", 1),
        ({"top_p": 0.0, "top_k": 40}, "top_p", None),
        ({"top_k": -1}, "top_k", 0),
        ({"max_tokens": -1}, "max_tokens", None),
        ({"max_completion_tokens": -1}, "max_tokens", None),
        ({"seed": -1}, "seed", None),
        ({"seed": -2}, "seed", MAX_SEED - 1),
        ({"seed": -(2**63)}, "seed", 0),
    ],
    ids=str,
)
def test_numbers_mean_what_their_senders_mean(sent: dict[str, Any], name: str, meant: object) -> None:
    assert getattr(asked(**sent).sampling, name) == meant


def test_a_completion_without_a_limit_is_not_one_of_16_tokens() -> None:
    def limit(**fields: Any) -> int | None:
        body = json.dumps({"prompt": "Hi"} | fields).encode()
        return read_completion(body, INFO, CALLER).requests[0].sampling.max_tokens

    assert (limit(), limit(max_tokens=-1), limit(max_tokens=3.0)) == (16, None, 3)


def test_other_numbers_out_of_range_are_left_for_the_worker_to_refuse() -> None:
    for field in ({"top_p": -0.5}, {"top_k": -2}, {"max_tokens": -2}):
        (bad,) = asked(**field).sampling.violations(vocab_size=INFO.vocab_size)
        assert bad.field == f"sampling.{next(iter(field))}"
    assert "seed" in refused(seed=-(2**63) - 1)


# Forms and templates.

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}


@pytest.mark.parametrize(
    "shape",
    [
        {"type": "json_object", "schema": SCHEMA},
        {"type": "json_schema", "schema": SCHEMA},
        {"type": "json_schema", "schema": SCHEMA, "name": "a", "strict": True, "description": "b"},
        {"type": "json_schema", "json_schema": {"schema": SCHEMA}},
        {"type": "json_schema", "json_schema": {"schema": SCHEMA, "name": "a", "strict": None}},
        {"type": "json_schema", "json_schema": {"schema": SCHEMA}, "schema": None},
    ],
    ids=str,
)
def test_a_schema_may_come_in_the_shapes_that_clients_send(shape: dict[str, Any]) -> None:
    form = asked(response_format=shape).sampling.structured
    assert isinstance(form, JsonSchema)
    assert json.loads(form.schema) == SCHEMA


def test_what_is_wrong_with_a_schema_is_named_where_it_came() -> None:
    for shape, name in (
        ({"type": "json_schema", "schema": SCHEMA}, "response_format.schema"),
        ({"type": "json_schema", "json_schema": {"schema": SCHEMA}}, "response_format.json_schema.schema"),
    ):
        body = {"messages": [HELLO], "response_format": shape}
        plan = read_chat(json.dumps(body).encode(), INFO, CALLER)
        assert (
            plan.answer.names("sampling.json_schema.properties.a.pattern") == f"{name}.properties.a.pattern"
        )


def test_an_object_without_a_schema_is_any_object() -> None:
    for shape in ({"type": "json_object"}, {"type": "json_object", "schema": {}}):
        assert asked(response_format=shape).sampling.structured == JsonObject()
    assert asked(response_format={"type": "text"}).sampling.structured is None


@pytest.mark.parametrize(
    "shape",
    [
        {"type": "json_schema"},
        {"type": "json_schema", "json_schema": SCHEMA},
        {"type": "json_schema", "json_schema": {"schema": SCHEMA}, "schema": {}},
        {"type": "text", "schema": SCHEMA},
        {"type": "json_object", "json_schema": {"schema": SCHEMA}},
        {"type": "regex", "pattern": "a"},
    ],
    ids=str,
)
def test_a_shape_that_says_nothing_clear_is_shown_the_right_one(shape: dict[str, Any]) -> None:
    shown = '{"type": "json_schema", "json_schema": {"name": "NAME", "schema": {...}}}'
    assert all(shown in description for description in refused(response_format=shape).values())


def test_the_last_message_is_gone_on_with() -> None:
    messages = [HELLO, {"role": "assistant", "content": "Hel"}]
    prompt = chat(messages=messages, continue_final_message=True, add_generation_prompt=False)
    assert prompt.continue_final_message
    assert not json.loads(prompt.template_arguments or "{}").get("add_generation_prompt")
    assert chat(messages=messages, continue_final_message=True).continue_final_message
    prefixed = [HELLO, {"role": "assistant", "content": "Hel", "prefix": True}]
    assert chat(messages=prefixed) == chat(messages=messages, continue_final_message=True)
    assert "messages[0].prefix" in refused(messages=[HELLO | {"prefix": True}, HELLO])


def test_the_opening_of_an_answer_can_be_left_out() -> None:
    prompt = chat(add_generation_prompt=False, chat_template_kwargs={"a": [1, 2.50]})
    assert json.loads(prompt.template_arguments or "") == {"a": [1, 2.5], "add_generation_prompt": False}
    assert chat(add_generation_prompt=True) == chat()
    both = refused(add_generation_prompt=False, chat_template_kwargs={"add_generation_prompt": True})
    assert "chat_template_kwargs" in both["add_generation_prompt"]
    assert "add_generation_prompt" in refused(add_generation_prompt=True, continue_final_message=True)
    prefixed = [HELLO, {"role": "assistant", "content": "Hel", "prefix": True}]
    assert "add_generation_prompt" in refused(add_generation_prompt=True, messages=prefixed)
