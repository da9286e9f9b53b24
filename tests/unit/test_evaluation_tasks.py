"""What lm-eval returns becomes our document, and what its tasks ask for becomes requests; without lm-eval."""

from __future__ import annotations

from typing import Any

import pytest

from llorch_serve.errors import UsageError
from llorch_serve.evaluation.task_results import task_result
from llorch_serve.evaluation.task_sampling import sampling_of
from llorch_serve.sampling.params import SamplingParams


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


def test_an_answer_is_greedy_unless_a_task_says_otherwise() -> None:
    plain = sampling_of({"until": "\n"})
    assert (plain.temperature, plain.stop, plain.max_tokens, plain.repetition_penalty) == (0, ("\n",), 256, 1)
    # The model's own recommendations would count for what is absent.
    assert None not in (plain.top_k, plain.top_p, plain.min_p)
    asked = {"until": ["a", "", "b"], "do_sample": False, "temperature": 0.7, "max_gen_toks": 9, "top_p": 0.5}
    assert sampling_of(asked) == SamplingParams(
        temperature=0.0, top_k=0, top_p=1.0, min_p=0.0, repetition_penalty=1.0, max_tokens=9, stop=("a", "b")
    )


@pytest.mark.parametrize(
    ("asked", "temperature"),
    [
        ({"do_sample": True}, 1.0),
        ({"do_sample": True, "temperature": 0.3}, 0.3),
        ({"temperature": 0.3}, 0.3),
        ({"do_sample": True, "temperature": 0}, 0.0),
        ({}, 0.0),
    ],
)
def test_answers_are_drawn_where_lm_eval_would(asked: dict[str, Any], temperature: float) -> None:
    found = sampling_of({**asked, "top_p": 0.9, "top_k": 40, "max_new_tokens": 7})
    assert found.temperature == temperature
    assert (found.top_p, found.top_k) == ((0.9, 40) if temperature else (1.0, 0))
    assert found.max_tokens == 7


@pytest.mark.parametrize(
    "asked", [{"temperature": "warm"}, {"until": 5}, {"max_gen_toks": None}, {"top_k": []}]
)
def test_what_is_of_another_type_is_refused(asked: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match="a task's generation_kwargs are"):
        sampling_of({"do_sample": True, **asked})
