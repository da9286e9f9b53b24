"""Masks against what text they let through, for every kind of tokenizer; and how an answer may end."""

from __future__ import annotations

import itertools
import json
import re
import threading
from types import SimpleNamespace

import numpy as np
import pytest
import tokenizers

from llorch_serve.errors import InvalidRequestError
from llorch_serve.structured import constraint as constraint_module
from llorch_serve.structured.compiler import GrammarCompiler
from llorch_serve.structured.constraint import MaskThread
from llorch_serve.structured.spec import Choice, Grammar, JsonObject, JsonSchema, Regex
from llorch_serve.text.tokenizer import Tokenizer
from support.builders.checkpoints import EOS_ID, TURN_END_ID, tiny_tokenizer_json
from support.builders.tiny_tokenizers import BUILDERS
from support.harness.structured_walk import allowed, compiled, constrained, walk

pytest.importorskip("llguidance")

STOPS = frozenset((EOS_ID, TURN_END_ID))
OPTIONS = ("red", "reddish brown", "größe: 3 €", 'a "quoted"\\ \n\t line', "/* no # comment */", "日本")


def tiny():
    return tokenizers.Tokenizer.from_str(tiny_tokenizer_json())


@pytest.fixture(scope="module", params=[*BUILDERS, "tiny"])
def any_compiler(request):
    inner = BUILDERS.get(request.param, tiny)()
    tokenizer = Tokenizer(inner)
    # Forty ids more than tokenizer.json knows, as padded embeddings have.
    stop_ids = frozenset((max(tokenizer.special_tokens),))
    made = GrammarCompiler(tokenizer, tokenizer.vocab_size + 40, stop_ids, most_tokens=2**20)
    yield made, tokenizer, stop_ids
    made.close()


@pytest.fixture(scope="module")
def compiler():
    made = GrammarCompiler(Tokenizer(tiny()), 512, STOPS, most_tokens=2**20)
    yield made
    made.close()


def test_every_option_is_reached_and_nothing_else(any_compiler):
    compiler, tokenizer, stop_ids = any_compiler
    found = set()
    for seed in range(120):
        ids = walk(constrained(compiler, Choice(OPTIONS), stop_ids), seed=seed, stop_ids=stop_ids)
        found.add(tokenizer.decode(ids, keep_special_tokens=True))
    assert found == set(OPTIONS)


def test_text_spells_no_special_token_and_no_unknown_one(any_compiler):
    compiler, tokenizer, _ = any_compiler
    anything = constrained(compiler, Regex(r"(?s:.*)"))
    ids = set(allowed(anything))
    assert ids.isdisjoint(tokenizer.special_tokens)
    assert max(ids) < tokenizer.vocab_size
    assert len(ids) > 200


@pytest.mark.parametrize("seed", range(20))
def test_expressions_hold_from_first_to_last_character(any_compiler, seed):
    compiler, tokenizer, _ = any_compiler
    pattern = r"[A-C]{2,4}(-[0-9]{3}| [éü]+x)"
    text = tokenizer.decode(walk(constrained(compiler, Regex(pattern)), seed=seed), keep_special_tokens=True)
    assert re.fullmatch(pattern, text)


def test_any_json_object_is_json(any_compiler):
    compiler, tokenizer, _ = any_compiler
    ended = 0
    for seed in range(30):
        first = constrained(compiler, JsonObject())
        ids = walk(first, seed=seed, most=3000)
        if first.ended:
            ended += 1
            assert isinstance(json.loads(tokenizer.decode(ids, keep_special_tokens=True)), dict)
    assert ended > 0


def test_white_space_in_json_ends(compiler):
    held = constrained(compiler, JsonSchema('{"type": "object", "properties": {"a": {}}, "required": ["a"]}'))
    tokenizer = Tokenizer(tiny())
    held.advance(tokenizer.encode("{", add_special_tokens=False)[0])
    (space,) = tokenizer.encode("\n", add_special_tokens=False)
    for _ in range(20):
        assert space in allowed(held)
        held.advance(space)
    assert space not in allowed(held)


def test_a_grammar_counts_brackets(compiler):
    tokenizer = Tokenizer(tiny())
    grammar = Grammar('start: pair\npair: "(" pair ")" | "x"')
    for seed in range(10):
        text = tokenizer.decode(
            walk(constrained(compiler, grammar), seed=seed, most=5000), keep_special_tokens=True
        )
        assert re.fullmatch(r"\(*x\)*", text)
        assert text.count("(") == text.count(")")


def test_stop_tokens_are_possible_exactly_where_the_text_is_complete(compiler):
    held = constrained(compiler, Regex("a(bc)*"), STOPS)
    tokenizer = Tokenizer(tiny())
    for char, complete in (("a", False), ("b", True), ("c", False), ("b", True)):
        assert STOPS.issubset(allowed(held)) is complete
        assert STOPS.isdisjoint(allowed(held)) is not complete
        held.advance(tokenizer.encode(char, add_special_tokens=False)[0])
    assert not held.ended
    held.advance(tokenizer.encode("c", add_special_tokens=False)[0])
    held.advance(EOS_ID)
    assert held.ended


def test_ignored_stop_tokens_stay_forbidden(compiler):
    held = constrained(compiler, Regex("a*"))
    assert STOPS.isdisjoint(allowed(held))
    assert not held.ended


def test_an_ordinary_stop_token_is_the_grammars_to_allow(compiler):
    (letter,) = Tokenizer(tiny()).encode("a", add_special_tokens=False)
    assert letter not in allowed(constrained(compiler, Regex("b*"), STOPS | {letter}))
    assert letter in allowed(constrained(compiler, Regex("a+"), STOPS | {letter}))


def test_a_stop_token_that_is_plain_text_is_not_spelt_by_accident():
    tokenizer = Tokenizer(tiny())
    (letter,) = tokenizer.encode("a", add_special_tokens=False)
    made = GrammarCompiler(tokenizer, 512, frozenset((letter,)), most_tokens=2**20)
    try:
        held = constrained(made, Regex("[ab]+"), frozenset((letter,)))
        assert letter not in allowed(held)
        held.advance(tokenizer.encode("b", add_special_tokens=False)[0])
        assert letter in allowed(held)
    finally:
        made.close()


def test_a_grammar_may_name_a_special_token(compiler):
    name = Tokenizer(tiny()).special_tokens[TURN_END_ID]
    assert allowed(constrained(compiler, Grammar(f'start: {name} "a"'))) == [TURN_END_ID]


def test_a_complete_text_ends_at_once(compiler):
    tokenizer = Tokenizer(tiny())
    held = constrained(compiler, Choice(("ab",)), STOPS)
    for token in tokenizer.encode("ab", add_special_tokens=False):
        assert not held.complete
        held.advance(token)
    assert held.complete
    assert held.ended


def test_a_grammar_of_nothing_has_ended_before_it_begins(compiler):
    assert constrained(compiler, Regex("(){3}"), STOPS).ended


def test_where_nothing_fits_the_answer_fails(compiler):
    held = constrained(compiler, Regex("ab"))
    held.advance(Tokenizer(tiny()).encode("z", add_special_tokens=False)[0])
    assert not held.ended
    with pytest.raises(InvalidRequestError, match=r"sampling\.regex: the answer cannot go on"):
        held.forbidden()


def test_a_failed_grammar_is_compiled_anew(compiler):
    held = constrained(compiler, Regex("abab"))
    held.advance(0)
    with pytest.raises(InvalidRequestError):
        held.forbidden()
    assert compiler.begin(Regex("abab"), ticket=1, done=lambda _: None) is None
    assert len(allowed(constrained(compiler, Regex("abab")))) >= 1


@pytest.mark.parametrize(
    ("call_s", "tokens"),
    [(0.5, 1), (0.06, 3), (0.009, 38), (0.0045, None)],
    ids=["one is very slow", "some are slow", "all are rather slow", "all are within what each may take"],
)
def test_tokens_that_take_too_long_together_end_the_answer(compiler, monkeypatch, call_s, tokens):
    """Neighbours wait for the sum. Each token takes two calls of the library, on a clock of the test's
    own.
    """
    ticks = itertools.count()
    clock = SimpleNamespace(thread_time=lambda: (next(ticks) + 1) // 2 * call_s)
    monkeypatch.setattr(constraint_module, "time", clock)
    (letter,) = Tokenizer(tiny()).encode("a", add_special_tokens=False)
    held = constrained(compiler, Regex("[a-z]*q"))
    for token in range(1, 200):
        held.advance(letter)
        if token == tokens:
            with pytest.raises(InvalidRequestError, match="expected something simpler"):
                held.forbidden()
            return
        held.forbidden()
    assert tokens is None


def test_masks_from_the_other_thread_are_the_same(compiler):
    masks = MaskThread()
    (letter,) = Tokenizer(tiny()).encode("a", add_special_tokens=False)
    here, there = (constrained(compiler, Regex("a[b-y]*z")) for _ in range(2))
    for held in (here, there):
        held.advance(letter)
    masks.start([there])
    assert np.array_equal(here.forbidden(), there.forbidden())
    masks.close()


REFUSED = [
    (Regex("("), "sampling.regex", "unclosed group"),
    (Regex("(?=a)b"), "sampling.regex", "look-ahead"),
    (JsonSchema('{"type": "strin"}'), "sampling.json_schema", "strin"),
    (
        JsonSchema('{"type": "array", "uniqueItems": true}'),
        "sampling.json_schema.uniqueItems",
        "uniqueItems",
    ),
    (JsonSchema('{"$ref": "http://example.com/x"}'), "sampling.json_schema", "example.com"),
    (JsonSchema("{"), "sampling.json_schema", "not JSON"),
    (Grammar("start: missing"), "sampling.grammar", "missing"),
    (Grammar("start: start"), "sampling.grammar", "no text"),
    (Grammar("start: <|no_such_token|>"), "sampling.grammar", "no_such_token"),
]


@pytest.mark.parametrize(("form", "field", "found"), REFUSED)
def test_a_bad_grammar_is_refused_with_the_reason(compiler, form, field, found):
    error = compiled(compiler, form)
    assert isinstance(error, InvalidRequestError)
    (violation,) = error.violations
    assert violation.field == field
    assert found in violation.description
    assert "\n" not in violation.description
    assert len(violation.description) < 400


def test_masks_are_computed_where_they_are_asked_for_if_no_thread_can_be_started(compiler, monkeypatch):
    held, tokenizer = constrained(compiler, Regex("a(bc)*"), STOPS), Tokenizer(tiny())
    masks = MaskThread()

    def refuse(_thread):
        raise RuntimeError("can't start new thread")

    held.advance(tokenizer.encode("a", add_special_tokens=False)[0])
    with monkeypatch.context() as patch:
        patch.setattr("threading.Thread.start", refuse)
        masks.start([held])
    assert STOPS.issubset(allowed(held))
    held.advance(tokenizer.encode("b", add_special_tokens=False)[0])
    masks.start([held])  # a thread can be started again, and finds nothing of the first job
    assert STOPS.isdisjoint(allowed(held))
    masks.close()


def test_a_thread_that_was_ended_is_not_started_again(compiler, monkeypatch):
    held = constrained(compiler, Regex("ab"))
    masks = MaskThread()
    masks.close()
    held.advance(Tokenizer(tiny()).encode("a", add_special_tokens=False)[0])
    masks.start([held])
    masks.start([held])
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("llorch-mask")]
    assert not held.forbidden().all()


def test_another_failure_of_the_thread_is_no_secret(compiler, monkeypatch):
    masks = MaskThread()

    def fail(_thread):
        raise RuntimeError("something else")

    with monkeypatch.context() as patch:
        patch.setattr("threading.Thread.start", fail)
        with pytest.raises(RuntimeError, match="something else"):
            masks.start([])
    masks.close()
