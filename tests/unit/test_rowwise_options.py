"""How activations are rounded, as an option: what it settles, and what it leaves without effect."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest

from llorch_export.formats.targets import TARGETS
from llorch_export.options import ExportOptions, Rule
from llorch_export.pipeline import export
from llorch_export.preview import preview
from llorch_export.recipes.base import base_recipe
from llorch_export.recipes.kl_limits import INT4_HEAD_KL_LIMIT, PER_TOKEN_KL_LIMIT
from llorch_serve.artifact.manifest import Recipe
from llorch_serve.errors import UsageError
from support.builders.tiny_exports import silent


def recipe(**options: Any) -> Recipe:
    return base_recipe(ExportOptions(source="model", output=Path("artifact"), **options))


def test_rows_leave_blocks_to_the_head() -> None:
    assert recipe(activations="row") == Recipe(
        precision="int8",
        head_precision="int8",
        block_size=32,
        accuracy_level=4,
        kl_limit=PER_TOKEN_KL_LIMIT,
        int8_cache=True,
        activations="row",
    )


def test_blocks_are_what_no_choice_means() -> None:
    assert recipe(activations="block") == recipe()
    assert recipe(precision="int4", activations="block") == recipe(precision="int4")


def test_without_a_block_nothing_is_said_of_blocks() -> None:
    assert recipe(activations="row", head_precision="fp32") == Recipe(
        precision="int8",
        head_precision="fp32",
        block_size=None,
        accuracy_level=None,
        kl_limit=PER_TOKEN_KL_LIMIT,
        int8_cache=True,
        activations="row",
    )


OTHER_TARGETS = [target for target in TARGETS if target != "cpu"]


@pytest.mark.parametrize("activations", ["row", "static"])
@pytest.mark.parametrize("target", OTHER_TARGETS)
def test_other_targets_are_refused_by_name_before_a_source_is_opened(target: Any, activations: Any) -> None:
    said = (
        f"{activations} with --target {target}: per-channel int8 is made for --target cpu alone; "
        f"--target {target} "
        "takes activations block"
    )
    for given, where in (
        ({"activations": activations}, "--activations"),
        (
            {"rules": (Rule(("*.down_proj",), activations=activations, label="rule 1"),)},
            "rule 1: activations",
        ),
    ):
        # Whatever else is said, and whatever the target's default is.
        for more in ({}, {"precision": "int8"}, {"precision": "int8", "head_precision": "int4"}):
            options = ExportOptions("no such file", Path("artifact"), target=target, **more, **given)
            for command in (functools.partial(export, progress=silent), preview):
                with pytest.raises(UsageError) as caught:
                    command(options)
                assert str(caught.value).startswith(f"{where} {said}")
                assert "\n" not in str(caught.value)


@pytest.mark.parametrize("target", OTHER_TARGETS)
def test_other_targets_take_blocks_by_name(target: Any) -> None:
    assert recipe(target=target, activations="block") == recipe(target=target)


def test_no_other_target_has_an_operator_of_layers_in_bytes() -> None:
    assert [
        target for target, row in TARGETS.items() if "com.microsoft:MatMulIntegerToFloat" in row.operators
    ] == ["cpu"]
    assert [target for target, row in TARGETS.items() if row.per_channel_int8] == ["cpu"]


@pytest.mark.parametrize("activations", ["row", "static"])
@pytest.mark.parametrize(
    ("options", "kind"),
    [
        ({"compute_type": "float16"}, "float16"),
        ({"compute_type": "bfloat16"}, "bfloat16"),
        ({"head_precision": "fp16"}, "float16"),
        ({"head_precision": "bf16"}, "bfloat16"),
        ({"rules": (Rule(("*.o_proj",), precision="bf16"),)}, "bfloat16"),
    ],
)
def test_half_precision_around_whole_bytes_is_refused_by_name(
    activations: Any, options: dict[str, Any], kind: str
) -> None:
    with pytest.raises(UsageError) as caught:
        recipe(activations=activations, **options)
    assert str(caught.value).startswith(
        f"--activations {activations} with {kind}: the runtime's product of bytes gives float32; leave out"
    )


def test_half_precision_around_a_rules_whole_bytes_is_refused_too() -> None:
    rules = (Rule(("*.down_proj",), precision="int8", activations="row", label="rule 1"),)
    with pytest.raises(UsageError, match="rule 1: activations row with float16: "):
        recipe(precision="fp16", rules=rules)
    assert recipe(activations="row", compute_type="float32") == recipe(activations="row")


def test_a_static_scale_without_a_rotation_is_refused_before_a_source_is_opened() -> None:
    with pytest.raises(
        UsageError, match=r"--activations static without a rotation .* add --transform rotate"
    ):
        recipe(activations="static")
    assert recipe(activations="static", transforms=("rotate",)).activations == "static"


def test_a_worse_head_sets_the_limit() -> None:
    assert recipe(activations="row", head_precision="int4").kl_limit == INT4_HEAD_KL_LIMIT


@pytest.mark.parametrize("precision", ["fp32", "fp16", "bf16", "int4", "source"])
def test_rows_are_for_int8(precision: str) -> None:
    with pytest.raises(UsageError, match=f"--activations row .* takes --precision int8 and not {precision}"):
        recipe(precision=precision, activations="row")


def test_a_row_has_no_finer_blocks() -> None:
    with pytest.raises(UsageError, match="--fine-block-size 16 has no effect with --activations row"):
        recipe(activations="row", fine_block_size=16)


@pytest.mark.parametrize(
    "options",
    [{"block_size": 32}, {"accuracy_level": 0}, {"scale_type": "bfloat16"}, {"quantizer": "affine"}],
)
def test_options_of_blocks_are_refused_where_there_are_none(options: dict[str, Any]) -> None:
    (flag,) = options
    with pytest.raises(
        UsageError, match=f"--{flag.replace('_', '-')} .* has no effect with --activations row and"
    ):
        recipe(activations="row", head_precision="fp32", **options)
