"""A transform that would change a model is refused, with the reason and what to do."""

from __future__ import annotations

from pathlib import Path

import pytest

from llorch_export.options import ExportOptions
from llorch_export.recipes.default import default_recipe
from llorch_export.resolved import resolve
from llorch_serve.errors import UsageError
from support.builders.arch_rows import HF
from support.builders.checkpoints import tiny_llama_config


@pytest.mark.parametrize(
    ("row", "transform", "why"),
    [
        ("gemma2", "rotate", "model of type gemma2: its norms behind .* Leave it out, as --recipe int8 does"),
        ("olmo2", "rotate", "its norms behind"),
        ("cohere", "rotate", "its norms subtract the mean"),
        ("arcee", "smooth", "has the activation between"),
    ],
)
def test_a_transform_that_is_not_exact_is_refused(row: str, transform: str, why: str) -> None:
    options = ExportOptions(source="m", output=Path(), precision="int8", transforms=(transform,))
    with pytest.raises(UsageError, match=why):
        resolve(options, tiny_llama_config(**HF[row]))


@pytest.mark.parametrize(
    ("row", "recipe"), [("gemma2", "int8"), ("phi", "int8"), ("arcee", "cpu"), ("gemma", "cpu-calibrated")]
)
def test_the_default_recipe_is_one_that_the_model_takes(row: str, recipe: str) -> None:
    assert default_recipe(tiny_llama_config(**HF[row])) == recipe
