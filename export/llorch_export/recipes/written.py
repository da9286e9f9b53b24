"""A recipe as the TOML that :mod:`llorch_export.recipes.file` reads, for recipes that a program has found."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import fields

from llorch_export.options import Rule
from llorch_export.recipes.file import RecipeDefaults, RecipeFile

_RULE_KEYS = {"outliers": "spikiest"}
"""Fields of :class:`Rule` that files call otherwise."""

Evidence = Mapping[str, object]
"""Texts, numbers, lists of texts, and tables of those."""


def recipe_text(recipe: RecipeFile, evidence: Evidence | None = None) -> str:
    """Return the file of a recipe. evidence: what its ``[evidence]`` says, which changes nothing."""
    parts = [f"description = {_value(recipe.description)}\n" if recipe.description else ""]
    parts.append(_table("[defaults]", _given(recipe.defaults)))
    parts += [_table("[[rule]]", _given(rule)) for rule in recipe.rules]
    if evidence is not None:
        parts += _nested("evidence", evidence)
    return "\n".join(filter(None, parts))


def _given(settings: RecipeDefaults | Rule) -> dict[str, object]:
    """Return what is said, by the keys of files."""
    found = {field.name: getattr(settings, field.name) for field in fields(settings) if field.name != "label"}
    return {_RULE_KEYS.get(name, name): value for name, value in found.items() if value not in (None, ())}


def _nested(name: str, table: Evidence) -> list[str]:
    plain = {key: value for key, value in table.items() if not isinstance(value, Mapping)}
    parts = [_table(f"[{name}]", plain)]
    for key, value in table.items():
        if isinstance(value, Mapping):
            parts += _nested(f"{name}.{_key(key)}", value)
    return parts


def _table(head: str, values: Mapping[str, object]) -> str:
    return "\n".join([head, *(f"{_key(key)} = {_value(value)}" for key, value in values.items()), ""])


def _key(key: str) -> str:
    plain = key.replace("_", "").replace("-", "")
    return key if plain.isascii() and plain.isalnum() else _value(key)


def _value(value: object) -> str:
    """Return a value of TOML; JSON writes texts, numbers and truth values as TOML does."""
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(_value, value))}]"
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    return json.dumps(value)
