"""A choice of tools: what the model is told of, and the grammar of calls that it must make, in the format of
its own template.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from llorch_serve.chat.parsing.answer import held_form
from llorch_serve.chat.parsing.registry import choose_formats
from llorch_serve.chat.parsing.tool_formats import TOOL_FORMATS
from llorch_serve.chat.template import ChatTemplate
from llorch_serve.chat.template_input import read_input
from llorch_serve.chat.tools import held_calls
from llorch_serve.errors import InvalidRequestError
from llorch_serve.requests import ChatMessage, ChatPrompt, ToolCall, ToolChoice, ToolMode
from llorch_serve.structured.composing import compose
from llorch_serve.structured.spec import (
    AfterThought,
    CallWriting,
    Choice,
    Grammar,
    HeldForm,
    JsonObject,
    JsonSchema,
    Regex,
    ToolCalls,
)
from llorch_serve.structured.vocabulary import build
from llorch_serve.text.tokenizer import Tokenizer
from support.builders.chat_templates import TOOLS, rendered
from support.builders.tiny_tokenizers import byte_level

llguidance = pytest.importorskip("llguidance")

QUESTION = (ChatMessage("user", "What is the weather in Köln?"),)
REQUIRED = ToolChoice(ToolMode.REQUIRED)
WEATHER = ToolCall("get_weather", '{"city": "Köln", "days": 2}', "call00001")
TIME = ToolCall("get_time", "{}", "call00002")
Accepts = Callable[[HeldForm, str], bool]


def accepting(tokenizer: Tokenizer) -> Accepts:
    """Return what tells whether a form accepts a text, whose special tokens count as such."""
    vocabulary = build(tokenizer, tokenizer.vocab_size, frozenset())

    def accepts(form: HeldForm, text: str) -> bool:
        matcher = llguidance.LLMatcher(vocabulary.trie, compose(form, tokenizer.special_tokens), log_level=0)
        assert not matcher.is_error(), matcher.get_error()
        ids = list(tokenizer.encode(text, add_special_tokens=False))
        return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()

    return accepts


@pytest.fixture(scope="module")
def accepts() -> Accepts:
    markers = ("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "<|tool_call|>", "<|eot_id|>", "</think>")
    return accepting(Tokenizer(byte_level(markers)))


def calls(name: str, template: str = "", **fields: object) -> ToolCalls:
    """Return the form of a required call in a format."""
    prompt = ChatPrompt(QUESTION, **{"tools": TOOLS, "tool_choice": REQUIRED, **fields})  # type: ignore[arg-type]
    [form] = [each for each in TOOL_FORMATS if each.name == name]
    made = held_calls(prompt, form.writing(template))
    assert made is not None
    return made


def arguments(of: ToolCall) -> str:
    return json.dumps(json.loads(of.arguments), ensure_ascii=False)


# The calls that a template writes into a conversation are what its model was trained to write.

WRITTEN = {
    "Qwen-Qwen2.5-7B-Instruct": ("<|im_start|>assistant\n", "<|im_end|>", 2),
    "Qwen-Qwen3-0.6B": ("<|im_start|>assistant\n", "<|im_end|>", 2),
    "Qwen-QwQ-32B": ("<|im_start|>assistant\n", "<|im_end|>", 2),
    "NousResearch-Hermes-2-Pro-Llama-3-8B-tool_use": ("<|im_start|>assistant\n", "<|im_end|>", 2),
    "NousResearch-Hermes-3-Llama-3.1-8B-tool_use": ("<|im_start|>assistant\n", "<|im_end|>", 2),
    "meta-llama-Llama-3.1-8B-Instruct": ("assistant<|end_header_id|>\n\n", "<|eot_id|>", 1),
    "meta-llama-Llama-3.2-3B-Instruct": ("assistant<|end_header_id|>\n\n", "<|eot_id|>", 1),
    "meta-llama-Llama-3.3-70B-Instruct": ("assistant<|end_header_id|>\n\n", "<|eot_id|>", 1),
    "unsloth-mistral-Devstral-Small-2507": ("[/INST]", "</s>", 2),
    "Mistral-Small-3.2-24B-Instruct-2506": ("[/INST]", "</s>", 2),
}


@pytest.mark.skipif(
    "LLORCH_LLAMA_CPP_MODELS" not in os.environ,
    reason="LLORCH_LLAMA_CPP_MODELS does not name llama.cpp's models folder",
)
@pytest.mark.parametrize("name", WRITTEN)
def test_calls_are_asked_for_as_the_models_template_writes_them(name: str, accepts: Accepts) -> None:
    path = Path(os.environ["LLORCH_LLAMA_CPP_MODELS"]) / "templates" / f"{name}.jinja"
    source = path.read_text(encoding="utf-8")
    before, behind, most = WRITTEN[name]
    writing = choose_formats(source).writing
    prompt = ChatPrompt(QUESTION, tools=TOOLS, tool_choice=REQUIRED)
    form = held_calls(prompt, writing)
    assert form is not None
    for made in ((WEATHER,), (TIME,), (WEATHER, TIME))[: 1 + most]:
        messages = [*QUESTION, ChatMessage("assistant", "", tool_calls=made)]
        arguments = json.dumps({"date_string": "26 Jul 2024", "add_generation_prompt": False})
        text = rendered(
            ChatTemplate(source, "<s>", "</s>"), messages, tools=TOOLS, template_arguments=arguments
        )
        written = text.rpartition(before)[2].partition(behind)[0].removeprefix("<think>\n\n</think>\n\n")
        # Some templates write a line break for the content that there is none of.
        assert accepts(form, written.strip()), written
        assert all(f"{call.name}" in written for call in made)


@pytest.mark.parametrize(
    ("name", "template", "one", "two"),
    [
        (
            "hermes",
            "",
            '<tool_call>\n{"name": "get_time", "arguments": {}}\n</tool_call>',
            '<tool_call>\n{"name": "get_time", "arguments": {}}\n</tool_call>\n'
            '<tool_call>\n{"name": "get_weather", "arguments": {"city": "x"}}\n</tool_call>',
        ),
        ("llama3", "", '{"name": "get_time", "parameters": {}}', None),
        (
            "mistral",
            "",
            '[TOOL_CALLS][{"name": "get_time", "arguments": {}}]',
            '[TOOL_CALLS][{"name": "get_time", "arguments": {}}, {"name": "get_time", "arguments": {}}]',
        ),
        (
            "mistral",
            "[ARGS]",
            "[TOOL_CALLS]get_time[ARGS]{}",
            '[TOOL_CALLS]get_time[ARGS]{}[TOOL_CALLS]get_weather[ARGS]{"city": "[ARGS"}',
        ),
        (
            "mistral",
            "[CALL_ID][ARGS]",
            "[TOOL_CALLS]get_time[CALL_ID]abcdefgh1[ARGS]{}",
            "[TOOL_CALLS]get_time[CALL_ID]abcdefgh1[ARGS]{}[TOOL_CALLS]get_time[CALL_ID]ABCDEFGH2[ARGS]{}",
        ),
        (
            "granite",
            "",
            '<|tool_call|>[{"name": "get_time", "arguments": {}}]',
            '<|tool_call|>[{"name": "get_time", "arguments": {}}, {"name": "get_time", "arguments": {}}]',
        ),
    ],
)
def test_a_required_call_is_a_call_of_a_tool_and_nothing_else(
    name: str, template: str, one: str, two: str | None, accepts: Accepts
) -> None:
    several, single = calls(name, template), calls(name, template, parallel_tool_calls=False)
    assert accepts(several, one)
    assert accepts(single, one)
    if two is not None:
        assert accepts(several, two)
        assert not accepts(single, two)
    weather = calls(name, template, tool_choice=ToolChoice(ToolMode.REQUIRED, ("get_weather",)))
    assert not accepts(weather, one)
    for wrong in ("Hello", "", one[:-1], one + " so", one.replace("get_time", "get_date"), "So: " + one):
        assert not accepts(several, wrong), wrong
    unlisted = one.replace("{}", '{"zone": 1}')
    assert not accepts(several, unlisted)


def test_arguments_keep_the_schema_and_no_tool_sees_anothers_definitions(accepts: Accepts) -> None:
    def tool(name: str, parameters: object) -> str:
        return json.dumps({"type": "function", "function": {"name": name, "parameters": parameters}})

    size = {"$defs": {"x": {"enum": ["S", "L"]}}, "properties": {"size": {"$ref": "#/$defs/x"}}}
    count = {
        "$defs": {"x": {"type": "integer"}},
        "type": ["object", "null"],
        "properties": {"n": {"$ref": "#/$defs/x"}},
        "required": ["n"],
    }
    open_ = {"type": "object", "properties": {}, "additionalProperties": True}
    tools = (tool("a", size), tool("b", count), tool("c", open_), tool("d", None), '{"name": "e"}')
    form = calls("llama3", tools=tools)
    for name, accepted, refused in [
        ("a", ['{"size": "S"}', "{}"], ['{"size": 1}', '{"other": 1}']),
        ("b", ['{"n": 1}'], ["{}", '{"n": "S"}', "null"]),
        ("c", ["{}", '{"z": [null]}'], ["[]"]),
        ("d", ["{}"], ['{"z": 1}']),
        ("e", ["{}"], ['{"z": 1}']),
    ]:
        for text in accepted:
            assert accepts(form, f'{{"name": "{name}", "parameters": {text}}}'), (name, text)
        for text in refused:
            assert not accepts(form, f'{{"name": "{name}", "parameters": {text}}}'), (name, text)


def test_a_tools_name_is_text_whatever_is_in_it(accepts: Accepts) -> None:
    for name in ("get", "gét 😀", 'q"\\\n\x7f\u2028', "<[3]>", "@part0", "<|eot_id|> x"):
        tools = (json.dumps({"function": {"name": name}}), TOOLS[1])
        form = calls("hermes", tools=tools)
        text = json.dumps(name, ensure_ascii=False)
        written = f'<tool_call>\n{{"name": {text}, "arguments": {{}}}}\n</tool_call>'
        # As the tokenizer reads texts, a name may look like a special token, which it is not.
        assert accepts(form, written) is ("<|eot_id|>" not in name)


BAD = [
    ({"tools": ()}, "tool_choice", "requires a call and there are no tools"),
    ({"tool_choice": ToolChoice(ToolMode.REQUIRED, ("x",))}, "tool_choice", "found 'x', expected names"),
    ({"tool_choice": ToolChoice(ToolMode.AUTO, ("x",))}, "tool_choice", "get_weather"),
    ({"tool_choice": ToolChoice(ToolMode.AUTO, ("x",)), "tools": ()}, "tool_choice", "has no tools"),
    ({"tool_choice": ToolChoice(ToolMode.NONE, ("x",))}, "tool_choice", "names tools with none"),
]


@pytest.mark.parametrize(("fields", "field", "problem"), BAD)
def test_a_choice_that_cannot_be_is_refused(fields: dict[str, object], field: str, problem: str) -> None:
    prompt = ChatPrompt(QUESTION, **{"tools": TOOLS, "tool_choice": REQUIRED, **fields})  # type: ignore[arg-type]
    with pytest.raises(InvalidRequestError) as caught:
        read_input(prompt)
    [violation] = caught.value.violations
    assert violation.field == f"input.chat.{field}"
    assert problem in violation.description


BAD_TOOLS = [
    ('{"function": {"name": "f", "parameters": {"type": "string"}}}', "the type 'string'"),
    ('{"function": {"name": "f", "parameters": [1]}}', "found a JSON list"),
    ('{"function": {"name": "f", "parameters": true}}', "found a JSON bool"),
    ('{"function": {}}', "a function name of 0 characters"),
    ('{"kind": "other"}', "a function name of 0 characters"),
    ('{"function": {"name": 3}}', "a function name of 0 characters"),
    (json.dumps({"name": "f" * 300}), "a function name of 300 characters"),
    (json.dumps({"name": "two words"}), "found the function name 'two words'"),
]


@pytest.mark.parametrize(("tool", "problem"), BAD_TOOLS)
def test_a_tool_that_cannot_be_called_is_named(tool: str, problem: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        calls("mistral", "[ARGS]", tools=(TOOLS[0], tool))
    [violation] = caught.value.violations
    assert violation.field.startswith("input.chat.tools[1]")
    assert problem in violation.description
    named = ToolChoice(ToolMode.REQUIRED, ("get_weather",))
    assert len(calls("mistral", "[ARGS]", tools=(TOOLS[0], tool), tool_choice=named).tools) == 1


def test_a_call_is_refused_where_the_model_has_no_format_or_there_is_too_much() -> None:
    prompt = ChatPrompt(QUESTION, tools=TOOLS, tool_choice=REQUIRED)
    with pytest.raises(InvalidRequestError, match="--tool-format"):
        held_calls(prompt, None)
    huge = json.dumps({"name": "f", "parameters": {"description": "x" * 2**18}})
    with pytest.raises(InvalidRequestError, match=r"input\.chat\.tools: found 26\d+ bytes"):
        calls("hermes", tools=(huge,))


def test_tools_that_cannot_be_called_are_left_to_the_template_where_no_call_is_required() -> None:
    """Some templates know tools of their own, which have no name."""
    [form] = [each for each in TOOL_FORMATS if each.name == "hermes"]

    def held(*tools: str) -> ToolCalls | None:
        return held_calls(ChatPrompt(QUESTION, tools=tools), form.writing(""))

    assert held('{"type": "browser"}') is None
    made = held('{"type": "browser"}', TOOLS[1])
    assert made is not None
    assert [tool.name for tool in made.tools] == ["get_time"]
    assert held() is None


def test_only_what_may_be_called_without_being_required_is_shown() -> None:
    def seen(choice: ToolChoice) -> list[str]:
        tools = read_input(ChatPrompt(QUESTION, tools=TOOLS, tool_choice=choice)).tools
        return [tool["function"]["name"] for tool in tools or ()]

    both = ["get_weather", "get_time"]
    assert seen(ToolChoice()) == both
    assert seen(ToolChoice(ToolMode.AUTO, ("get_time",))) == ["get_time"]
    assert seen(REQUIRED) == seen(ToolChoice(ToolMode.REQUIRED, ("get_time",))) == both
    assert seen(ToolChoice(ToolMode.NONE)) == []


# Forms behind thoughts.

OPENS = {
    # template, its variables: whether it opens a thought
    ("Qwen-QwQ-32B", "{}"): True,
    ("deepseek-ai-DeepSeek-R1-Distill-Llama-8B", "{}"): True,
    ("deepseek-ai-DeepSeek-R1-Distill-Qwen-32B", "{}"): True,
    ("llama-cpp-deepseek-r1", "{}"): True,
    ("Qwen-Qwen3-0.6B", "{}"): False,
    ("Qwen-Qwen3-0.6B", '{"enable_thinking": false}'): False,
    ("Qwen-Qwen2.5-7B-Instruct", "{}"): False,
}


@pytest.mark.skipif(
    "LLORCH_LLAMA_CPP_MODELS" not in os.environ,
    reason="LLORCH_LLAMA_CPP_MODELS does not name llama.cpp's models folder",
)
@pytest.mark.parametrize(("name", "arguments"), OPENS)
def test_a_form_waits_where_the_models_template_opens_a_thought(name: str, arguments: str) -> None:
    path = Path(os.environ["LLORCH_LLAMA_CPP_MODELS"]) / "templates" / f"{name}.jinja"
    source = path.read_text(encoding="utf-8")
    prompt = ChatPrompt(QUESTION, template_arguments=arguments)
    text = rendered(ChatTemplate(source, "<s>", "</s>"), QUESTION, template_arguments=arguments)
    form = held_form(choose_formats(source), prompt, text, JsonObject())
    opened = AfterThought(JsonObject(), "</think>")
    assert form == (opened if OPENS[name, arguments] else JsonObject())
    assert held_form(choose_formats(source, reasoning="none"), prompt, text, JsonObject()) == JsonObject()


FORMS = [
    (JsonSchema('{"type": "integer"}'), "12", "x"),
    (JsonObject(), '{"a": 1}', "a"),
    (Choice(("yes", "no")), "yes", "maybe"),
    (Choice((" yes", "no")), " yes", "yes"),
    (Regex("[ab]+"), "abba", "abc"),
    (Grammar('start: "x" NUMBER\nNUMBER: /[0-9]+/'), "x12", "12"),
    (calls("mistral"), '[TOOL_CALLS][{"name": "get_time", "arguments": {}}]', "get_time"),
]


@pytest.mark.parametrize("end", ["</think>", "</thought>"])
@pytest.mark.parametrize(("form", "right", "wrong"), FORMS)
def test_a_form_begins_behind_the_thought(
    form: JsonSchema, right: str, wrong: str, end: str, accepts: Accepts
) -> None:
    """``</think>`` is a special token of the tokenizer, ``</thought>`` is text."""
    held = AfterThought(form, end)
    for thought in ("", "hm ", "{<thin</</tho\n{} [ARGS", "1 < 2 " * 50):
        assert accepts(held, f"{thought}{end}{right}")
        assert not accepts(held, f"{thought}{end}{wrong}")
    assert not accepts(held, f"{right}")
    assert not accepts(held, f"hm{end}")
    keeps_space = isinstance(form, Regex | Grammar) or right.startswith(" ")
    assert accepts(held, f"hm\n{end}\n\n{right}") is not keeps_space


def test_the_end_of_a_thought_counts_even_where_it_is_spelled_out() -> None:
    """The parser of answers sees text, not tokens."""
    tokenizer = Tokenizer(byte_level(("</think>",)))
    vocabulary = build(tokenizer, tokenizer.vocab_size, frozenset())
    grammar = compose(AfterThought(Choice(("yes",)), "</think>"), tokenizer.special_tokens)

    def consumed(text: str) -> int:
        matcher = llguidance.LLMatcher(vocabulary.trie, grammar, log_level=0)
        ids = [tokenizer.encode(char, add_special_tokens=False)[0] for char in text]
        found: int = matcher.try_consume_tokens(ids)
        return found

    assert consumed("a</think>yes") == len("a</think>yes")
    assert consumed("a</think>b") == len("a</think>")


def test_what_a_family_writes_around_its_answer_is_around_the_form(accepts: Accepts) -> None:
    held = AfterThought(JsonObject(), "</end>", "<response>", "</response>")
    assert accepts(held, "hm</end>\n<response>{}</response>")
    assert not accepts(held, "hm</end>{}")


def test_every_format_has_a_writing() -> None:
    assert all(isinstance(form.writing(""), CallWriting) for form in TOOL_FORMATS)
