"""The table of a proof: the worst of each kind of stage, NaN before all numbers, and names only as far as
they help.
"""

from __future__ import annotations

import math

from llorch_export.options import ExportOptions
from llorch_export.recipes.base import base_recipe
from llorch_export.terminal.layers import table
from llorch_export.verify.layers.stages import Kind, Measure, Stage
from llorch_export.verify.layers.verify import LayerReport

RECIPE = base_recipe(ExportOptions(source="", output=None))  # type: ignore[arg-type]  # a recipe needs no output


def stage(name: str, kind: Kind, distance: float, *, passed: bool = True, source: str = "observed") -> Stage:
    return Stage(name, kind, 0, source, Measure.RELATIVE, distance, 0.2, distance * 2, 0.5, passed)


def report(*stages: Stage, not_compared: tuple[str, ...] = ()) -> LayerReport:
    departing = [s for s in stages if not s.passed]
    first = departing[0] if departing else None
    return LayerReport(
        not departing,
        first,
        stages,
        not_compared,
        0.25,
        64,
        32,
        "sample",
        "the oracle",
        RECIPE,
        same_source=True,
    )


def row(text: str, kind: Kind) -> str:
    return next(line for line in text.splitlines() if line.startswith(kind))


def test_a_row_for_each_kind_with_its_worst_stage() -> None:
    text = table(
        report(
            stage("b", Kind.NORM, 0.01),
            stage("c", Kind.NORM, 0.03),
            stage("d", Kind.NORM, 0.02),
            stage("a", Kind.EMBEDDING, 0.5, passed=False),
        )
    )
    lines = text.splitlines()
    assert [line.split()[0] for line in lines[:3]] == ["stage", "embedding", "RMSNorm"]
    assert row(text, Kind.NORM).split() == [
        "RMSNorm",
        "3",
        "-",
        "3.00e-02",
        "relative",
        "0.2",
        "6.00e-02",
        "0.500000",
        "c",
    ]
    assert row(text, Kind.EMBEDDING).split()[1:3] == ["1", "1"]
    assert lines[3] == "4 stages over 64 tokens of sample text and 32 greedy tokens, against the oracle"


def test_nan_is_the_worst() -> None:
    text = table(
        report(
            stage("a", Kind.NORM, 9.0, passed=False),
            stage("b", Kind.NORM, math.nan, passed=False),
            stage("c", Kind.NORM, 0.1),
        )
    )
    assert row(text, Kind.NORM).split()[2:5] == ["2", "nan", "relative"]
    assert row(text, Kind.NORM).endswith(" b")


def test_stages_without_arrays_have_dashes() -> None:
    greedy = Stage("greedy", Kind.GREEDY, None, "observed", Measure.TOKENS, 2, None, None, None, passed=True)
    assert row(table(report(greedy)), Kind.GREEDY).split() == [
        "greedy",
        "tokens",
        "1",
        "-",
        "2",
        "tokens",
        "differ",
        "-",
        "-",
        "-",
        "greedy",
    ]


def test_what_is_recomputed_and_what_is_not_compared_is_said() -> None:
    queries = [stage(f"q{i}", Kind.ROPE, 0.0, source="recomputed") for i in range(2)]
    text = table(report(*queries, not_compared=tuple("abcdefgh")))
    assert "2 recomputed in numpy from what was observed (RoPE)" in text
    assert text.splitlines()[-1] == "without counterpart in the reference: a, b, c, d, e, f and 2 more"
    assert table(report(*queries, not_compared=("a", "b"))).endswith(": a, b\n")
    assert "without counterpart" not in table(report(*queries))
