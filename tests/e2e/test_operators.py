"""Where a prompt's time and a step's go by the runtime's own profiler: its events are found at their time."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from measure import operators


def shares(table: str) -> dict[str, float]:
    """Return the share of each operator of a table, in percent."""
    return {
        name: float(share)
        for name, share in re.findall(r"^\| ([^|]+) \|[^|]*\| (-?[\d.]+)% \|$", table, re.M)
    }


def test_operators_of_a_prompt_and_of_a_step_are_found_at_their_time(
    tiny: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    operators.main(tiny, prompt_tokens=40, streams=2, context=20)
    prompt, step = capsys.readouterr().out.split("\n\na step of 2 at 20 tokens")
    assert prompt.startswith("40 tokens of a prompt: ")
    for table in (prompt, step):
        found = shares(table)
        assert found["GroupQueryAttention"] > 0
        assert any(name.startswith("MatMul") for name in found)
        assert sum(found.values()) == pytest.approx(100, abs=0.05 * len(found) + 0.05)  # as printed
        assert found["the rest"] < 100


def test_what_happened_elsewhere_is_not_counted() -> None:
    events = [(0.5, "A", 1.0), (1.5, "A", 2.0), (1.6, "B", 4.0), (2.5, "A", 8.0), (3.1, "A", 16.0)]
    found = operators.costs([(1.0, 2.0), (3.0, 4.0)], events)
    assert found == operators.Costs({"A": 9.0, "B": 2.0}, 1000.0)
