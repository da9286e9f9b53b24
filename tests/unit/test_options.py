"""Options become a recipe, or are refused with the values that would do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from llorch_export.adapter.choice import AdapterChoice
from llorch_export.calibration.measurements import BUNDLED_TEXT
from llorch_export.formats.module import HEAD, default_format
from llorch_export.options import ExportOptions
from llorch_export.recipes.base import base_recipe
from llorch_export.recipes.kl_limits import INT4_HEAD_KL_LIMIT, KL_LIMIT
from llorch_export.recipes.storage_defaults import BLOCK_SIZES
from llorch_serve.artifact.manifest import Recipe
from llorch_serve.errors import UsageError


def recipe(**options: Any) -> Recipe:
    return base_recipe(ExportOptions(source="model", output=Path("artifact"), **options))


def test_int8_in_blocks_of_32_is_the_default() -> None:
    assert recipe() == Recipe(
        precision="int8",
        head_precision="int8",
        block_size=32,
        accuracy_level=4,
        kl_limit=KL_LIMIT["int8"],
        int8_cache=True,
    )


@pytest.mark.parametrize(
    ("options", "cached"),
    [
        ({"precision": "int4"}, True),
        ({"precision": "source"}, True),
        ({"precision": "fp32"}, False),
        ({"precision": "fp32", "head_precision": "int8"}, True),
        ({"kv_dtype": "float32"}, False),
        ({"precision": "fp32", "kv_dtype": "int8"}, True),
        ({"compute_type": "float16"}, False),
        ({"target": "openvino"}, False),
    ],
)
def test_a_cache_in_int8_comes_with_quantised_weights_or_when_asked(
    options: dict[str, Any], cached: bool
) -> None:
    assert recipe(**options).int8_cache is cached


@pytest.mark.parametrize(
    ("options", "choices"),
    [
        ({"kv_dtype": "int8", "compute_type": "float16"}, "float16"),
        ({"kv_dtype": "int8", "target": "cuda"}, "float16"),
        ({"kv_dtype": "float16"}, "float32 or int8"),
    ],
)
def test_a_cache_that_cannot_be_is_refused(options: dict[str, Any], choices: str) -> None:
    with pytest.raises(UsageError, match=rf"--kv-dtype is {options['kv_dtype']}; .* takes {choices}$"):
        recipe(**options)


def test_int4_keeps_an_8_bit_head_unless_asked() -> None:
    assert recipe(precision="int4").head_precision == "int8"
    assert recipe(precision="int4", head_precision="int4").head_precision == "int4"
    assert recipe(precision="int4", head_precision="fp32").head_precision == "fp32"


def test_int4_is_affine_with_finer_blocks_where_it_matters_and_small_scales() -> None:
    found = recipe(precision="int4")
    assert (found.block_size, found.fine_block_size) == (64, 32)
    assert (found.quantizer, found.scale_type) == ("affine", "bfloat16")


def test_a_block_size_that_is_given_holds_everywhere() -> None:
    found = recipe(precision="int4", block_size=32)
    assert (found.block_size, found.fine_block_size) == (32, None)
    finer = recipe(precision="int8", fine_block_size=16)
    assert (finer.block_size, finer.fine_block_size) == (32, 16)
    assert recipe(precision="int4", fine_block_size=64).fine_block_size is None


@pytest.mark.parametrize("quantizer", ["nearest", "search", "affine", "hqq"])
def test_the_quantizer_is_of_4_bit_weights_only(quantizer: str) -> None:
    assert recipe(precision="int4", quantizer=quantizer).quantizer == quantizer
    assert recipe(precision="int8", head_precision="int4", quantizer=quantizer).quantizer == quantizer
    assert recipe(precision="int8").quantizer is None
    with pytest.raises(UsageError, match=f"--quantizer {quantizer} has no effect without 4-bit weights"):
        recipe(precision="int8", quantizer=quantizer)


def test_8_bits_take_error_feedback_where_it_is_asked_for_and_no_4_bits_are_beside_them() -> None:
    given = recipe(precision="int8", quantizer="gptq", calibration=BUNDLED_TEXT)
    assert (given.quantizer, given.scale_type) == ("gptq", "float32")
    down = "model.layers.0.mlp.down_proj"
    assert default_format(given, down).quantizer == default_format(given, HEAD).quantizer == "gptq"
    assert not default_format(given, down).zero_points
    mixed = recipe(precision="int4", quantizer="gptq", calibration=BUNDLED_TEXT)
    assert default_format(mixed, down).zero_points
    assert default_format(mixed, HEAD).quantizer is None
    with pytest.raises(UsageError, match="need figures measured on a text"):
        recipe(precision="int8", quantizer="gptq")


@pytest.mark.parametrize("scale_type", ["float32", "bfloat16"])
def test_the_scale_type_lands_in_the_recipe(scale_type: str) -> None:
    assert recipe(scale_type=scale_type).scale_type == scale_type


def test_fine_blocks_are_checked_as_others_are() -> None:
    for size in (24, 0):
        with pytest.raises(UsageError, match=rf"--fine-block-size is {size}; .*16, 32, 64, 128, 256"):
            recipe(precision="int4", fine_block_size=size)
    with pytest.raises(UsageError, match="--fine-block-size 16 has no effect at precision fp32"):
        recipe(precision="fp32", head_precision="int8", fine_block_size=16)


def test_fp32_has_nothing_to_quantise() -> None:
    assert recipe(precision="fp32") == Recipe(
        precision="fp32", head_precision="fp32", block_size=None, accuracy_level=None, kl_limit=1e-6
    )


def test_an_fp32_body_with_a_quantised_head_has_blocks() -> None:
    found = recipe(precision="fp32", head_precision="int8", block_size=64)
    assert (found.precision, found.head_precision, found.block_size) == ("fp32", "int8", 64)
    assert found.kl_limit == KL_LIMIT["int8"]


def test_the_worse_of_the_two_precisions_sets_the_limit() -> None:
    assert recipe(precision="int8", head_precision="int4").kl_limit == INT4_HEAD_KL_LIMIT
    assert recipe(precision="int4", head_precision="fp32").kl_limit == KL_LIMIT["int4"]


@pytest.mark.parametrize("block_size", BLOCK_SIZES)
def test_supported_blocks_are_taken(block_size: int) -> None:
    assert recipe(block_size=block_size).block_size == block_size


@pytest.mark.parametrize("block_size", [-32, 0, 1, 8, 24, 48, 100, 512, 1024])
@pytest.mark.parametrize("precision", ["int8", "int4"])
def test_other_blocks_are_refused_by_value(precision: str, block_size: int) -> None:
    with pytest.raises(UsageError, match=rf"--block-size is {block_size}; .*16, 32, 64, 128, 256"):
        recipe(precision=precision, block_size=block_size)


@pytest.mark.parametrize(
    "options",
    [
        {"block_size": 32},
        {"fine_block_size": 16},
        {"accuracy_level": 0},
        {"accuracy_level": 4},
        {"quantizer": "affine"},
        {"scale_type": "float32"},
    ],
)
def test_an_option_without_effect_is_refused(options: dict[str, Any]) -> None:
    (flag,) = options
    with pytest.raises(UsageError, match=f"--{flag.replace('_', '-')} .* has no effect at precision fp32"):
        recipe(precision="fp32", **options)


@pytest.mark.parametrize("level", [0, 4])
def test_accuracy_level_lands_in_the_recipe(level: int) -> None:
    assert recipe(accuracy_level=level).accuracy_level == level


def test_source_settles_blocks_and_head_by_itself() -> None:
    assert recipe(precision="source") == Recipe(
        precision="source",
        head_precision="source",
        block_size=None,
        accuracy_level=4,
        kl_limit=KL_LIMIT["source"],
        int8_cache=True,
    )
    assert recipe(precision="source", head_precision="source", accuracy_level=0).accuracy_level == 0


def test_source_takes_no_block_size() -> None:
    with pytest.raises(UsageError, match="--block-size 32 has no effect at precision source"):
        recipe(precision="source", block_size=32)


@pytest.mark.parametrize(
    "options", [("source", "int8"), ("source", "fp32"), ("int8", "source"), ("fp32", "source")]
)
def test_source_is_for_body_and_head(options: tuple[str, str]) -> None:
    precision, head = options
    with pytest.raises(
        UsageError, match=f"--precision {precision} with --head-precision {head}; source is for both"
    ):
        recipe(precision=precision, head_precision=head)


def test_source_takes_no_adapter() -> None:
    with pytest.raises(
        UsageError, match="--lora adapter changes weights whose blocks --precision source would keep"
    ):
        recipe(precision="source", lora=(AdapterChoice(Path("adapter")),))
