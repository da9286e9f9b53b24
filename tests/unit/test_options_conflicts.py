"""The table of options that do not go together, over all pairs of values of all options."""

from __future__ import annotations

import itertools
from dataclasses import fields
from pathlib import Path
from typing import Any, get_args

from llorch_export.adapter.choice import AdapterChoice
from llorch_export.config.embedding import EmbedChoice
from llorch_export.graph.stage_choice import StageChoice
from llorch_export.options import ExportOptions, Rule
from llorch_export.recipes.base import base_recipe
from llorch_export.recipes.conflict_rows import Conflict
from llorch_export.recipes.conflicts import CONFLICTS, first_conflict
from llorch_export.recipes.settled import Storage, settle
from llorch_serve.artifact.manifest import Activations, ComputeType, KvDtype, Precision, Quantizer, Target
from llorch_serve.errors import UsageError

PROMPTS = ExportOptions("model", Path(), kv_dtype="float32")
VALUES: dict[str, list[Any]] = {
    "precision": [*get_args(Precision)],
    "head_precision": [*get_args(Precision)],
    "block_size": [16, 24],
    "fine_block_size": [16, 24],
    "accuracy_level": [0, 4],
    "quantizer": [*get_args(Quantizer)],
    "scale_type": [*get_args(ComputeType)],
    "lora": [(AdapterChoice(Path("adapter")),)],
    "rules": [
        (Rule(("*",), precision="int8", label="rule 1"),),
        (Rule(("*",), precision="int4", label="rule 1"),),
        (Rule(("*",), precision="fp16", label="rule 1"),),
        (Rule(("*",), activations="row", label="rule 1"),),
    ],
    "calibration": [Path("text")],
    "transforms": [("hadamard",), ("rotate",), ("equalise", "smooth")],
    "interop": ["genai"],
    "compute_type": [*get_args(ComputeType)],
    "target": [*get_args(Target)],
    "kv_dtype": [*get_args(KvDtype)],
    "kl_limit": [0.5],
    "prompts": [PROMPTS],
    "activations": [*get_args(Activations)],
    "embed": [*get_args(EmbedChoice)],
    "stages": [StageChoice(2)],
}
WITHOUT_A_SAY = {"source", "output", "max_context", "force", "if_changed", "two_bit_accuracy_level"}
"""What no other option rules out: where an export comes from and goes to, the length, which a model limits,
and what is filled in once the weights are known.
"""

CELLS = [(option, value) for option, values in VALUES.items() for value in values]


def conflict(*cells: tuple[str, Any]) -> Conflict | None:
    return first_conflict(settle(ExportOptions("model", Path("artifact"), **dict(cells))))


def test_every_option_is_tried() -> None:
    assert {field.name for field in fields(ExportOptions)} == WITHOUT_A_SAY | VALUES.keys()


def test_pairs_that_do_not_go_together_are_those_in_the_table() -> None:
    """Two values of two options give a recipe, or one line from the table. If each alone would do, the row
    names both options.
    """
    for pair in itertools.combinations(CELLS, 2):
        if pair[0][0] == pair[1][0]:
            continue
        options = ExportOptions("model", Path("artifact"), **dict(pair))
        row = conflict(*pair)
        try:
            base_recipe(options)
        except UsageError as error:
            said = str(error)
        else:
            assert row is None, pair
            continue
        assert "\n" not in said
        assert "  " not in said
        if row is None:
            assert "--calibration" in said, pair  # a text is missing, or has no effect
        else:
            assert said == row.message(settle(options))
            if conflict(pair[0]) is None and conflict(pair[1]) is None:
                assert {pair[0][0], pair[1][0]} <= {row.option, *row.others}, pair


def test_a_row_names_the_options_that_it_takes_and_no_other() -> None:
    """Over groups of up to three values: those of which none can be left out name the row's options."""
    found: dict[Conflict, set[str]] = {row: set() for row in CONFLICTS}
    threes = (
        cells
        for cells in itertools.combinations(CELLS, 3)
        if {"head_precision", "rules", "target"} & {name for name, _ in cells}
    )
    for cells in (*((cell,) for cell in CELLS), *itertools.combinations(CELLS, 2), *threes):
        names = {name for name, _ in cells}
        row = conflict(*cells)
        if row is None or len(names) < len(cells):
            continue
        if all(conflict(*(other for other in cells if other is not cell)) is not row for cell in cells):
            found[row] |= names
        if len(cells) == 1:  # another option that makes it right is one that the row needs
            found[row] |= {more[0] for more in CELLS if more[0] not in names and not conflict(*cells, more)}
    for row, names in found.items():
        assert names == {row.option, *row.others}, row.message


def test_every_kind_of_storage_is_had() -> None:
    found = {
        settle(ExportOptions("model", Path(), **dict(pair))).storage
        for pair in itertools.combinations(CELLS, 2)
    }
    assert found == set(Storage)
