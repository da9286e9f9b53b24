"""Recipes written as TOML are read as what they were; evidence stands beside them and changes nothing."""

from __future__ import annotations

import tomllib
from dataclasses import replace
from pathlib import Path

import pytest

from llorch_export.options import ExportOptions
from llorch_export.recipes.file import RecipeFile, load_recipe, parse_recipe, shipped_recipes, with_prefill
from llorch_export.recipes.written import recipe_text
from llorch_serve.errors import UsageError

BASE = ExportOptions(source="model", output=Path("artifact"))


def unlabelled(recipe: RecipeFile) -> tuple[object, ...]:
    rules = tuple(replace(rule, label="") for rule in recipe.rules)
    return recipe.description, recipe.defaults, rules


@pytest.mark.parametrize("name", shipped_recipes())
def test_every_shipped_recipe_comes_back_as_it_was(name: str) -> None:
    recipe = load_recipe(name)
    assert unlabelled(parse_recipe(recipe_text(recipe).encode(), origin="again")) == unlabelled(recipe)


def test_evidence_is_kept_as_data_and_changes_nothing() -> None:
    recipe = replace(load_recipe("cpu"), description='tuned: "best"\n\x7f of 3 €')
    evidence = {
        "machine": "A CPU \\ 2 cores",
        "commands": ["llorch tune a.gguf", "llorch export"],
        "chosen": {"kl": 0.0012, "peak_mib": 512.5, "speeds": {"decode, 1 stream": 61.5}},
    }
    text = recipe_text(recipe, evidence)
    assert tomllib.loads(text)["evidence"] == evidence
    assert unlabelled(parse_recipe(text.encode(), origin="tuned.toml")) == unlabelled(recipe)


def test_evidence_that_is_no_table_is_refused() -> None:
    with pytest.raises(UsageError, match=r"recipe mine.toml: \[evidence\] is 3, expected a table"):
        parse_recipe(b"evidence = 3", origin="mine.toml")


def test_a_recipe_may_say_what_the_cache_holds_and_a_flag_wins() -> None:
    recipe = parse_recipe(b'[defaults]\nkv_dtype = "float32"', origin="mine.toml")
    assert recipe.options(BASE).kv_dtype == "float32"
    assert recipe.options(replace(BASE, kv_dtype="int8")).kv_dtype == "int8"


def test_a_recipe_for_prompts_that_speaks_of_the_cache_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "prompts.toml"
    path.write_text('[defaults]\nprecision = "int8"\nkv_dtype = "int8"\n')
    with pytest.raises(UsageError, match="says kv_dtype int8, so it cannot be that of prompts"):
        with_prefill(BASE, str(path))
