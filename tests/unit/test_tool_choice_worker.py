"""Required calls, forms behind thoughts, and stop strings inside them, through a whole worker on a
fake session.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import jsonschema
import pytest

from llorch_serve.config import EngineConfig
from llorch_serve.engine.sequence import FinishReason
from llorch_serve.errors import InvalidRequestError, UnsupportedError
from llorch_serve.requests import (
    AnswerOptions,
    ChatMessage,
    ChatPrompt,
    GenerationRequest,
    ToolCallDelta,
    ToolChoice,
    ToolMode,
    whole_calls,
)
from llorch_serve.sampling.params import SamplingParams
from llorch_serve.structured import compiler as compiler_module
from llorch_serve.structured.spec import Choice, JsonObject, Regex
from llorch_serve.worker.worker import Worker
from support.builders.chat_templates import TOOLS
from support.builders.checkpoints import EOS_ID
from support.builders.tool_schemas import as_tools, random_tools
from support.fakes.session import FakeSession
from support.harness.worker import TOKENIZER, Answer, Sink, ask, make_session, make_worker

pytest.importorskip("llguidance")

QUESTION = (ChatMessage("user", "Hi"),)
REQUIRED = ToolChoice(ToolMode.REQUIRED)
CHAT = ChatPrompt(QUESTION, tools=TOOLS, tool_choice=REQUIRED)
THINKING = (*QUESTION, ChatMessage("assistant", "<think>"))
CALL = '<tool_call>\n{"name": "get_time", "arguments": {}}\n</tool_call>'
FORMATS = ("hermes", "llama3", "mistral")


def worker_of(folder: Path, session: FakeSession, tools: str = "hermes", reasoning: str = "none") -> Worker:
    config = EngineConfig(prefill_chunk=64, tool_format=tools, reasoning_format=reasoning)
    return make_worker(folder, session, config=config)


@pytest.fixture(scope="module")
def session() -> FakeSession:
    return make_session(context=2048)


@pytest.fixture(scope="module")
def worker(tmp_path_factory: pytest.TempPathFactory, session: FakeSession) -> Iterator[Worker]:
    made = worker_of(tmp_path_factory.mktemp("artifact"), session, reasoning="think")
    yield made
    made.close()


def ids_of(text: str) -> list[int]:
    return [id_ for char in text for id_ in TOKENIZER.encode(char, add_special_tokens=False)]


def calls_of(answer: Answer) -> tuple[ToolCallDelta, ...]:
    return whole_calls(call for update in answer.updates for call in update.tool_calls)


def thoughts_of(answer: Answer) -> str:
    return "".join(update.reasoning for update in answer.updates)


def wanting(session: FakeSession, worker: Worker, prompt: ChatPrompt, text: str) -> None:
    """Let the model want to answer with a text. A grammar that leaves no choice of characters chooses the
    tokens.
    """
    start = worker.tokenize(prompt)[0]

    def rule(tokens: tuple[int, ...]) -> int | None:
        if tokens[: len(start)] != start:
            return None
        said = TOKENIZER.decode(tokens[len(start) :], keep_special_tokens=True)
        if said == text:
            return EOS_ID
        return ids_of(text[len(said)])[0] if text.startswith(said) else None

    session.rule = rule


@pytest.mark.parametrize("tools", FORMATS)
def test_required_calls_of_random_tools_are_valid_and_neighbours_notice_nothing(
    tmp_path: Path, tools: str
) -> None:
    fake = make_session(context=1024, slots=4)
    made = worker_of(tmp_path, fake, tools)
    free = [
        GenerationRequest(
            f"free {index}",
            ChatPrompt((ChatMessage("user", f"Hello {index}"),)),
            SamplingParams(temperature=1, seed=index, max_tokens=60, ignore_eos=True),
        )
        for index in range(4)
    ]
    schemas = {seed: random_tools(seed, count=2) for seed in range(12)}
    held = [
        GenerationRequest(
            f"held {seed}",
            ChatPrompt(
                QUESTION, tools=as_tools(tools_), tool_choice=REQUIRED, parallel_tool_calls=seed % 2 > 0
            ),
            SamplingParams(temperature=1, seed=seed),
        )
        for seed, tools_ in schemas.items()
    ]
    alone, beside = Sink(), Sink()
    for request in free:
        made.submit(request, alone)
    before = alone.answers(*(request.request_id for request in free))
    for index, request in enumerate(held):
        made.submit(request, beside)
        if index < len(free):
            made.submit(free[index], beside)
    together = beside.answers(*(request.request_id for request in (*held, *free)))
    made.close()
    for request in free:
        assert together[request.request_id].ids == before[request.request_id].ids
    for seed, tools_ in schemas.items():
        answer = together[f"held {seed}"]
        assert (answer.text, answer.completion.reason) == ("", FinishReason.TOOL_CALLS)
        calls = calls_of(answer)
        assert len(calls) == 1 or (calls and seed % 2 and tools != "llama3")
        for call in calls:
            jsonschema.validate(json.loads(call.arguments), tools_[call.name])


def test_a_required_call_is_made_whatever_the_model_wants(worker: Worker, session: FakeSession) -> None:
    wanting(session, worker, CHAT, "I would rather not.")
    found = ask(worker, CHAT)
    assert found.text == ""
    assert calls_of(found)
    named = ToolChoice(ToolMode.REQUIRED, ("get_weather",))
    prompt = ChatPrompt(QUESTION, tools=TOOLS, tool_choice=named, parallel_tool_calls=False)
    wanting(session, worker, prompt, CALL)
    [call] = calls_of(ask(worker, prompt, temperature=1, seed=1))
    assert call.name == "get_weather"


def test_one_call_ends_with_its_grammar_and_several_where_the_model_stops(
    worker: Worker, session: FakeSession
) -> None:
    both = f"{CALL}\n{CALL}"
    wanting(session, worker, CHAT, both)
    found = ask(worker, CHAT)
    assert [(call.index, call.name) for call in calls_of(found)] == [(0, "get_time"), (1, "get_time")]
    assert (found.completion.reason, found.completion.stop_matched) == (FinishReason.TOOL_CALLS, "<|eos|>")
    prompt = ChatPrompt(QUESTION, tools=TOOLS, tool_choice=REQUIRED, parallel_tool_calls=False)
    wanting(session, worker, prompt, both)
    found = ask(worker, prompt)
    assert len(calls_of(found)) == 1
    assert (found.completion.reason, found.completion.stop_matched) == (FinishReason.TOOL_CALLS, None)


def test_a_form_gives_way_to_a_required_call(worker: Worker, session: FakeSession) -> None:
    wanting(session, worker, CHAT, CALL)
    found = ask(worker, CHAT, structured=JsonObject())
    assert (found.text, [call.name for call in calls_of(found)]) == ("", ["get_time"])


def test_an_answer_of_a_form_may_be_a_call_instead(worker: Worker, session: FakeSession) -> None:
    """Agents send both, and want the form when no tool is left to be called."""
    for messages in (QUESTION, THINKING):
        prompt = ChatPrompt(messages, tools=TOOLS, continue_final_message=messages is THINKING)
        thought = "hm</think>\n" if messages is THINKING else ""
        for text, calls in [(CALL, ["get_time"]), (f"{CALL}\n{CALL}", ["get_time"] * 2)]:
            wanting(session, worker, prompt, thought + text)
            found = ask(worker, prompt, structured=JsonObject())
            assert (found.text, [call.name for call in calls_of(found)]) == ("", calls)
            assert found.completion.reason is FinishReason.TOOL_CALLS
        # What is inside of a form is no call, whatever it looks like.
        quoted = json.dumps({"a": CALL.replace("\n", "")})
        wanting(session, worker, prompt, thought + quoted)
        found = ask(worker, prompt, structured=JsonObject())
        assert (found.text, calls_of(found), found.completion.reason) == (quoted, (), FinishReason.STOP)
        wanting(session, worker, prompt, thought + "Let me see. " + CALL)
        found = ask(worker, prompt, structured=Choice(("yes", "no")))
        assert found.text in ("yes", "no") or calls_of(found)
    prompt = ChatPrompt(QUESTION, tools=TOOLS, tool_choice=ToolChoice(ToolMode.NONE))
    wanting(session, worker, prompt, CALL)
    assert ask(worker, prompt, structured=Choice(("yes", CALL))).text == CALL


def test_at_most_one_call_where_the_model_may_choose(worker: Worker, session: FakeSession) -> None:
    prompt = ChatPrompt(QUESTION, tools=TOOLS, parallel_tool_calls=False)
    wanting(session, worker, prompt, f"Let me see. {CALL}\n{CALL}")
    for options in ({}, {"n": 2}, {"n": 1, "best_of": 2, "seed": 4}):
        found = ask(worker, prompt, **options)
        first = Answer([update for update in found.updates if update.index == 0])
        assert (first.text, [call.name for call in calls_of(first)]) == ("Let me see. ", ["get_time"])
        assert first.completion.reason is FinishReason.TOOL_CALLS
        assert first.completion.generated_tokens == len(f"Let me see. {CALL}") - len("\n</tool_call>")
    wanting(session, worker, prompt, "No tool is needed.")
    assert ask(worker, prompt).text == "No tool is needed."
    # The slot is free again, and the next request begins.
    wanting(session, worker, CHAT, CALL)
    assert calls_of(ask(worker, CHAT))


def test_a_call_that_meets_the_limit_is_text(worker: Worker, session: FakeSession) -> None:
    prompt = replace(CHAT, tool_choice=ToolChoice(ToolMode.REQUIRED, ("get_weather",)))
    call = f'<tool_call>\n{{"name": "get_weather", "arguments": {{"city": "{"Rome " * 30}"}}}}\n</tool_call>'
    wanting(session, worker, prompt, call)
    found = ask(worker, prompt, max_tokens=90)
    assert call.startswith(found.text)
    assert len(found.text) > 70
    assert found.completion.reason is FinishReason.LENGTH
    parts = [call for update in found.updates for call in update.tool_calls]
    assert [part.broken for part in parts] == [False] * (len(parts) - 1) + [True]
    assert calls_of(found) == ()


def test_a_call_is_refused_by_name_before_anything_runs(tmp_path: Path, worker: Worker) -> None:
    with pytest.raises(InvalidRequestError, match=r"input\.chat\.tool_choice: found 'x'"):
        ask(worker, ChatPrompt(QUESTION, tools=TOOLS, tool_choice=ToolChoice(ToolMode.REQUIRED, ("x",))))
    plain = worker_of(tmp_path, make_session(), tools="none")
    with pytest.raises(InvalidRequestError, match=r"input\.chat\.tool_choice: .*--tool-format"):
        ask(plain, CHAT)
    assert plain.violations(CHAT, SamplingParams(), AnswerOptions())[0].field == "input.chat.tool_choice"
    plain.close()


def test_a_schema_that_cannot_be_held_is_named_by_its_tool(worker: Worker) -> None:
    bad = json.dumps(
        {"name": "f", "parameters": {"properties": {"a": {"type": "array", "uniqueItems": True}}}}
    )
    for tools, index, choice in (
        ((*TOOLS, bad), 2, REQUIRED),
        ((bad, *TOOLS), 0, ToolChoice()),
        ((bad,), 0, REQUIRED),
    ):
        found = ask(worker, ChatPrompt(QUESTION, tools=tools, tool_choice=choice), structured=JsonObject())
        assert str(found.error).startswith(f"input.chat.tools[{index}].parameters.properties.a")
        assert "uniqueItems" in str(found.error)


def test_without_llguidance_only_required_calls_are_refused(
    worker: Worker, session: FakeSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiler_module.importlib.util, "find_spec", lambda _name: None)
    with pytest.raises(UnsupportedError, match=r"llorch\[structured\]"):
        ask(worker, CHAT)
    prompt = ChatPrompt(QUESTION, tools=TOOLS, parallel_tool_calls=False)
    wanting(session, worker, prompt, CALL)
    assert calls_of(ask(worker, prompt))


# Thoughts.

OPENED = ChatPrompt(THINKING, continue_final_message=True)


@pytest.mark.parametrize(
    ("form", "answer"),
    [(Choice(("yes", "no")), "yes"), (JsonObject(), '{"a": 1}'), (Regex("[ab]+"), "abba")],
)
def test_a_form_holds_the_answer_and_not_the_thought(
    worker: Worker, session: FakeSession, form: Choice, answer: str
) -> None:
    space = "" if isinstance(form, Regex) else "\n\n"
    wanting(session, worker, OPENED, f"Hm, {{no}} or yes?\n</think>{space}{answer}")
    found = ask(worker, OPENED, structured=form)
    assert (thoughts_of(found), found.text) == ("Hm, {no} or yes?", answer)
    # The model stops in its thought, as it likes: the form is still due.
    wanting(session, worker, OPENED, "Hm")
    found = ask(worker, OPENED, structured=form, max_tokens=40)
    assert thoughts_of(found).startswith("Hm")
    assert found.completion.reason is FinishReason.LENGTH or found.text


def test_a_required_call_comes_behind_the_thought(worker: Worker, session: FakeSession) -> None:
    prompt = ChatPrompt(THINKING, tools=TOOLS, tool_choice=REQUIRED, continue_final_message=True)
    wanting(session, worker, prompt, f"Which? <tool_call>\n</think>\n\n{CALL}")
    found = ask(worker, prompt)
    assert (thoughts_of(found), found.text) == ("Which? <tool_call>", "")
    assert [call.name for call in calls_of(found)] == ["get_time"]


def test_a_form_holds_all_where_no_thought_is_open(worker: Worker, session: FakeSession) -> None:
    prompt = ChatPrompt(QUESTION)
    wanting(session, worker, prompt, "<think>hm</think>yes")
    found = ask(worker, prompt, structured=Choice(("yes", "no", "<think>x</think>")))
    assert (thoughts_of(found), found.text) == ("", "<think>x</think>")


STOPS = [
    # answer, stop strings, thoughts, text, what matched
    ("a STOP b</think>c STOP d", ("STOP",), "a STOP b", "c ", "STOP"),
    ("a\n\nb</think>\n\nc\n\nd", ("\n\n",), "a\n\nb", "c", "\n\n"),
    ("a b</think>c", ("</think>",), "a b", "", "</think>"),
    ("a b</think>c", ("b</", "b</think>"), "a", "", "b</think>"),
    ("STOP</think>c", ("STOP", "P</think>"), "STO", "", "P</think>"),
    ("a</thinkSTOP</think>b>STOP", (">STOP",), "a</thinkSTOP", "b", ">STOP"),
    ("a STOP", ("STOP",), "a STOP", "", "<|eos|>"),
]


@pytest.mark.parametrize(("answer", "stop", "thoughts", "text", "matched"), STOPS)
@pytest.mark.parametrize("opened", [True, False], ids=["the template", "the model"])
def test_stop_strings_are_not_looked_for_inside_thoughts(
    worker: Worker,
    session: FakeSession,
    answer: str,
    stop: tuple[str, ...],
    thoughts: str,
    text: str,
    matched: str,
    opened: bool,
) -> None:
    prompt = OPENED if opened else ChatPrompt(QUESTION)
    wanting(session, worker, prompt, answer if opened else f"\n<think>{answer}")
    found = ask(worker, prompt, stop=stop)
    assert (thoughts_of(found), found.text, found.completion.stop_matched) == (thoughts, text, matched)


@pytest.mark.parametrize(
    ("answer", "stop", "text"),
    [
        ("\n\nHello", ("\n",), ""),
        ("<thin STOP", ("STOP",), "<thin "),
        ("<thin", ("in",), "<th"),
        ("  ", ("x",), "  "),
        ("Hello <think>STOP</think>", ("STOP",), "Hello <think>"),
    ],
)
def test_stop_strings_are_looked_for_where_nothing_is_thought(
    worker: Worker, session: FakeSession, answer: str, stop: tuple[str, ...], text: str
) -> None:
    prompt = ChatPrompt(QUESTION)
    wanting(session, worker, prompt, answer)
    found = ask(worker, prompt, stop=stop)
    assert (thoughts_of(found), found.text) == ("", text)
