"""Tools with schemas drawn at random, every answer to which is short, and nearest neighbours of what people
send: enums, ranges, patterns, lists, objects, references and unions.
"""

from __future__ import annotations

import json
import random
from typing import Any

WORD = {"type": "string", "pattern": "^[A-Za-z]{1,8}$"}


def _value(draw: random.Random, depth: int) -> dict[str, Any]:
    kinds = ["enum", "integer", "boolean", "word", "nullable", "reference", "date"]
    if depth:
        kinds += ["list", "object", "either"]
    match draw.choice(kinds):
        case "enum":
            return {"enum": draw.sample(["celsius", "fahrenheit", 1, 2.5, None, True, 'q"\\é'], 3)}
        case "integer":
            low = draw.randint(-20, 20)
            return {"type": "integer", "minimum": low, "maximum": low + draw.randint(0, 500)}
        case "boolean":
            return {"type": "boolean"}
        case "word":
            return WORD
        case "nullable":
            return {"type": ["integer", "null"], "minimum": 0, "maximum": 9}
        case "reference":
            return {"$ref": "#/$defs/shared"}
        case "date":
            return {"type": "string", "format": "date"}
        case "list":
            most = draw.randint(1, 3)
            items = _value(draw, depth - 1)
            return {"type": "array", "items": items, "minItems": draw.randint(0, most), "maxItems": most}
        case "object":
            return _object(draw, depth - 1) | {"additionalProperties": False}
        case _:
            return {"anyOf": [{"const": "none"}, _object(draw, 0) | {"additionalProperties": False}]}


def _object(draw: random.Random, depth: int) -> dict[str, Any]:
    names = draw.sample(["city", "days", "unit", "from", "to", "größe", "a b", "x-y"], draw.randint(0, 4))
    properties = {name: _value(draw, depth) for name in names}
    required = [name for name in names if draw.random() < 0.6]
    return {"type": "object", "properties": properties, "required": required}


def random_tools(seed: int, *, count: int = 3) -> dict[str, dict[str, Any]]:
    """Return the parameters of some tools by their names, the same for the same seed."""
    draw = random.Random(seed)
    tools = {}
    for index in range(count):
        shared = _value(draw, 0)
        if "$ref" in shared:
            shared = WORD
        tools[f"tool_{seed}_{index}"] = _object(draw, 2) | {"$defs": {"shared": shared}}
    return tools


def as_tools(parameters: dict[str, dict[str, Any]]) -> tuple[str, ...]:
    """Return tools as a request has them: JSON text."""
    return tuple(
        json.dumps({"type": "function", "function": {"name": name, "parameters": schema}})
        for name, schema in parameters.items()
    )
