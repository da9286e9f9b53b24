"""How activations are rounded, as an option: what it settles, and what it leaves without effect."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from llorch_export.options import WHOLE_KL_LIMIT, ExportOptions
from llorch_serve.errors import UsageError
from llorch_serve.manifest import Recipe


def recipe(**options: Any) -> Recipe:
    return ExportOptions(source="model", output=Path("artifact"), **options).recipe()


def test_rows_leave_blocks_to_the_head() -> None:
    assert recipe(activations="row") == Recipe(
        precision="int8",
        head_precision="int8",
        block_size=32,
        accuracy_level=4,
        kl_limit=WHOLE_KL_LIMIT,
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
        kl_limit=WHOLE_KL_LIMIT,
        activations="row",
    )


def test_a_worse_head_sets_the_limit() -> None:
    assert recipe(activations="row", head_precision="int4").kl_limit == recipe(precision="int4").kl_limit


@pytest.mark.parametrize("precision", ["fp32", "int4", "source"])
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
