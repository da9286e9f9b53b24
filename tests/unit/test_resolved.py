"""A resolved export says all that follows from options and a model's config, before a weight is read."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from llorch_export.calibration.measurements import BUNDLED_TEXT
from llorch_export.options import ExportOptions, Rule
from llorch_export.preview import preview
from llorch_export.recipes.default import MOST_MEASURED
from llorch_export.recipes.file import load_recipe, with_prefill
from llorch_export.resolved import ResolvedExport, resolve
from llorch_serve.artifact.manifest import CalibrationText
from llorch_serve.errors import UsageError
from support.builders.checkpoints import tiny_llama_config, write_hf_folder

TEXT = CalibrationText(sha256="0" * 64, tokens=7)
LARGE = {"hidden_size": 4096, "intermediate_size": 16384, "num_hidden_layers": 32, "head_dim": 128}


def options(**given: Any) -> ExportOptions:
    return ExportOptions("model", Path("artifact"), **given)


def resolved(given: ExportOptions, **overrides: object) -> ResolvedExport:
    return resolve(given, tiny_llama_config(**overrides))


def outliers(count: str) -> Rule:
    return Rule(("*.down_proj",), precision="fp32", outliers=count, label="rule 1")


def test_a_preview_shows_the_export_that_is_made(tmp_path: Path) -> None:
    given = load_recipe("cpu-calibrated").options(
        ExportOptions(str(write_hf_folder(tmp_path / "model")), tmp_path / "artifact")
    )
    shown, found = preview(given), resolved(given)
    assert shown["recipe"] == found.recipe
    assert shown["prompt_recipe"] == found.prompts
    assert shown["context_length"] == found.context_length


def test_the_size_of_the_model_settles_the_quantizer_and_its_text() -> None:
    small, large = resolved(options(precision="int4")), resolved(options(precision="int4"), **LARGE)
    assert (small.recipe.quantizer, small.calibration) == ("gptq", BUNDLED_TEXT)
    assert (large.recipe.quantizer, large.calibration) == ("affine", None)
    assert MOST_MEASURED == 500_000_000


def test_the_hash_of_the_text_is_in_both_recipes() -> None:
    found = resolved(load_recipe("cpu-calibrated").options(options())).with_text(TEXT)
    assert found.prompts is not None
    assert found.recipe.calibration == found.prompts.calibration == TEXT


def test_what_was_measured_replaces_the_modules_that_stood_for_the_chosen_ones() -> None:
    given = options(precision="int8", calibration=Path("text"), rules=(outliers("1"),))
    before = resolved(given).with_text(TEXT)
    after = before.with_peaks({"model.layers.1.mlp.down_proj": 9.0})
    assert before.measures_inputs
    assert before.recipe.rules[0].modules == ("model.layers.0.mlp.down_proj",)
    assert after.recipe.rules[0].modules == ("model.layers.1.mlp.down_proj",)
    assert after.recipe.calibration == TEXT
    assert after == replace(before, recipe=after.recipe), "nothing else changes"


@pytest.mark.parametrize("first", [True, False])
def test_a_choice_by_a_text_is_refused_without_one(first: bool) -> None:
    rules = options(precision="int8", kv_dtype="float32", rules=(outliers("1"),))
    given = rules if first else options(prompts=rules)
    with pytest.raises(UsageError, match="rule 1: spikiest chooses by what is measured on a text; add"):
        resolved(given)


def test_prompts_cannot_have_error_feedback_that_the_first_graph_has_not() -> None:
    with pytest.raises(UsageError, match="--prefill-recipe finds weights by gptq, and no weight of"):
        resolved(with_prefill(options(precision="int8"), "int4-gptq"))
