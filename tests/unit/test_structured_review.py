"""Schemas as clients' libraries write them: what constrains nothing is left out, the rest is refused by its
place.
"""

from __future__ import annotations

import json
import re

import pytest

from llorch_serve.errors import InvalidRequestError
from llorch_serve.structured.compiler import GrammarCompiler
from llorch_serve.structured.schema_review import MAX_DEPTH, without_vacuous
from llorch_serve.structured.spec import Choice, JsonSchema
from llorch_serve.text.tokenizer import Tokenizer
from support.builders.checkpoints import EOS_ID, tiny_tokenizer_json
from support.harness.structured_walk import allowed, compiled, constrained

pytest.importorskip("llguidance")

TOKENIZER = Tokenizer.from_json(tiny_tokenizer_json().encode(), origin="tiny")

# vercel/ai#20621: zod's records; pydantic-ai#5508: pydantic's bytes and decimals; what OpenAPI tools write.
VACUOUS = [
    {"type": "object", "propertyNames": {"type": "string"}, "additionalProperties": {"type": "number"}},
    {"type": "object", "propertyNames": {"type": ["string", "null"], "description": "a name"}},
    {"type": "object", "propertyNames": {}},
    {"type": "object", "propertyNames": True},
    {"type": "string", "format": "binary"},
    {"type": "string", "format": "password"},
    {"type": "integer", "format": "int64"},
    {"type": ["number", "null"], "format": "double"},
    {"type": "array", "uniqueItems": False},
    {"type": "object", "unevaluatedProperties": True, "dependentRequired": {}, "not": False},
    {"type": "array", "items": {"type": "string"}, "minContains": 1},
    {"type": "string", "if": {"minLength": 3}},
    {"type": "string", "then": {"minLength": 3}},
]
REFUSED = [
    ({"type": "object", "propertyNames": {"pattern": "^a"}}, ".propertyNames"),
    ({"type": "object", "propertyNames": {"type": "number"}}, ".propertyNames"),
    ({"type": "string", "pattern": "^(?!a).*$"}, ".pattern"),
    ({"type": "string", "pattern": "(?<=a)b"}, ".pattern"),
    ({"type": "string", "pattern": "\\bfoo"}, ".pattern"),
    ({"type": "string", "pattern": "(a)\\1"}, ".pattern"),
    ({"type": "string", "format": "uri-reference"}, ".format"),
    ({"type": "string", "format": "byte"}, ".format"),
    ({"type": "array", "uniqueItems": True}, ".uniqueItems"),
    ({"not": {"type": "string"}}, ".not"),
    ({"type": "object", "patternProperties": {"^(?=a)": {}}}, ".patternProperties.^(?=a)"),
]


@pytest.fixture(scope="module")
def compiler():
    made = GrammarCompiler(TOKENIZER, 512, frozenset((EOS_ID,)), most_tokens=2**20)
    yield made
    made.close()


def around(schema: object) -> dict[str, object]:
    """Return an object with properties of that schema, in the places that schemas have."""
    return {
        "type": "object",
        "properties": {
            "plain": {"type": "string"},
            "a": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/d"}]},
        },
        "required": ["a"],
        "$defs": {"d": schema},
    }


def accepts(constraint, text):
    """Tell whether an answer may be this text."""
    stops = frozenset((EOS_ID,))
    for token in TOKENIZER.encode(text, add_special_tokens=False):
        if token not in allowed(constraint):
            return False
        constraint.advance(token)
    return constraint.ended or bool(stops & set(allowed(constraint)))


@pytest.mark.parametrize("schema", VACUOUS, ids=json.dumps)
def test_what_constrains_nothing_is_accepted(compiler, schema):
    constrained(compiler, JsonSchema(json.dumps(around(schema))))


@pytest.mark.parametrize(("schema", "place"), REFUSED, ids=lambda value: json.dumps(value))
def test_what_cannot_be_held_is_named_by_its_place(compiler, schema, place):
    refusal = compiled(compiler, JsonSchema(json.dumps(around(schema))))
    assert isinstance(refusal, InvalidRequestError)
    (violation,) = refusal.violations
    assert violation.field == f"sampling.json_schema.$defs.d{place}"
    assert "cannot be used" in violation.description
    assert "\n" not in violation.description


def test_a_decimal_of_pydantic_is_held_to(compiler):
    pattern = r"^(?!^[-+.]*$)[+-]?0*\d*\.?\d*$"
    schema = {"anyOf": [{"type": "number"}, {"type": "string", "pattern": pattern}]}
    for text in ("", "-", ".", "+.", "1", "-1.5", "+.5", "007.", "1.2.3", "1e3", "-0.0"):
        held = constrained(compiler, JsonSchema(json.dumps(schema)))
        assert accepts(held, json.dumps(text)) == bool(re.search(pattern, text)), text


def test_names_of_properties_are_no_keywords():
    schema = {"properties": {"propertyNames": {"type": "string"}, "format": {"type": "string"}, "not": False}}
    assert without_vacuous(schema) == schema
    examples = {"enum": [{"propertyNames": {}}], "const": {"uniqueItems": False}, "default": {"not": False}}
    assert without_vacuous(examples) == examples


def test_a_place_is_one_line(compiler):
    schema = {"properties": {"a\nb": {"type": "string", "pattern": "(?=x)"}}}
    refusal = compiled(compiler, JsonSchema(json.dumps(schema)))
    assert refusal.violations[0].field == "sampling.json_schema.properties.a?b.pattern"


def test_what_is_deep_is_left_as_it_is():
    schema: object = {"uniqueItems": False}
    for _ in range(10 * MAX_DEPTH):
        schema = {"items": schema}
    assert without_vacuous(schema) == schema


@pytest.mark.parametrize("character", ["\x7f", "\x00", "\x1b", "\x85", "\u2028", "\ufeff", '"', "\\", "/"])
def test_a_choice_may_have_any_character(compiler, character):
    text = f"a{character}b"
    assert accepts(constrained(compiler, Choice((text, "z"))), text)
