"""Protobuf <-> plain types: nothing is lost, nothing is invented, every bad field is named."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from llorch_serve.engine.load import WorkerState
from llorch_serve.engine.sequence import FinishReason
from llorch_serve.errors import InvalidRequestError
from llorch_serve.requests import (
    AnswerOptions,
    ChatMessage,
    ChatPrompt,
    Completion,
    GenerationRequest,
    GenerationUpdate,
    JoinedUpdates,
    TextPrompt,
    Timings,
    TokenPrompt,
    ToolCall,
    ToolCallDelta,
    ToolChoice,
    ToolMode,
    whole_calls,
)
from llorch_serve.rpc import convert, convert_answers, convert_info, convert_prompt
from llorch_serve.rpc import worker_pb2 as pb
from llorch_serve.rpc.convert_fields import MAX_ITEMS, set_field
from llorch_serve.sampling.logprobs import TokenLogprob, TokenLogprobs
from llorch_serve.sampling.params import SamplingParams
from llorch_serve.structured.spec import MAX_CHOICES, Choice, Grammar, JsonObject, JsonSchema, Regex
from support.fakes.generator import INFO, LOAD

PROMPTS = [
    TextPrompt("Grüße, 世界 🎉"),
    TextPrompt(""),
    TokenPrompt((0, 1, 2**32 - 1)),
    TokenPrompt(()),
    ChatPrompt((ChatMessage("system", ""), ChatMessage("user", "Hi"))),
    ChatPrompt(
        (
            ChatMessage("user", ("a", ""), name="bob"),
            ChatMessage(
                "assistant",
                None,
                tool_calls=(ToolCall("f", '{"a": 1}', "call00001"), ToolCall("g", "")),
                reasoning_content="",
            ),
            ChatMessage("tool", "", tool_call_id="call00001"),
        ),
        tools=('{"name": "f"}', "{}"),
        documents=('{"text": "d"}',),
        template_name="tool_use",
        template_arguments='{"enable_thinking": false}',
        continue_final_message=True,
        allow_control_tokens=True,
        tool_choice=ToolChoice(ToolMode.REQUIRED, ("f", "é")),
        parallel_tool_calls=False,
    ),
    ChatPrompt((ChatMessage("user", "Hi"),), tool_choice=ToolChoice(ToolMode.NONE)),
    ChatPrompt((ChatMessage("user", "Hi"),), tool_choice=ToolChoice(ToolMode.AUTO, ("f",))),
]
SAMPLINGS = [
    SamplingParams(),
    SamplingParams(
        temperature=0.0, top_k=0, top_p=0.0, min_p=0.0, repetition_penalty=0.0, seed=0, max_tokens=0
    ),
    SamplingParams(
        typical_p=0.0,
        repeat_last_n=0,
        presence_penalty=0.0,
        frequency_penalty=0.0,
        logit_bias={0: 0.0},
        logprobs=0,
    ),
    SamplingParams(
        temperature=0.7,
        top_k=40,
        top_p=0.9,
        min_p=0.05,
        repetition_penalty=1.1,
        seed=2**63 - 1,
        max_tokens=17,
        min_tokens=3,
        stop=("\n\n", "END"),
        stop_token_ids=(2, 32000),
        ignore_eos=True,
        typical_p=0.95,
        repeat_last_n=-1,
        presence_penalty=-2.0,
        frequency_penalty=1.5,
        logit_bias={2**32 - 1: -100.0, 7: 0.5},
        logprobs=20,
        keep_special_tokens=True,
    ),
    SamplingParams(structured=JsonSchema('{"type": "object"}')),
    SamplingParams(structured=JsonObject()),
    SamplingParams(structured=Regex("[äß]+")),
    SamplingParams(structured=Choice(("yes", "no", ""))),
    SamplingParams(structured=Choice(())),
    SamplingParams(structured=Grammar("start: /a/")),
]
LOGPROBS = (
    TokenLogprobs(TokenLogprob(5, -0.25, "a", b"a"), (TokenLogprob(6, -0.125, "\ufffd", b"\xc3"),)),
    TokenLogprobs(TokenLogprob(6, -9999.0, "", b"")),
)


def over_the_wire(message):
    return type(message).FromString(message.SerializeToString())


@pytest.mark.parametrize("prompt", PROMPTS)
@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_a_request_survives_the_wire(prompt, sampling):
    answers = AnswerOptions(n=3, best_of=16, prompt_logprobs=0, echo=True)
    request = GenerationRequest(
        "id-1", prompt, sampling, "tenant-7", priority=-3, fingerprint="f" * 64, answers=answers
    )
    assert (
        convert.read_generation_request(over_the_wire(convert.write_generation_request(request))) == request
    )


def test_a_form_that_is_switched_off_is_none():
    message = pb.GenerateRequest(input=pb.Input(text="a"), sampling=pb.Sampling(json_object=False))
    assert convert.read_generation_request(message).sampling.structured is None


def test_a_flood_of_options_is_not_copied():
    options = pb.ChoiceList(options=["a"] * (MAX_CHOICES + 1000))
    message = pb.GenerateRequest(input=pb.Input(text="a"), sampling=pb.Sampling(choice=options))
    form = convert.read_generation_request(message).sampling.structured
    assert isinstance(form, Choice)
    assert len(form.options) == MAX_CHOICES + 1


def test_a_form_that_no_message_carries_is_named():
    request = GenerationRequest("id", TextPrompt("a"), SamplingParams(structured=Regex("\ud800")))
    with pytest.raises(InvalidRequestError, match=r"sampling\.regex: cannot be sent"):
        convert.write_generation_request(request)


def test_a_field_that_the_protocol_lacks_is_named():
    bad = []
    set_field(pb.Sampling(), "luck", 1.0, "sampling.luck", bad)
    set_field(pb.Sampling(), "luck", None, "sampling.luck", bad)
    assert [(one.field, one.description) for one in bad] == [
        (
            "sampling.luck",
            "cannot be sent: found a value, expected none, as Sampling has no such field; leave it out",
        )
    ]


def test_what_is_not_sent_stays_unset():
    message = pb.GenerateRequest(input=pb.Input(text="a"))
    assert convert.read_generation_request(message).sampling == SamplingParams()


def test_a_request_without_id_gets_its_own():
    message = pb.GenerateRequest(input=pb.Input(text="a"))
    ids = {convert.read_generation_request(message).request_id for _ in range(100)}
    assert len(ids) == 100


def test_every_bad_field_is_named_at_once():
    message = pb.GenerateRequest(
        input=pb.Input(
            chat=pb.ChatInput(messages=[pb.ChatMessage(role="user"), pb.ChatMessage(content="x")])
        ),
        sampling=pb.Sampling(
            stop=["x"] * (MAX_ITEMS + 1),
            stop_token_ids=[1] * (MAX_ITEMS + 1),
            logit_bias=dict.fromkeys(range(MAX_ITEMS + 1), 1.0),
        ),
        request_id="é" * 65,
        client_id="x" * 129,
    )
    with pytest.raises(InvalidRequestError) as caught:
        convert.read_generation_request(message)
    assert [v.field for v in caught.value.violations] == [
        "input.chat.messages[1].role",
        "sampling.stop",
        "sampling.stop_token_ids",
        "sampling.logit_bias",
        "request_id",
        "client_id",
    ]
    assert "130 bytes, expected 1 to 128" in caught.value.violations[-2].description
    assert "129 bytes, expected 1 to 128" in caught.value.violations[-1].description


@pytest.mark.parametrize(
    ("message", "field"),
    [
        (pb.Input(), "input"),
        (pb.Input(chat=pb.ChatInput()), "input.chat.messages"),
        (
            pb.Input(chat=pb.ChatInput(messages=[pb.ChatMessage(role="u")] * (MAX_ITEMS + 1))),
            "input.chat.messages",
        ),
        (pb.Input(tokens=pb.TokenInput(ids=range(convert_prompt.MAX_TOKEN_IDS + 1))), "input.tokens.ids"),
    ],
)
def test_an_input_without_a_plain_form_is_refused(message, field):
    with pytest.raises(InvalidRequestError) as caught:
        convert_prompt.read_prompt(message)
    assert [v.field for v in caught.value.violations] == [field]


def test_an_empty_request_id_is_refused():
    with pytest.raises(InvalidRequestError, match="request_id: found 0 bytes"):
        convert.read_generation_request(pb.GenerateRequest(input=pb.Input(text="a"), request_id=""))


def test_values_no_message_can_carry_are_named():
    request = GenerationRequest(
        "\ud800",
        ChatPrompt((ChatMessage("user", "\udfff"),)),
        SamplingParams(
            top_k=2**31, seed=-(2**63) - 1, stop=("\ud800",), stop_token_ids=(-1,), logit_bias={-1: 1.0}
        ),
    )
    with pytest.raises(InvalidRequestError) as caught:
        convert.write_generation_request(request)
    assert [v.field for v in caught.value.violations] == [
        "request_id",
        "input.chat.messages[0].content",
        "sampling.top_k",
        "sampling.seed",
        "sampling.stop",
        "sampling.stop_token_ids",
        "sampling.logit_bias",
    ]
    with pytest.raises(InvalidRequestError, match=r"input\.text"):
        convert_prompt.write_prompt(TextPrompt("\ud800"))
    with pytest.raises(InvalidRequestError, match="token_ids"):
        convert.write_detokenize_request((-1,), keep_special_tokens=False)


def test_nan_reaches_the_range_check():
    message = pb.GenerateRequest(
        input=pb.Input(text="a"), sampling=pb.Sampling(temperature=math.nan, min_p=math.inf)
    )
    sampling = convert.read_generation_request(message).sampling
    assert [v.field for v in sampling.violations(vocab_size=10)] == ["sampling.temperature", "sampling.min_p"]


def test_a_mode_of_tools_that_is_not_known_is_refused():
    chat = pb.ChatInput(messages=[pb.ChatMessage(role="user")], tool_choice=pb.ToolChoice(mode=9))
    with pytest.raises(
        InvalidRequestError, match=r"input\.chat\.tool_choice\.mode: found 9, expected 1 to 3"
    ):
        convert.read_generation_request(pb.GenerateRequest(input=pb.Input(chat=chat)))


def test_parts_of_calls_join_and_those_that_broke_off_do_not_count():
    def update(*calls):
        return GenerationUpdate("id", "", (), tool_calls=calls)

    updates = [
        update(ToolCallDelta(0, "a", "f")),
        update(ToolCallDelta(0, arguments="{"), ToolCallDelta(1, "b", "g", "{")),
        update(ToolCallDelta(0, broken=True), ToolCallDelta(1, arguments="}")),
    ]
    together = JoinedUpdates(updates[0])
    for each in updates[1:]:
        together.add(each)
    joined = together.joined().tool_calls
    assert joined == (ToolCallDelta(0, "a", "f", "{", broken=True), ToolCallDelta(1, "b", "g", "{}"))
    assert whole_calls(joined) == (ToolCallDelta(0, "b", "g", "{}"),)


@pytest.mark.parametrize("reason", [FinishReason.STOP, FinishReason.LENGTH, FinishReason.TOOL_CALLS])
@pytest.mark.parametrize("matched", [None, "", "END"])
def test_a_completion_survives_the_wire(reason, matched):
    timings = Timings(0.125, 0.1, 3.7)
    completion = Completion(
        reason, matched, 3, 4, 2**63 - 1, timings, cached_tokens=5, drafted_tokens=6, accepted_tokens=7
    )
    broken = ToolCallDelta(2, broken=True)
    calls = (ToolCallDelta(0, "call00001", "f", '{"é": 1}'), ToolCallDelta(1, arguments="}"), broken)
    update = GenerationUpdate(
        "id", "txt", (5, 6), completion, logprobs=LOGPROBS, reasoning="hm", tool_calls=calls
    )
    assert (
        convert_answers.read_update("id", over_the_wire(convert_answers.write_update(update, first=False)))
        == update
    )
    [answer] = convert_answers.read_answers(over_the_wire(convert_answers.write_answers("id", [update])))
    assert answer == replace(update, tool_calls=calls[:2])


def test_answers_are_told_apart_on_the_wire_and_end_with_the_last():
    completion = Completion(FinishReason.STOP, None, 3, 4, 5, Timings(0, 0, 0))
    second = GenerationUpdate("id", "b", (6,), completion, index=1, open_answers=1)
    first = GenerationUpdate("id", "a", (5,), completion, index=0, open_answers=0)
    message = over_the_wire(convert_answers.write_answers("id", [second, first]))
    assert [choice.text for choice in message.choices] == ["a", "b"]
    assert [answer.index for answer in convert_answers.read_answers(message)] == [0, 1]
    assert [answer.is_last for answer in convert_answers.read_answers(message)] == [False, True]
    left = 2
    for update in (second, first):
        wire = over_the_wire(convert_answers.write_update(update, first=False))
        found = convert_answers.read_update("id", wire, open_answers=left)
        assert found == update
        left = found.open_answers


def test_logprobs_survive_the_wire():
    token = TokenLogprob(2**32 - 1, -9999.0, "\ufffd", b"\xf0\x9f")
    places = (TokenLogprobs(token, (TokenLogprob(0, -0.1, "a", b"a"), token)), TokenLogprobs(token))
    update = GenerationUpdate("id", "txt", (5, 6), logprobs=places, prompt_logprobs=LOGPROBS, open_answers=1)
    assert (
        convert_answers.read_update("id", over_the_wire(convert_answers.write_update(update, first=True)))
        == update
    )
    done = Completion(FinishReason.STOP, None, 1, 2, 3, Timings(0, 0, 0), stop_logprobs=places[0])
    answer = GenerationUpdate("id", "txt", (5, 6), done, logprobs=places, prompt_logprobs=LOGPROBS)
    assert convert_answers.read_answers(over_the_wire(convert_answers.write_answers("id", [answer]))) == [
        answer
    ]


def test_a_delta_has_no_completion():
    update = GenerationUpdate("id", "txt", (5,), index=3, open_answers=1)
    message = over_the_wire(convert_answers.write_update(update, first=True))
    assert message.request_id == "id"
    assert convert_answers.read_update("id", message) == update


def test_a_request_without_client_is_its_connections():
    message = pb.GenerateRequest(input=pb.Input(text="a"))
    assert convert.read_generation_request(message, connection="ipv4:1.2.3.4:5").client_id == "ipv4:1.2.3.4:5"
    message.client_id = "me"
    assert convert.read_generation_request(message, connection="ipv4:1.2.3.4:5").client_id == "me"


@pytest.mark.parametrize("state", WorkerState)
def test_load_survives_the_wire(state):
    figures = {"tokens_per_second": 1.5, "load_percent": 12.5, "loaded_bytes": 2**40, "total_bytes": 2**41}
    load = replace(LOAD, state=state, **figures)
    assert convert_info.read_load(over_the_wire(convert_info.write_load(load))) == load


def test_ids_to_abort_survive_the_wire_and_are_bounded():
    message = over_the_wire(convert.write_abort_request(("a", "b")))
    assert convert.read_abort_request(message) == ("a", "b")
    assert convert.read_abort_request(pb.AbortRequest()) == ()
    with pytest.raises(InvalidRequestError):
        convert.write_abort_request(("\ud800",))


def test_model_info_survives_the_wire():
    info = replace(INFO, served_names=("gpt-4o-mini", "gpt-4o"))
    assert convert_info.read_model_info(over_the_wire(convert_info.write_model_info(info))) == info
