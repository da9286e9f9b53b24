"""The real model: the faithful recipe keeps its word, and a search finds what is within bounds."""

from __future__ import annotations

import pytest

from support.harness.processes import llorch_here

pytestmark = [pytest.mark.slow, pytest.mark.reference, pytest.mark.real_model]

LLAMA_CPP = 0.0027  # of its own run of the same file, over the same text


def test_the_faithful_recipe_is_as_near_as_llama_cpp_on_the_same_file(smollm2_gguf, tmp_path):
    made = llorch_here("export", smollm2_gguf, "--recipe", "cpu-faithful", "--output", tmp_path / "near")
    assert made.code == 0, made
    found = llorch_here("verify", tmp_path / "near", "--against", smollm2_gguf, "--json").document()
    assert found["kl"] <= LLAMA_CPP
    assert found["passed"] is True


def test_a_search_within_a_bound_that_the_default_does_not_keep(smollm2_gguf, tmp_path):
    flags = ("--max-kl", "0.003", "--prompt-tokens", "128", "--time", "4m", "--json")
    outcome = llorch_here(
        "tune", smollm2_gguf, *flags, "--output", tmp_path / "tuned", LLORCH_CACHE=tmp_path / "cache"
    )
    document = outcome.document()
    assert document["chosen"] not in (None, document["default"])
    assert len(document["tried"]) > 4
    chosen = next(one for one in document["tried"] if one["label"] == document["chosen"])
    assert chosen["kl"] <= 0.003
    found = llorch_here("verify", tmp_path / "tuned", "--against", smollm2_gguf, "--json").document()
    assert found["kl"] == pytest.approx(chosen["kl"], rel=0.3)
