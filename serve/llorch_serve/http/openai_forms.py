"""The form that an answer is held to, in the shapes of ``response_format`` that clients send.

Used by ``openai_requests.py``.
"""

from __future__ import annotations

import msgspec

from llorch_serve.errors import FieldViolation
from llorch_serve.http.openai_schema import ResponseFormat
from llorch_serve.http.unknown_fields import JSON_SCHEMA_SHAPE, is_null
from llorch_serve.structured.spec import JsonObject, JsonSchema, Structured


def read_form(format_: ResponseFormat | None, bad: list[FieldViolation]) -> Structured | None:
    """Return the form; ``bad`` gets a shape of which it cannot be told what is meant."""
    if format_ is None:
        return None
    inner, beside = format_.json_schema, _text(format_.schema)
    within = "" if inner is None else _text(inner.schema)
    match format_.type:
        case "text" if inner is None and not beside:
            return None
        case "json_object" if inner is None:
            return JsonObject() if not beside or _is_empty_object(beside) else JsonSchema(beside)
        case "json_schema" if bool(beside) != bool(within):
            return JsonSchema(beside or within)
    parts = [name for name, text in (("json_schema", inner is not None), ("schema", beside)) if text]
    found = f"found type {format_.type[:32]!r} with {' and '.join(parts) or 'no schema'}"
    expected = f'{{"type": "text"}}, {{"type": "json_object"}} or {JSON_SCHEMA_SHAPE}'
    bad.append(FieldViolation("response_format", f"{found}; type json_schema needs one; expected {expected}"))
    return None


def schema_field(format_: ResponseFormat | None) -> str:
    """Return the name of the field that a schema came in."""
    beside = format_ is not None and _text(format_.schema)
    return "response_format.schema" if beside else "response_format.json_schema.schema"


def _text(raw: msgspec.Raw) -> str:
    """Return a schema's text; none where it is absent or null."""
    return "" if is_null(raw) else bytes(raw).decode()


def _is_empty_object(schema: str) -> bool:
    return bool(msgspec.json.decode(schema) == {})
