"""Forms of answers before anyone reads their language: sizes, and what becomes of a schema's text."""

from __future__ import annotations

import json

import pytest

from llorch_serve.errors import InvalidRequestError
from llorch_serve.sampling.params import SamplingParams
from llorch_serve.structured.spec import (
    MAX_CHOICES,
    MAX_TEXT_BYTES,
    Choice,
    Grammar,
    JsonObject,
    JsonSchema,
    Regex,
    violations,
)
from llorch_serve.structured.translate import translate

BAD = [
    (JsonSchema(""), "p.json_schema", "0 bytes"),
    (JsonSchema("x" * (MAX_TEXT_BYTES + 1)), "p.json_schema", str(MAX_TEXT_BYTES + 1)),
    (Regex("é" * (MAX_TEXT_BYTES // 2 + 1)), "p.regex", str(MAX_TEXT_BYTES + 2)),
    (Grammar("\ud800"), "p.grammar", "surrogate"),
    (Choice(()), "p.choice", "0 options"),
    (Choice(("a",) * (MAX_CHOICES + 1)), "p.choice", f"{MAX_CHOICES + 1} options"),
    (Choice(("a", "")), "p.choice[1]", "0 bytes"),
    (Choice(("a" * MAX_TEXT_BYTES, "b")), "p.choice", str(MAX_TEXT_BYTES + 1)),
]
GOOD = [
    JsonSchema("x" * MAX_TEXT_BYTES),
    JsonObject(),
    Regex("a"),
    Choice(("a",) * MAX_CHOICES),
    Choice(("a" * MAX_TEXT_BYTES,)),
    Grammar("start:"),
]


@pytest.mark.parametrize(("form", "field", "found"), BAD)
def test_what_is_too_large_or_empty_is_named(form, field, found):
    (violation,) = violations(form, prefix="p")
    assert violation.field == field
    assert found in violation.description


@pytest.mark.parametrize("form", GOOD)
def test_what_fits_passes(form):
    assert violations(form, prefix="p") == []


def test_a_flood_of_bad_options_names_only_some():
    assert len(violations(Choice(("",) * MAX_CHOICES), prefix="p")) == 16


def test_a_form_is_checked_with_the_other_parameters():
    params = SamplingParams(temperature=-1, structured=Regex(""))
    assert [v.field for v in params.violations(vocab_size=9)] == ["sampling.temperature", "sampling.regex"]


@pytest.mark.parametrize(
    ("schema", "found"),
    [
        ("{", "not JSON"),
        ("[1]", "JSON list"),
        ("false", "JSON bool"),
        ('{"a": NaN}', "not JSON"),
        ("[" * 9999, "not JSON"),
    ],
)
def test_a_schema_must_be_a_json_object(schema, found):
    with pytest.raises(InvalidRequestError, match=found) as caught:
        translate(JsonSchema(schema))
    assert caught.value.violations[0].field == "sampling.json_schema"


def test_a_schema_cannot_leave_its_place():
    with pytest.raises(InvalidRequestError, match="not JSON"):
        translate(JsonSchema('{} }, {"lark_grammar": "start: /a/"'))


def test_a_schema_keeps_its_order_and_its_own_options():
    schema = {"properties": {"b": {}, "a": {}}, "x-guidance": {"item_separator": ", "}}
    (grammar,) = json.loads(translate(JsonSchema(json.dumps(schema))))["grammars"]
    assert list(grammar["json_schema"]["properties"]) == ["b", "a"]
    assert grammar["json_schema"]["x-guidance"].keys() == {"item_separator", "whitespace_pattern"}
