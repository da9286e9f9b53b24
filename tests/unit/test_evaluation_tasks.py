"""What lm-eval returns becomes our document, and what its tasks ask for becomes requests; without lm-eval."""

from __future__ import annotations

from typing import Any

import pytest

from llorch_serve.evaluation.task_results import task_result


def returned(**changes: Any) -> dict[str, Any]:
    """As ``lm_eval.evaluator.evaluate`` 0.4.13 returns it, shortened."""
    samples = [
        {
            "doc_id": n,
            "filter": "none",
            "doc_hash": f"d{n}",
            "prompt_hash": f"p{n}",
            "acc": n % 2,
            "f1": (n, 1),
        }
        for n in range(4)
    ]
    found = {
        "results": {
            "quiz": {
                "name": "quiz",
                "alias": " - quiz",
                "sample_len": 4,
                "acc,none": 0.5,
                "acc_stderr,none": 0.288,
                "f1,none": 0.25,
                "f1_stderr,none": "N/A",
                "perplexity,none": float("inf"),
                "perplexity_stderr,none": float("nan"),
            },
            "group": {"alias": "group", "sample_len": 4, "acc,none": 0.5, "acc_stderr,none": 0.288},
        },
        "versions": {"quiz": "Yaml", "group": 2.0},
        "n-shot": {"quiz": 3},
        "n-samples": {"quiz": {"original": 9, "effective": 4}},
        "higher_is_better": {"quiz": {"acc": True, "perplexity": False}, "group": {"acc": None}},
        "samples": {"quiz": samples},
    }
    return {**found, **changes}


def test_figures_come_with_their_errors_and_what_is_no_number_is_none() -> None:
    found = task_result("quiz", returned())
    assert (found.task, found.version, found.shots, found.n, found.of) == ("quiz", None, 3, 4, 9)
    accuracy, f1, perplexity = found.metrics
    assert (accuracy.name, accuracy.filter, accuracy.value, accuracy.stderr) == ("acc", "none", 0.5, 0.288)
    assert (accuracy.better, perplexity.better, f1.better) == ("higher", "lower", None)
    assert accuracy.samples == (0.0, 1.0, 0.0, 1.0)
    assert (f1.value, f1.stderr, f1.samples) == (0.25, None, None)  # no mean of single values
    assert (perplexity.value, perplexity.stderr) == (None, None)


def test_a_group_has_no_questions_of_its_own() -> None:
    found = task_result("group", returned())
    assert (found.version, found.shots, found.n, found.of, found.samples_sha256) == (
        "2.0",
        None,
        4,
        None,
        None,
    )
    assert found.metrics[0].better is None


@pytest.mark.parametrize("field", ["doc_id", "doc_hash", "prompt_hash", "filter"])
def test_other_questions_have_another_hash(field: str) -> None:
    changed = returned()
    changed["samples"]["quiz"][2][field] = "x"
    assert task_result("quiz", changed).samples_sha256 != task_result("quiz", returned()).samples_sha256


def test_a_value_that_is_not_the_mean_of_its_samples_has_none() -> None:
    changed = returned()
    changed["results"]["quiz"]["acc,none"] = 0.6
    assert task_result("quiz", changed).metrics[0].samples is None
