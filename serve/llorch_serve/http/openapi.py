"""GET /openapi.json: the front's operations as an OpenAPI 3.1 document.

Input: the table of ``operations.py`` and the structures that bodies are read as. Output: the document. What a
reader refuses beyond a structure, such as numbers out of range, is told by its refusals alone.
"""

from __future__ import annotations

import functools
import importlib.metadata
from typing import Any, Final

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from llorch_serve.http.messages import schema as messages
from llorch_serve.http.operations import OPERATIONS, Operation
from llorch_serve.http.responses import schema as responses

_TABLES: Final = (
    messages.USER_BLOCKS,
    messages.ASSISTANT_BLOCKS,
    messages.TOOLS,
    responses.ITEMS,
    responses.TEXT_PARTS,
    responses.THOUGHT_PARTS,
    responses.SUMMARY_PARTS,
    responses.TOOLS,
)
"""Of parts whose ``type`` says what they are, and which are read one by one."""

_UNTYPED: Final = frozenset({responses.MessageItem, messages.MessagesTool})
"""Parts that need not say what they are."""

_REF: Final = "#/components/schemas/{name}"
_REFUSAL: Final = {"type": "object", "description": "error: its message, type and code; errors: bad fields"}


async def openapi(_request: Request) -> Response:
    """Return the document."""
    return Response(_encoded(), media_type="application/json")


@functools.cache
def _encoded() -> bytes:
    return msgspec.json.encode(document())


def document() -> dict[str, Any]:
    """Return the document."""
    paths: dict[str, dict[str, Any]] = {}
    for operation in OPERATIONS:
        paths.setdefault(operation.path, {})[operation.method.lower()] = _operation(operation)
    return {
        "openapi": "3.1.0",
        "info": {"title": "llorch", "version": importlib.metadata.version("llorch")},
        "paths": paths,
        "components": {
            "schemas": _schemas(),
            "securitySchemes": {
                "bearer": {"type": "http", "scheme": "bearer"},
                "key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
            },
        },
        "security": [{}, {"bearer": []}, {"key": []}],
    }


def _operation(operation: Operation) -> dict[str, Any]:
    told: dict[str, Any] = {"summary": operation.summary}
    if "{" in operation.path:
        name = operation.path.partition("{")[2].partition("}")[0]
        told["parameters"] = [{"name": name, "in": "path", "required": True, "schema": {"type": "string"}}]
    if operation.query:
        told["parameters"] = [{"name": name, "in": "query", "schema": {}} for name in operation.query]
    if operation.form:
        fields = {"type": "object", "properties": {name: {} for name in operation.form}}
        told["requestBody"] = {"required": True, "content": {"multipart/form-data": {"schema": fields}}}
    if operation.body is not None:
        schema = {"$ref": _REF.format(name=operation.body.__name__)}
        told["requestBody"] = {"required": True, "content": {"application/json": {"schema": schema}}}
    kinds: dict[str, Any] = {kind: {"schema": {}} for kind in operation.answers.value}
    refused = {"description": "Refused", "content": {"application/json": {"schema": _REFUSAL}}}
    told["responses"] = {
        str(operation.status): {"description": "Answered", "content": kinds},
        **dict.fromkeys(("4XX", "5XX"), refused),
    }
    return told


def _schemas() -> dict[str, Any]:
    """Return the schemas of all bodies and their parts. Fields beyond them are refused."""
    kinds = [operation.body for operation in OPERATIONS if operation.body is not None]
    kinds += [kind for table in _TABLES for kind in table.values()]
    _, found = msgspec.json.schema_components(list(dict.fromkeys(kinds)), ref_template=_REF)
    for schema in found.values():
        schema["additionalProperties"] = False
    for table in _TABLES:
        for kind in table.values():
            _name_types(found[kind.__name__], [name for name in table if table[name] is kind])
            if kind not in _UNTYPED:
                _require_type(found[kind.__name__])
    return found


def _name_types(schema: dict[str, Any], names: list[str]) -> None:
    """Write into a part's schema which types it has, beside those that another table gives it."""
    known = schema["properties"]["type"].get("enum", [])
    schema["properties"]["type"] = {"enum": list(dict.fromkeys([*known, *names]))}


def _require_type(schema: dict[str, Any]) -> None:
    schema["required"] = list(dict.fromkeys([*schema.get("required", ()), "type"]))
