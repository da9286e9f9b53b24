"""What a JSON Schema says that llguidance does not know: left out where it says nothing, named where it is
refused.

Clients write schemas by machine, and machines write much that constrains nothing. Input: a schema as it was
sent, and the library's refusal. Output: the same schema without what is vacuous, and the place of what was
refused.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, Final

_SCHEMAS: Final = (
    *("items", "additionalItems", "additionalProperties", "propertyNames", "contains", "not", "if", "then"),
    *("else", "unevaluatedItems", "unevaluatedProperties"),
)
_LISTS: Final = ("allOf", "anyOf", "oneOf", "prefixItems", "items")
_TABLES: Final = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_ANNOTATIONS: Final = ("title", "description", "$comment", "examples", "default", "deprecated")

MAX_DEPTH: Final = 100
"""Of schemas inside each other; what is deeper is left as it is."""

_VACUOUS_FORMATS: Final = ("binary", "password")
"""Of texts: any bytes, and a hint for whoever shows it."""

_EQUIVALENT_PATTERNS: Final = {
    # Pydantic's decimals: all but texts without a digit.
    r"^(?!^[-+.]*$)[+-]?0*\d*\.?\d*$": r"^[+-]?(\d+\.?\d*|\.\d+)$",
}

_UNKNOWN_KEYS: Final = re.compile(r"Unimplemented keys: \[(?P<keys>[^\]]*)\]")
_UNKNOWN_FORMAT: Final = re.compile(r"Unknown format: (?P<name>.*)")
_MAX_PLACE_CHARS: Final = 200


def without_vacuous(schema: Any, depth: int = 0) -> Any:
    """Return a schema without what constrains nothing, and with patterns that llguidance can read where those
    are the same.
    """
    if not isinstance(schema, dict) or depth > MAX_DEPTH:
        return schema
    kept = {key: value for key, value in schema.items() if not _is_vacuous(key, schema)}
    for key, value in kept.items():
        if key in _TABLES and isinstance(value, dict):
            kept[key] = {name: without_vacuous(each, depth + 1) for name, each in value.items()}
        elif key in _LISTS and isinstance(value, list):
            kept[key] = [without_vacuous(each, depth + 1) for each in value]
        elif key in _SCHEMAS:
            kept[key] = without_vacuous(value, depth + 1)
        elif key == "pattern" and isinstance(value, str):
            kept[key] = _EQUIVALENT_PATTERNS.get(value, value)
    return kept


def place_of_refusal(schema: Any, reason: str) -> str:
    """Return where in a schema the library's refusal points at, as ``.properties.a.pattern``; empty if it
    does not say.
    """
    for place, key, value in _keywords(schema):
        if _is_meant(key, value, reason):
            return "".join(char if char.isprintable() else "?" for char in place[:_MAX_PLACE_CHARS])
    return ""


def _is_meant(key: str, value: Any, reason: str) -> bool:
    if (keys := _UNKNOWN_KEYS.search(reason)) is not None:
        return f'"{key}"' in keys["keys"]
    if (format_ := _UNKNOWN_FORMAT.search(reason)) is not None:
        return key == "format" and str(value) == format_["name"].strip()
    return key == "pattern" and isinstance(value, str) and bool(value) and value in reason


def _keywords(schema: Any, place: str = "", depth: int = 0) -> Iterator[tuple[str, str, Any]]:
    """Yield place, name and value of every keyword; patternProperties' own patterns count as ``pattern``."""
    if not isinstance(schema, dict) or depth > MAX_DEPTH:
        return
    for key, value in schema.items():
        here = f"{place}.{key}"
        yield here, key, value
        if key in _TABLES and isinstance(value, dict):
            for name, each in value.items():
                if key == "patternProperties":
                    yield f"{here}.{name}", "pattern", name
                yield from _keywords(each, f"{here}.{name}", depth + 1)
        elif key in _LISTS and isinstance(value, list):
            for index, each in enumerate(value):
                yield from _keywords(each, f"{here}[{index}]", depth + 1)
        elif key in _SCHEMAS:
            yield from _keywords(value, here, depth + 1)


def _is_vacuous(key: str, schema: dict[str, Any]) -> bool:
    """Tell whether a keyword constrains nothing, beside the others of its schema."""
    value = schema[key]
    match key:
        case "propertyNames":
            return _allows_every_name(value)
        case "uniqueItems":
            return value is False
        case "not":
            return value is False
        case "unevaluatedProperties" | "unevaluatedItems" | "additionalItems":
            return value is True or value == {}
        case "dependentRequired" | "dependentSchemas" | "dependencies":
            return bool(value == {})
        case "then" | "else":
            return "if" not in schema
        case "if":
            return "then" not in schema and "else" not in schema
        case "minContains" | "maxContains":
            return "contains" not in schema
        case "format":
            return value in _VACUOUS_FORMATS or not _may_be_text(schema.get("type"))
    return False


def _allows_every_name(schema: Any) -> bool:
    if schema is True:
        return True
    if not isinstance(schema, dict):
        return False
    told = {key: value for key, value in schema.items() if key not in _ANNOTATIONS}
    return not told or (set(told) == {"type"} and _may_be_text(told["type"]))


def _may_be_text(type_: Any) -> bool:
    return type_ is None or type_ == "string" or (isinstance(type_, list) and "string" in type_)
