"""Calls and thoughts are read out of answers: what is told in pieces joins to what the whole text gives, and
nothing is lost.
"""

from __future__ import annotations

import importlib
import json
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import SupportsIndex

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from llorch_serve.chat.parsing.answer import AnswerParser, call_id, parser_for
from llorch_serve.chat.parsing.bodies import CallPart
from llorch_serve.chat.parsing.calls import CallParser
from llorch_serve.chat.parsing.registry import AnswerFormats, choose_formats
from llorch_serve.chat.parsing.tool_formats import TOOL_FORMATS
from llorch_serve.errors import UsageError
from llorch_serve.requests import (
    ChatMessage,
    ChatPrompt,
    ToolCallDelta,
    ToolChoice,
    ToolMode,
    whole_calls,
)
from support.builders.chat_templates import LLAMA3, SMOLLM2, TOOLS, conversation

NAMES = ["hermes", "llama3", "mistral", "granite"]
PROMPT = ChatPrompt(tuple(conversation("hello")), tools=TOOLS)
CALL = '{"name": "get_weather", "arguments": {"city": "Köln", "text": "a \\"}\\" ]\\\\"}}'
TIME = '{"name": "get_time", "parameters": {}}'
# Text, thoughts, and name and arguments of each call.
Told = tuple[str, str, list[tuple[str, str]]]


def formats(tools: str = "none", reasoning: str = "none") -> AnswerFormats:
    return choose_formats("", tools=tools, reasoning=reasoning)


def parser(tools: str = "none", reasoning: str = "none", rendered: str = "") -> AnswerParser:
    made = parser_for(formats(tools, reasoning), PROMPT, rendered, key="k")
    assert made is not None
    return made


def told(made: AnswerParser, pieces: list[str]) -> Told:
    deltas = [*(made.push(piece) for piece in pieces), made.finish()]
    calls = whole_calls(call for delta in deltas for call in delta.tool_calls)
    assert [call.index for call in calls] == list(range(len(calls)))
    assert all(len(call.id) == 9 for call in calls)
    assert len({call.id for call in calls}) == len(calls)
    text = "".join(delta.text for delta in deltas)
    thoughts = "".join(delta.reasoning for delta in deltas)
    return text, thoughts, [(call.name, call.arguments) for call in calls]


def arguments(call: str) -> str:
    """The arguments of a call as they are written."""
    return call[call.index("{", 1) : -1]


WEATHER = ("get_weather", arguments(CALL))
CLOCK = ("get_time", "{}")

SOUND: list[tuple[str, str, str, list[tuple[str, str]]]] = [
    ("hermes", f"<tool_call>\n{CALL}\n</tool_call>", "", [WEATHER]),
    ("hermes", f"Let me "
        f"see.\n<tool_call>{CALL}</tool_call>\n<tool_call>\n{TIME}\n</tool_call>\n", "Let me see.\n", [WEATHER, CLOCK]),
    ("hermes", f"<tool_call>[{CALL}, {TIME}]</tool_call> Done.", "Done.", [WEATHER, CLOCK]),
    ("hermes", f"<tool_call>{CALL}", "", [WEATHER]),
    ("hermes", f"<tool_call>{CALL}\n</tool", "</tool", [WEATHER]),
    ("hermes", '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>', "", [("f", '{"a": 1}')]),
    ("hermes", '<tool_call>{"name": "f"}</tool_call>', "", [("f", "{}")]),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"s": '
        '"</tool_call>"}}</tool_call>x', "x", [("f", '{"s": "</tool_call>"}')]),
    ("hermes", '<tool_call>{"type": "function", "function": {"name": "f", "arguments": {"n": '
        '1.0}}}</tool_call>', "", [("f", '{"n": 1.0}')]),
    ("llama3", TIME, "", [CLOCK]),
    ("llama3", f" \n{CALL}; {TIME}\n", "", [WEATHER, CLOCK]),
    ("llama3", f"<|python_tag|>{CALL}", "", [WEATHER]),
    ("llama3", '<|python_tag|>{"name": "any", "parameters": {"x": null}}', "", [("any", '{"x": null}')]),
    ("llama3", f"{CALL} and more; {TIME}", f"and more; {TIME}", [WEATHER]),
    ("llama3", f"{CALL}; so", "; so", [WEATHER]),
    ("mistral", f"[TOOL_CALLS][{CALL}, {TIME}]", "", [WEATHER, CLOCK]),
    ("mistral", '[TOOL_CALLS]get_time[ARGS]{}[TOOL_CALLS]f[CALL_ID]abcdef123[ARGS]{"a": '
        '"}"}', "", [CLOCK, ("f", '{"a": "}"}')]),
    ("mistral", 'So: [TOOL_CALLS] get_time {"a": [1]}', "So: ", [("get_time", '{"a": [1]}')]),
    ("granite", f"<|tool_call|>[{CALL}]", "", [WEATHER]),
]  # fmt: skip

MALFORMED = [
    ("hermes", "<tool_call>sorry</tool_call>"),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": 1</tool_call> more'),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": }}</tool_call> more'),
    ("hermes", '<tool_call>{"name": 3, "arguments": {}}</tool_call>'),
    ("hermes", '<tool_call>{"name": "", "arguments": {}}</tool_call>'),
    ("hermes", '<tool_call>{"name": "f", "arguments": [1]}</tool_call>'),
    ("hermes", '<tool_call>{"name": "f", "arguments": "text"}</tool_call>'),
    ("hermes", '<tool_call>{"arguments": {}}</tool_call>'),
    ("hermes", '<tool_call>[{"name": "f"}, 1]</tool_call>'),
    ("hermes", "<tool_call>[]</tool_call>"),
    ("hermes", "<tool_call>"),
    ("hermes", "a <tool_c"),
    ("hermes", "<tool_call>" + "[" * 3000 + "]" * 3000),
    ("hermes", CALL),
    ("llama3", '{"name": "Bob", "parameters": {}}'),  # no tool of the request
    ("llama3", '{"a": 1}; {"b": 2}'),
    ("llama3", f"Call {TIME}"),
    ("llama3", '<|python_tag|>print("hello")'),
    ("llama3", " \n"),
    ("llama3", ' {"name": "get_time"'),
    ("mistral", "[TOOL_CALLS] no call"),
    ("mistral", "[TOOL_CALLS]" + "x" * 600 + '{"a": 1}'),
    ("mistral", "[TOOL_CALLS]two words{}"),
    ("mistral", '[TOOL_CALLS]f[ARGS]{"a" 1}'),
    ("mistral", "[TOOL_CALLS]f[ARGS]"),
    ("granite", "<|tool_call|>[1, 2]"),
]


@pytest.mark.parametrize(("tools", "answer", "text", "calls"), SOUND)
def test_calls_are_told_at_every_cut(
    tools: str, answer: str, text: str, calls: list[tuple[str, str]]
) -> None:
    for cut in range(len(answer) + 1):
        assert told(parser(tools), [answer[:cut], answer[cut:]]) == (text, "", calls)
    assert told(parser(tools), list(answer)) == (text, "", calls)


@pytest.mark.parametrize(("tools", "answer"), MALFORMED)
def test_what_is_no_call_stays_text(tools: str, answer: str) -> None:
    for pieces in ([answer], list(answer)):
        assert told(parser(tools), pieces) == (answer, "", [])


THOUGHTS = [
    ("<think>\nHm.\n\nWell.\n</think>\n\nYes.\n", "", "Yes.\n", "Hm.\n\nWell."),
    ("  <think></think>Yes", "", "Yes", ""),
    ("Hm.</think> Yes </think>", "<think>\n", "Yes </think>", "Hm."),
    ("Yes <think> no", "", "Yes <think> no", ""),
    ("<think>Hm. ", "", "", "Hm."),
    ("<think>Hm.</thi", "", "", "Hm.</thi"),
    (" <thin", "", " <thin", ""),
    (" ", "", " ", ""),
    ("", "<think>", "", ""),
    ("Yes", "<think>\n\n</think>\n\n", "Yes", ""),
]


@pytest.mark.parametrize(("answer", "rendered", "text", "thoughts"), THOUGHTS)
def test_thoughts_are_told_apart_at_every_cut(answer: str, rendered: str, text: str, thoughts: str) -> None:
    for pieces in ([answer], list(answer), *([answer[:cut], answer[cut:]] for cut in range(len(answer)))):
        assert told(parser(reasoning="think", rendered=rendered), pieces) == (text, thoughts, [])


@pytest.mark.parametrize(
    ("answer", "text", "thoughts"),
    [
        ("<think>a</think>\n<response>b </response>c", "b c", "a"),
        ("<think>a</think><response>b</respon", "b</respon", "a"),
        ("<think>a</think><resp", "<resp", "a"),
        ("<think>a</think>b</response>", "b</response>", "a"),
    ],
)
def test_the_marks_of_what_is_said_are_left_out(answer: str, text: str, thoughts: str) -> None:
    for pieces in ([answer], list(answer)):
        assert told(parser(reasoning="granite"), pieces) == (text, thoughts, [])


def test_calls_come_after_thoughts_and_not_among_them() -> None:
    answer = f"<think>\n<tool_call>{CALL}</tool_call>\n</think>\n\n<tool_call>{TIME}</tool_call>"
    expected = ("", f"<tool_call>{CALL}</tool_call>", [CLOCK])
    assert told(parser("hermes", "think"), list(answer)) == expected


WORDS = [
    "<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "<|python_tag|>", "<|tool_call|>", "<think>", "</think>",
    "<response>", "</response>", CALL, TIME, f"[{CALL}]", "f", "{", "}", "[", "]", '"', "\\", ";", " ", "\n", "<", "</", "hello", "😀", "[TOOL",
]  # fmt: skip


@pytest.mark.parametrize("reasoning", ["none", "think", "granite"])
@pytest.mark.parametrize("tools", NAMES)
@settings(deadline=None)
@given(words=st.lists(st.sampled_from(WORDS), max_size=12), cuts=st.lists(st.integers(1, 40), max_size=40))
@example(words=["<tool_call>", "{", "}", "<tool_call>", TIME], cuts=[])
def test_pieces_join_to_what_the_whole_text_gives(
    tools: str, reasoning: str, words: list[str], cuts: list[int]
) -> None:
    answer = "".join(words)
    pieces, rest = [], answer
    for length in cuts:
        pieces.append(rest[:length])
        rest = rest[length:]
    whole = told(parser(tools, reasoning), [answer])
    assert told(parser(tools, reasoning), [*pieces, rest]) == whole
    # Nothing but markers and white space is lost.
    text, thoughts, calls = whole
    kept = sorted(text + thoughts + "".join(name + values for name, values in calls))
    assert len(kept) <= len(answer)
    if not calls and reasoning == "none":
        assert text == answer


def test_text_is_told_as_soon_as_it_cannot_be_a_call() -> None:
    made = parser("hermes", "think")
    assert made.push("Hello <tool").text == "Hello "
    assert made.push("box> and").text == "<toolbox> and"
    made = parser("hermes", "think")
    assert made.push("<think>one ").reasoning == "one"
    assert made.push("two").reasoning == " two"


class Watched(str):
    """Text that counts the characters that are read or copied where it takes part."""

    __slots__ = ()
    characters = 0

    def __add__(self, other: str) -> Watched:
        return self._counted(str.__add__(self, other))

    def __radd__(self, other: str) -> Watched:
        return self._counted(str.__add__(other, self))

    def __getitem__(self, key: SupportsIndex | slice) -> Watched:
        return self._counted(str.__getitem__(self, key))

    def lstrip(self, chars: str | None = None, /) -> Watched:
        return self._counted(str.lstrip(self, chars))

    def rstrip(self, chars: str | None = None, /) -> Watched:
        return self._counted(str.rstrip(self, chars))

    def isspace(self) -> bool:
        return str.isspace(self._counted(self))

    def find(self, sub: str, start: SupportsIndex | None = None, end: SupportsIndex | None = None, /) -> int:
        found = str.find(self, sub, start, end)
        self._counted(str.__getitem__(self, slice(start, end if found < 0 else found + len(sub))))
        return found

    def partition(self, sep: str, /) -> tuple[str, str, str]:
        before, found, after = str.partition(self._counted(self), sep)
        return Watched(before), found, Watched(after)

    @staticmethod
    def _counted(text: str) -> Watched:
        Watched.characters += len(text)
        return Watched(text)


class WatchedPattern:
    """A regular expression that counts the characters it looks at."""

    def __init__(self, pattern: re.Pattern[str]) -> None:
        self._pattern = pattern

    def __getattr__(self, method: str) -> Callable[..., re.Match[str] | None]:
        def match(text: str, start: int = 0, end: int = sys.maxsize) -> re.Match[str] | None:
            found: re.Match[str] | None = getattr(self._pattern, method)(text, start, end)
            Watched.characters += (len(text) if found is None else found.end() + 1) - start
            return found

        return match


OPEN_CALL = '{"name": "f", "arguments": {"s": "'
HELD = [
    ("hermes", "none", "<tool_call>" + OPEN_CALL, "abcd"),
    ("hermes", "none", "<tool_call>" + OPEN_CALL, "\\\\\\\\"),
    ("mistral", "none", "[TOOL_CALLS]f" + OPEN_CALL, "abcd"),
    ("hermes", "none", "<tool_call>", " "),
    ("mistral", "none", "[TOOL_CALLS]", " "),
    ("hermes", "none", f"<tool_call>{TIME}", " "),
    ("llama3", "none", "", " "),
    ("llama3", "none", f"{TIME};", " "),
    ("llama3", "none", f"{TIME}; " + OPEN_CALL, "abcd"),
    ("none", "think", "", " "),
    ("none", "think", "<think>", " "),
    ("none", "think", "<think>a", " "),
    ("none", "think", "<think>a</think>", " "),
    ("none", "granite", "<think>a</think>", " "),
    ("none", "granite", "<think>a</think><response>", " "),
]  # fmt: skip


@pytest.mark.parametrize(("tools", "reasoning", "before", "token"), HELD)
def test_a_token_costs_the_same_however_much_is_held(
    tools: str, reasoning: str, before: str, token: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Characters that are looked at or copied, for each of an answer."""
    for file in ("bodies", "calls", "json_calls", "markers", "reasoning"):
        module = importlib.import_module(f"llorch_serve.chat.parsing.{file}")
        for name, value in vars(module).items():
            if isinstance(value, re.Pattern):
                monkeypatch.setattr(module, name, WatchedPattern(value))
    made = parser(tools, reasoning)
    made.push(before)
    monkeypatch.setattr(Watched, "characters", 0)
    for _ in range(2000):
        made.push(Watched(token))
    assert Watched.characters <= 2000 * 100 * len(token)


def test_many_calls_at_once_cost_what_each_of_them_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """A run of byte tokens is told at once when it ends, and so is what was held back for a stop string."""
    monkeypatch.setattr(Watched, "characters", 0)
    answer = Watched("[TOOL_CALLS]f{}" * 2000)
    assert len(whole_calls(parser("mistral").push(answer).tool_calls)) == 2000
    assert Watched.characters <= 100 * len(answer)


def test_a_long_call_comes_as_it_is_written() -> None:
    made = parser("hermes")
    begun = made.push('<tool_call>{"name": "f", "arguments": {"s": "').tool_calls
    assert [(call.name, call.arguments) for call in begun] == [("f", ""), ("", '{"s": "')]
    told = []
    for _ in range(20_000):
        [part] = made.push('\\"x[{').tool_calls
        assert not part.name
        told.append(part.arguments)
    rest = made.push('"}}').tool_calls
    [call] = whole_calls([*begun, *(ToolCallDelta(0, arguments=text) for text in told), *rest])
    assert json.loads(call.arguments) == {"s": '"x[{' * 20_000}


STREAMED = [
    ("hermes", '<tool_call>\n{"name": "get_time", "arguments": {"zone": "utc", "n": [1, {}]}}\n</tool_call>'),
    ("hermes", '<tool_call>[{"name": "get_time", "arguments": {"zone": "utc", "n": [1, {}]}}]</tool_call>'),
    ("llama3", '{"name": "get_time", "parameters": {"zone": "utc", "n": [1, {}]}}'),
    ("llama3", '<|python_tag|>{"name": "get_time", "parameters": {"zone": "utc", "n": [1, {}]}}'),
    ("mistral", '[TOOL_CALLS][{"name": "get_time", "arguments": {"zone": "utc", "n": [1, {}]}}]'),
    ("mistral", '[TOOL_CALLS]get_time[ARGS]{"zone": "utc", "n": [1, {}]}'),
    ("granite", '<|tool_call|>[{"name": "get_time", "arguments": {"zone": "utc", "n": [1, {}]}}]'),
]


@pytest.mark.parametrize(("tools", "answer"), STREAMED)
def test_the_name_comes_first_and_arguments_as_they_are_written(tools: str, answer: str) -> None:
    made = parser(tools)
    parts = [part for char in answer for part in made.push(char).tool_calls]
    name, *rest = parts
    assert (name.name, name.arguments, len(name.id)) == ("get_time", "", 9)
    assert {(part.index, part.name, part.id, part.broken) for part in rest} == {(0, "", "", False)}
    assert [part.arguments for part in rest] == list('{"zone": "utc", "n": [1, {}]}')
    assert made.finish().text == ""


BROKEN = [
    ("hermes", '<tool_call>\n{"name": "get_time", "arguments": {"zone": "ut'),
    ("hermes", '<tool_call>{"name": "get_time", "arguments": {"a": }}</tool_call> more'),
    ("hermes", '<tool_call>{"name": "get_time", "arguments": {}, "name": "other"}</tool_call>'),
    ("hermes", '<tool_call>{"name": "get_time", "arguments": {}, "arguments": {"a": 1}}</tool_call>'),
    ("hermes", '<tool_call>[{"name": "get_time", "arguments": {}}, {"name": "get_time", "arg'),
    ("hermes", '<tool_call>[{"name": "get_time", "arguments": {}}, {"name": "f", "arguments": {}}, 1]'),
    ("llama3", '{"name": "get_time", "parameters": {"a"'),
    ("mistral", '[TOOL_CALLS]get_time[ARGS]{"a": 1'),
    ("mistral", '[TOOL_CALLS]get_time[ARGS]{"a" 1}'),
]


@pytest.mark.parametrize(("tools", "answer"), BROKEN)
def test_a_call_that_breaks_off_is_told_as_text_and_said_to_be_none(tools: str, answer: str) -> None:
    for pieces in ([answer], list(answer)):
        assert told(parser(tools), pieces) == (answer, "", [])
        made = parser(tools)
        deltas = [*(made.push(piece) for piece in pieces), made.finish()]
        parts = [part for delta in deltas for part in delta.tool_calls]
        assert parts[0].name == "get_time"
        assert {part.index for part in parts if part.broken} == {part.index for part in parts}


@pytest.mark.parametrize("arguments", ["null", '""', '" "'])
def test_null_and_empty_arguments_are_no_arguments(arguments: str) -> None:
    for name, answer in {
        "hermes": f'<tool_call>{{"name": "get_time", "arguments": {arguments}}}</tool_call>',
        "llama3": f'{{"name": "get_time", "parameters": {arguments}}}',
        "granite": f'<|tool_call|>[{{"name": "get_time", "arguments": {arguments}}}]',
    }.items():
        for pieces in ([answer], list(answer)):
            assert told(parser(name), pieces) == ("", "", [CLOCK])


ONE = [
    ("hermes", f"<tool_call>{CALL}</tool_call>\n<tool_call>{TIME}</tool_call>"),
    ("hermes", f"<tool_call>[{CALL}, {TIME}]</tool_call>"),
    ("hermes", f"<tool_call>[{CALL}, 1]"),
    ("mistral", f"[TOOL_CALLS][{CALL}, {TIME}]"),
    ("mistral", '[TOOL_CALLS] [{"id": "abcdef123", "name": "get_weather", "arguments": '
        f"{WEATHER[1]}}}, {TIME}]"),
    ("mistral", f"[TOOL_CALLS]get_weather[ARGS]{WEATHER[1]}[TOOL_CALLS]get_time[ARGS]{{}}"),
    ("llama3", f"{CALL}; {TIME}"),
    ("granite", f"<|tool_call|>[{CALL}, {TIME}]"),
]  # fmt: skip


@pytest.mark.parametrize(("tools", "answer"), ONE)
def test_an_answer_of_one_call_is_done_with_the_first(tools: str, answer: str) -> None:
    prompt = ChatPrompt(PROMPT.messages, tools=TOOLS, parallel_tool_calls=False)
    for pieces in ([answer], list(answer)):
        made = parser_for(formats(tools), prompt, "", key="k")
        assert made is not None
        read, parts = "", []
        for piece in pieces:
            assert not made.done
            read += piece
            parts += made.push(piece).tool_calls
            if made.done:
                break
        assert made.done
        assert [(call.name, call.arguments) for call in whole_calls(parts)] == [WEATHER]
        assert read == answer or TIME[-14:] not in read


@pytest.mark.parametrize("name", NAMES)
def test_an_answer_that_may_be_a_form_has_its_calls_first_or_none(name: str) -> None:
    [form] = [each for each in TOOL_FORMATS if each.name == name]
    call = {
        "hermes": f"<tool_call>{TIME}</tool_call>",
        "llama3": TIME,
        "mistral": f"[TOOL_CALLS][{TIME}]",
        "granite": f"<|tool_call|>[{TIME}]",
    }[name]
    quoted = json.dumps({"a": call})

    def read(answer: str, cut: int) -> tuple[str, list[str]]:
        made = CallParser(form, frozenset({"get_time"}), at_start=True)
        pieces = [*made.push(answer[:cut]), *made.push(answer[cut:]), *made.finish()]
        text = "".join(piece for piece in pieces if isinstance(piece, str))
        return text, [piece.name for piece in pieces if isinstance(piece, CallPart) and piece.name]

    for answer, expected in [
        (call, ("", ["get_time"])),
        (quoted, (quoted, [])),
        ("x" + call, ("x" + call, [])),
        (call[:5], (call[:5], [])),
        ("", ("", [])),
    ]:
        for cut in range(len(answer) + 1):
            assert read(answer, cut) == expected


def test_only_tools_that_may_be_called_count_without_a_marker() -> None:
    choice = ToolChoice(ToolMode.AUTO, ("get_weather",))
    prompt = ChatPrompt(PROMPT.messages, tools=TOOLS, tool_choice=choice)
    made = parser_for(formats("llama3"), prompt, "", key="k")
    assert made is not None
    assert told(made, [TIME]) == (TIME, "", [])
    none = ChatPrompt(PROMPT.messages, tools=TOOLS, tool_choice=ToolChoice(ToolMode.NONE))
    assert parser_for(formats("llama3"), none, "", key="k") is None


def test_calls_are_looked_for_only_where_there_are_tools() -> None:
    plain = ChatPrompt(tuple(conversation("hello")))
    assert parser_for(formats("hermes"), plain, "", key="k") is None
    made = parser_for(formats("hermes", "think"), plain, "", key="k")
    assert made is not None
    answer = f"<tool_call>{CALL}</tool_call>"
    assert told(made, [answer]) == (answer, "", [])


def test_going_on_inside_a_thought_is_noticed() -> None:
    for content, expected in (("<think>Hm", ("Yes", "m.", [])), ("Hm", ("m.</think>Yes", "", []))):
        prompt = ChatPrompt(
            (ChatMessage("user", "<think>"), ChatMessage("assistant", content)), continue_final_message=True
        )
        made = parser_for(formats(reasoning="think"), prompt, f"<think>{content}", key="k")
        assert made is not None
        assert told(made, ["m.</think>Yes"]) == expected


def test_ids_of_calls_follow_from_the_request() -> None:
    assert call_id("a:0") == call_id("a:0") != call_id("a:1")
    assert call_id("a:0").isalnum()
    parts = parser("mistral").push('[TOOL_CALLS]f[CALL_ID]abcdef123[ARGS]{"a": "}"}').tool_calls
    [given_id] = whole_calls(parts)
    assert given_id.id == "abcdef123"


# Which format.

DETECTED = {
    "meta-llama-Llama-3.1-8B-Instruct": ("llama3", None),
    "meta-llama-Llama-3.2-3B-Instruct": ("llama3", None),
    "meta-llama-Llama-3.3-70B-Instruct": ("llama3", None),
    "mistralai-Mistral-Nemo-Instruct-2407": ("mistral", None),
    "Mistral-Small-3.2-24B-Instruct-2506": ("mistral", None),
    "unsloth-mistral-Devstral-Small-2507": ("mistral", None),
    "NousResearch-Hermes-2-Pro-Llama-3-8B-tool_use": ("hermes", None),
    "NousResearch-Hermes-3-Llama-3.1-8B-tool_use": ("hermes", None),
    "Qwen-Qwen2.5-7B-Instruct": ("hermes", None),
    "Qwen-Qwen3-0.6B": ("hermes", "think"),
    "Qwen-QwQ-32B": ("hermes", "think"),
    "deepseek-ai-DeepSeek-R1-Distill-Llama-8B": (None, "think"),
    "deepseek-ai-DeepSeek-R1-Distill-Qwen-32B": (None, "think"),
    "llama-cpp-deepseek-r1": (None, "think"),
    "llama-cpp-rwkv-world": (None, "think"),
    "ibm-granite-granite-3.3-2B-Instruct": ("granite", "granite"),
}


def names(found: AnswerFormats) -> tuple[str | None, str | None]:
    return (found.tools and found.tools.name, found.reasoning and found.reasoning.name)


@pytest.mark.skipif(
    "LLORCH_LLAMA_CPP_MODELS" not in os.environ,
    reason="LLORCH_LLAMA_CPP_MODELS does not name llama.cpp's models folder",
)
def test_formats_are_found_by_the_template() -> None:
    folder = Path(os.environ["LLORCH_LLAMA_CPP_MODELS"]) / "templates"
    found = {
        path.stem: names(choose_formats(path.read_text(encoding="utf-8"))) for path in folder.glob("*.jinja")
    }
    assert {name: pair for name, pair in found.items() if pair != (None, None)} == DETECTED


def test_a_template_without_formats_has_none_and_flags_come_first() -> None:
    for source in (SMOLLM2, LLAMA3, "<tool_call><function=x>"):
        assert names(choose_formats(source)) == (None, None)
    assert names(choose_formats(SMOLLM2, tools="mistral", reasoning="think")) == ("mistral", "think")
    assert names(choose_formats("<tool_call></think>", tools="none", reasoning="none")) == (None, None)
    with pytest.raises(UsageError, match="--tool-format is 'x'; expected one of auto, none, mistral"):
        choose_formats("", tools="x")
    with pytest.raises(UsageError, match="--reasoning-format is 'x'"):
        choose_formats("", reasoning="x")
