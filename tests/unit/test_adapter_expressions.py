"""Expressions of adapters match what Python's ``re`` matches, in bounded time, or are not supported."""

from __future__ import annotations

import re
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llorch_export.adapter.targets import read_pattern
from llorch_export.config.expressions import compiled
from llorch_export.config.notation import UnsupportedExpressionError
from llorch_serve.errors import ArtifactError

NAMES = (
    "",
    "lm_head",
    "model.embed_tokens",
    *(
        f"model.layers.{layer}.{module}"
        for layer in (0, 1, 10, 31)
        for module in ("self_attn.q_proj", "self_attn.o_proj", "mlp.up_proj", "mlp.gate_up_proj")
    ),
)
UNSLOTH = (
    r"(?:.*?(?:language|text).*?(?:self_attn|attention|attn|mlp|feed_forward|ffn|dense).*?(?:k_proj|v_proj|"
    r"q_proj|out_proj|fc1|fc2|o_proj|gate_proj|up_proj|down_proj).*?)|(?:\bmodel\.layers\.[\d]{1,}\."
    r"(?:self_attn|attention|attn|mlp|feed_forward|ffn|dense)\.(?:(?:q_proj|k_proj|v_proj|o_proj|gate_proj|"
    r"up_proj|down_proj)))"
)
EXPRESSIONS = (
    UNSLOTH,
    r"llm\..*layers\.\d+\.self_attn\.(q_proj|k_proj)",
    r".*\.(q_proj|v_proj)",
    r"^model\.layers\.[0-9]\.mlp.*$",
    r"model.layers.(?P<layer>\d{2}).*",
    r".*(?:up|gate)_proj",
    r"[^.]+\.[\w]*",
    r"\bmodel\b.*_proj\Z",
    r"(model\.)?(layers\.){0,1}.*?o_proj",
    r"(?:)|lm_head",
    r"model\.layers\.(0|3{1,2}1?)\..*",
    r"\w+(\.\w+)*",
    r"[a-y_.\d-]{3,}?",
    "{model}",
)


@pytest.mark.parametrize("expression", EXPRESSIONS)
def test_an_expression_matches_what_re_matches(expression: str) -> None:
    found = compiled(expression)
    for name in NAMES:
        assert found.matches(name) is (re.fullmatch(expression, name) is not None), name


_ATOMS = st.sampled_from(["a", "b", ".", r"\.", r"\d", "[ab]", "[^a]", "(a|b)", "(?:ab|)"])
_REPEATS = st.sampled_from(["", "*", "+", "?", "*?", "{2}", "{1,3}"])
_PARTS = st.builds(lambda a, r: a + r, _ATOMS, _REPEATS) | st.sampled_from([r"\b", r"\B", "^", "$"])


@settings(max_examples=100, deadline=None)
@given(st.lists(_PARTS, max_size=6).map("".join), st.text("ab.1", min_size=1, max_size=8))
def test_any_expression_matches_what_re_matches(expression: str, name: str) -> None:
    assert compiled(expression).matches(name) is (re.fullmatch(expression, name) is not None)


@pytest.mark.parametrize(
    "expression",
    [
        "(?=a)b", "(?!a).*", r"(a)\1", "(?i)a", "a++", "(a", "a)", "[a", "*a", "^*", "a{2000}", r"\p",
        "(" * 30 + ")" * 30, "a" * 3000, "((a{500}){500})", "(?P<1>a)", "(((){999}){999}){999}", "\\",
    ],
)  # fmt: skip
def test_what_an_automaton_cannot_do_is_not_supported(expression: str) -> None:
    with pytest.raises(UnsupportedExpressionError):
        compiled(expression)


@pytest.mark.parametrize("expression", ["(a*)*b", "(a|a)*b", "(.*)*(.*)*(.*)*x", "(a?){300}a{300}"])
def test_a_hostile_expression_takes_no_time(expression: str) -> None:
    started = time.process_time()
    compiled(expression).matches("a" * 60)
    assert time.process_time() - started < 2


def test_keys_of_patterns_are_ends_of_names_or_expressions_as_peft_matches_them() -> None:
    for key in (
        "q_proj",
        "self_attn.q_proj",
        "^model.layers.0.self_attn.q_proj",
        "^layers.0.*",
        ".*q_proj",
        "q|o_proj",
    ):
        pattern = read_pattern(key, "here")
        for name in NAMES:
            assert pattern.have(name) is (re.match(rf"(.*\.)?({key})$", name) is not None), (key, name)
    with pytest.raises(ArtifactError, match="not matched here"):
        read_pattern("(?<=a)b", "here")
