"""``--recipe`` on the command line: a file, a name, flags beside it, a dry run, points of the frontier,
refusals.
"""

from __future__ import annotations

import pytest

from support.harness.processes import llorch_here

RECIPE = """
[defaults]
precision = "int4"

[[rule]]
modules = "*.v_proj"
layers = "first 1"
precision = "int8"
"""


@pytest.fixture
def recipe_file(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text(RECIPE)
    return path


def test_a_recipe_is_exported_and_shown(tiny_source, tmp_path, recipe_file):
    flags = ("--recipe", recipe_file, "--head-precision", "int4", "--quantizer", "affine", "--json")
    seen = llorch_here("export", tiny_source, *flags, "--dry-run").document()["recipe"]
    made = llorch_here("export", tiny_source, *flags, "--output", tmp_path / "artifact").document()["recipe"]
    assert made == seen
    assert (made["precision"], made["head_precision"]) == ("int4", "int4")
    (rule,) = made["rules"]
    assert rule["modules"] == ["model.layers.0.self_attn.v_proj"]
    shown = llorch_here("inspect", tmp_path / "artifact").stdout
    assert "model.layers.{0}.self_attn.v_proj" in shown
    assert "model.layers.{0-1}.mlp.down_proj" in shown
    assert "rules 1" in shown


def test_what_is_wrong_is_told_in_a_line(tiny_source, tmp_path, recipe_file):
    recipe_file.write_text(RECIPE.replace("v_proj", "w_proj"))
    outcome = llorch_here("export", tiny_source, "--recipe", recipe_file, "--output", tmp_path / "artifact")
    assert outcome.code == 2
    assert "rule 1: no module matches *.w_proj" in outcome.stderr
    outcome = llorch_here("export", tiny_source, "--recipe", "int5", "--output", tmp_path / "artifact")
    assert outcome.code == 2
    assert "no recipe is called int5 (did you mean int" in outcome.stderr


@pytest.mark.reference
def test_recipes_are_points_of_the_frontier(tiny_source, tmp_path, recipe_file, monkeypatch):
    from llorch_export.frontier import measure as frontier

    monkeypatch.setattr(frontier, "MAX_TOKENS", 100)
    text = tmp_path / "text.txt"
    text.write_text("Paris is the capital of France. " * 20)
    recipes = ("--recipe", "int4", "--recipe", recipe_file, "--recipe", "int4-gptq")
    points = llorch_here(
        "frontier", tiny_source, *recipes, "--calibration", text, "--text", text, "--json"
    ).document()["points"]
    bits = {point["label"]: point["bits_per_weight"] for point in points}
    assert set(bits) == {"int4", "mine", "int4-gptq"}
    assert bits["int4"] == bits["int4-gptq"] < bits["mine"]
    alone = llorch_here("frontier", tiny_source, "--calibration", text)
    assert alone.code == 2
    assert "is for recipes given with --recipe" in alone.stderr
