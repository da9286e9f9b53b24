"""``llorch generate`` with forms of answers: flags, files and refusals, here and at a worker."""

from __future__ import annotations

import json
import re

import pytest

from support.harness.processes import llorch, llorch_here

pytest.importorskip("llguidance")

PROMPT = ("--prompt", "Paris is", "--temperature", "1", "--seed", "4", "--max-tokens", "90")
SCHEMA = {
    "type": "object",
    "properties": {"n": {"type": "integer", "minimum": 0, "maximum": 9}},
    "required": ["n"],
    "additionalProperties": False,
}


def answer(target, *flags):
    return llorch_here("generate", *target, *PROMPT, *flags, "--json").document()


@pytest.fixture(params=["here", "connected"])
def target(request):
    if request.param == "here":
        return (request.getfixturevalue("tiny"),)
    return ("--connect", request.getfixturevalue("tiny_worker").address)


def test_a_schema_as_text_and_as_a_file(target, tmp_path):
    file = tmp_path / "schema.json"
    file.write_text(json.dumps(SCHEMA))
    found = [answer(target, "--json-schema", value) for value in (json.dumps(SCHEMA), str(file))]
    assert found[0]["text"] == found[1]["text"]
    assert json.loads(found[0]["text"])["n"] in range(10)
    assert found[0]["finish_reason"] == "stop"


def test_an_expression(target):
    assert re.fullmatch("[a-f]{3}-[0-9]{2}", answer(target, "--regex", "[a-f]{3}-[0-9]{2}")["text"])


def test_choices(target):
    assert answer(target, "--choice", "left", "--choice", "right")["text"] in ("left", "right")


def test_a_grammar(target, tmp_path):
    file = tmp_path / "grammar.lark"
    file.write_text('start: "(" start ")" | DIGIT\nDIGIT: /[0-9]/\n')
    found = answer(target, "--grammar", file)
    pattern = r"\(*" if found["finish_reason"] == "length" else r"\(*[0-9]\)*"
    assert re.fullmatch(pattern + r"[0-9]?\)*", found["text"])


def test_any_object(target):
    assert answer(target, "--json-object")["text"].startswith("{")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--regex", "("), "sampling.regex: cannot be used"),
        (("--json-schema", "{"), "sampling.json_schema: not JSON"),
        (("--regex", ""), "sampling.regex: found 0 bytes"),
        (("--regex", "a", "--choice", "b"), "found --regex and --choice"),
        (("--json-schema", "missing.json"), "missing.json, which cannot be read"),
    ],
)
def test_what_is_refused(target, flags, message):
    outcome = llorch_here("generate", *target, *PROMPT, *flags)
    assert outcome.code == 2
    assert message in outcome.error()


def test_files_are_bounded_and_text(target, tmp_path):
    file = tmp_path / "big.lark"
    file.write_bytes(b"x" * (256 * 1024 + 1))
    assert "more than 262144 bytes" in llorch_here("generate", *target, *PROMPT, "--grammar", file).error()
    file.write_bytes(b"\xff")
    assert "not UTF-8" in llorch_here("generate", *target, *PROMPT, "--grammar", file).error()


def test_a_grammar_that_would_break_the_process_is_refused(tiny, tmp_path):
    rules = "\n".join(f'r{i}: "b" r{i + 1} | "c"' for i in range(5000))
    file = tmp_path / "deep.lark"
    file.write_text(f'start: r0\n{rules}\nr5000: "a"\n')
    outcome = llorch("generate", tiny, *PROMPT, "--grammar", file)
    assert outcome.code == 2
    assert "nested too deeply" in outcome.error()
