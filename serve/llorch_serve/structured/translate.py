"""From a form to the text that llguidance compiles. What it yields is still untrusted: ``examiner.py`` tries
it first.
"""

from __future__ import annotations

import json
from typing import Any, Final

import msgspec

from llorch_serve.errors import FieldViolation, InvalidRequestError
from llorch_serve.files.json_errors import NOT_JSON
from llorch_serve.structured.schema_review import place_of_refusal, without_vacuous
from llorch_serve.structured.spec import Choice, Grammar, JsonObject, JsonSchema, Regex, Structured

JSON_WHITESPACE: Final = r"[\x20\x0A\x0D\x09]{1,20}"
"""Between the tokens of JSON. Bounded, because small models like to go on with spaces until max_tokens."""


def translate(form: Structured, *, prefix: str = "sampling") -> str:
    """Return the grammar; needs llguidance. Raises InvalidRequestError for a schema that is no JSON object or
    true.
    """
    match form:
        case Regex(pattern):
            from llguidance import LLMatcher

            return LLMatcher.grammar_from_regex(pattern)
        case Choice(options):
            literals = " | ".join(map(quoted, options))
            return _wrap({"lark_grammar": f"start: OPTION\nOPTION: {literals}"})
        case Grammar(lark):
            return _wrap({"lark_grammar": lark})
        case JsonObject():
            return _json({"type": "object"})
        case JsonSchema(schema):
            return _json(without_vacuous(_parse(schema, f"{prefix}.{form.field}")))


def place_of(form: Structured, reason: str) -> str:
    """Return where in a form the library's refusal points at, as the end of a field's name; empty if it is
    the whole.
    """
    return place_of_refusal(msgspec.json.decode(form.schema), reason) if isinstance(form, JsonSchema) else ""


def quoted(text: str) -> str:
    """Return a text as Lark writes it, which takes no control character as it is."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def _parse(schema: str, field: str) -> dict[str, Any]:
    # llguidance pastes a schema's text between braces of its own, so only what was parsed here may reach it.
    try:
        parsed = msgspec.json.decode(schema)
    except NOT_JSON as error:
        found = f"not JSON ({error}); expected a JSON Schema"
        raise InvalidRequestError([FieldViolation(field, found)]) from error
    if parsed is True:
        return {}
    if not isinstance(parsed, dict):
        found = f"found a JSON {type(parsed).__name__}, expected a JSON Schema: an object"
        raise InvalidRequestError([FieldViolation(field, found)])
    return parsed


def _json(schema: dict[str, Any]) -> str:
    asked = schema.get("x-guidance", {})
    options = {"whitespace_pattern": JSON_WHITESPACE, **asked} if isinstance(asked, dict) else asked
    return _wrap({"json_schema": {**schema, "x-guidance": options}})


def _wrap(grammar: dict[str, Any]) -> str:
    return msgspec.json.encode({"grammars": [grammar]}).decode()
