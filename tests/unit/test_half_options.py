"""Half precision among the options: what each combination means, and which are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from llorch_export.options import ExportOptions
from llorch_export.recipes.base import base_recipe
from llorch_export.recipes.kl_limits import KL_LIMIT
from llorch_serve.artifact.manifest import Recipe
from llorch_serve.errors import UsageError


def recipe(**options: Any) -> Recipe:
    return base_recipe(ExportOptions(source="model", output=Path("artifact"), **options))


@pytest.mark.parametrize(("precision", "kind"), [("fp16", "float16"), ("bf16", "bfloat16")])
def test_half_precision_is_of_weights_head_and_computation(precision: Any, kind: Any) -> None:
    expected = Recipe(
        precision=precision,
        head_precision=precision,
        block_size=None,
        accuracy_level=None,
        kl_limit=KL_LIMIT[precision],
        compute_type=kind,
    )
    assert recipe(precision=precision) == expected
    assert recipe(precision=precision, compute_type=kind) == expected


@pytest.mark.parametrize("kind", ["float16", "bfloat16"])
@pytest.mark.parametrize("precision", ["int8", "int4"])
def test_blocks_take_scales_of_the_type_that_the_graph_computes_in(precision: str, kind: str) -> None:
    found = recipe(precision=precision, compute_type=kind)
    assert (found.precision, found.compute_type, found.scale_type) == (precision, kind, kind)
    assert found.block_size == recipe(precision=precision).block_size
    other = "bfloat16" if kind == "float16" else "float16"
    for wrong in ("float32", other):
        with pytest.raises(
            UsageError, match=f"--scale-type {wrong} has no effect where the graph computes in"
        ):
            recipe(precision=precision, compute_type=kind, scale_type=wrong)


def test_float32_is_what_was_always_computed_in() -> None:
    for precision in ("fp32", "int8", "int4", "source"):
        assert recipe(precision=precision).compute_type == "float32"
    assert recipe(compute_type="float32") == recipe()


def test_a_half_precision_head_makes_the_graph_compute_in_it() -> None:
    assert recipe(precision="int4", head_precision="fp16").compute_type == "float16"
    assert recipe(precision="bf16", head_precision="int8").compute_type == "bfloat16"


def test_the_limit_is_that_of_the_coarsest_part() -> None:
    assert recipe(precision="fp16", head_precision="int8").kl_limit == KL_LIMIT["int8"]
    assert recipe(precision="int4", compute_type="bfloat16").kl_limit == KL_LIMIT["int4"]


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"precision": "fp32", "compute_type": "float16"}, "float16 and float32"),
        ({"precision": "fp16", "compute_type": "float32"}, "float16 and float32"),
        ({"precision": "fp16", "compute_type": "bfloat16"}, "bfloat16 and float16"),
        ({"precision": "fp16", "head_precision": "fp32"}, "float16 and float32"),
        ({"precision": "fp16", "head_precision": "bf16"}, "bfloat16 and float16"),
        ({"precision": "int8", "head_precision": "fp32", "compute_type": "float16"}, "float16 and float32"),
        ({"precision": "source", "compute_type": "float16"}, "--compute-type float16 has no effect"),
    ],
)
def test_types_that_contradict_each_other_are_refused(options: dict[str, Any], named: str) -> None:
    with pytest.raises(UsageError, match=named):
        recipe(**options)


@pytest.mark.parametrize("precision", ["fp32", "fp16", "bf16"])
@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("block_size", 32),
        ("fine_block_size", 32),
        ("quantizer", "affine"),
        ("scale_type", "float32"),
        ("accuracy_level", 0),
    ],
)
def test_what_belongs_to_blocks_has_no_effect_on_whole_weights(
    precision: Any, name: str, value: object
) -> None:
    flag = f"--{name.replace('_', '-')} {value}"
    with pytest.raises(UsageError, match=f"{flag} has no effect at precision {precision}"):
        recipe(precision=precision, **{name: value})
