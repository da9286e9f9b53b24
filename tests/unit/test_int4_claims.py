"""``ci/compare-llamacpp`` exits with an error as soon as int4 loses to Q4_K_M on any seed, by divergence or
by size.
"""

from __future__ import annotations

import pytest

from llorch_export.frontier.measure import OURS, WIDENED, Point

pytestmark = pytest.mark.reference  # the comparison trains models, so it imports torch


def measured(**changed: tuple[float, float]) -> list[Point]:
    """Return bits and divergence of what is compared, by series or label; ours below both others unless
    changed.
    """
    figures = {
        "llama.cpp": (4.9, 5e-4),
        WIDENED: (4.9, 4.5e-4),
        "int4": (4.8, 1.3e-4),
        "int4-gptq": (4.8, 1e-4),
    }
    figures |= changed
    theirs = [Point("Q4_K_M.gguf", *figures[series], 0.97, series) for series in ("llama.cpp", WIDENED)]
    return [*theirs, *(Point(label, *figures[label], 0.98, OURS) for label in ("int4", "int4-gptq"))]


def test_nothing_is_broken_where_ours_is_below() -> None:
    from measure.compare_llamacpp import broken

    assert not list(broken({0: measured(), 1: measured()}, {}))


@pytest.mark.parametrize("label", ["int4", "int4-gptq"])
@pytest.mark.parametrize(("figures", "lost_to"), [((4.8, 4.6e-4), 1), ((4.8, 5.1e-4), 2), ((4.95, 1e-4), 2)])
def test_one_seed_on_which_ours_loses_is_enough(
    label: str, figures: tuple[float, float], lost_to: int
) -> None:
    from measure.compare_llamacpp import broken

    problems = list(broken({0: measured(), 1: measured(**{label: figures})}, {}))
    assert len(problems) == lost_to
    assert all(problem.startswith("seed 1:") and label in problem for problem in problems)
