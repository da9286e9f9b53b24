"""Which recipes are tried: all that are shipped, and what is a step away, without a list of their own."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from llorch_export.checkpoint.base import Checkpoint
from llorch_export.recipes.file import load_recipe, shipped_recipes
from llorch_export.source.open import open_checkpoint
from llorch_export.tune import candidates
from llorch_export.tune.candidates import Candidate, Candidates
from support.builders.arch_rows import HF
from support.builders.checkpoints import write_gguf, write_hf_folder

VNNI = ("avx2", "avx512f", "avx512_vnni")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return open_checkpoint(str(write_hf_folder(tmp_path_factory.mktemp("tune") / "source")), "none")


def labels(found: list[Candidate]) -> list[str]:
    return [one.label for one in found]


def test_every_shipped_recipe_is_tried_but_those_for_prompts_and_those_that_come_to_the_same(
    folder: Checkpoint,
) -> None:
    pool = Candidates(folder, VNNI, 512)
    assert pool.default.label == "cpu-calibrated"
    # What int4-gptq says, int4 does by itself for a model this small.
    apart = {*pool.prompt_recipes, pool.default.label, "int4-gptq"}
    assert {*labels(pool.named())} == {*shipped_recipes()} - apart
    assert "cpu-faithful" in shipped_recipes()
    assert pool.prompt_recipes == ("cpu-prompts", "cpu-calibrated-prompts")
    assert pool.named() == []  # given once


def test_recipes_come_coarsest_first_and_whole_weights_last(folder: Checkpoint) -> None:
    order = labels(Candidates(folder, VNNI, 512).named())
    assert order.index("int4") < order.index("cpu-fast") < order.index("int8")
    assert order[-1] == "fp32"


def test_of_a_large_model_recipes_of_error_feedback_come_late(
    folder: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    feedback, plain = load_recipe("int4-gptq"), load_recipe("int8")
    kind = Candidates(folder, VNNI, 512)._kind
    assert kind(feedback) < kind(plain) < kind(load_recipe("fp32"))
    monkeypatch.setattr(candidates, "MOST_MEASURED", 1)
    assert kind(plain) < kind(feedback) < kind(load_recipe("fp32"))


def test_a_gguf_files_own_blocks_are_tried(tmp_path: Path) -> None:
    quantised = open_checkpoint(str(write_gguf(tmp_path / "q8.gguf", weight_type="Q8_0")), "none")
    assert "source" in labels(Candidates(quantised, VNNI, 512).named())


def changed(start: Candidate, step: Candidate) -> dict[str, Any]:
    before, after = start.recipe, step.recipe
    fields = {
        name: getattr(after.defaults, name)
        for name in before.defaults.__slots__
        if getattr(before.defaults, name) != getattr(after.defaults, name)
    }
    chunk = {} if start.prefill_chunk == step.prefill_chunk else {"prefill_chunk": step.prefill_chunk}
    return fields | ({"rules": after.rules} if before.rules != after.rules else {}) | chunk


def test_a_step_changes_one_thing_and_a_text_only_where_that_needs_it(folder: Checkpoint) -> None:
    pool = Candidates(folder, VNNI, 512)
    for name in ("cpu-calibrated", "cpu", "int4-mixed"):
        start = Candidate(name, load_recipe(name))
        for step in pool.steps(start):
            difference = {*changed(start, step)}
            assert len(difference - {"calibration"}) == 1, step.label
    steps = {
        step.label: step for step in Candidates(folder, VNNI, 512).steps(Candidate("cpu", load_recipe("cpu")))
    }
    assert changed(Candidate("cpu", load_recipe("cpu")), steps["cpu, with equalise"]) == {
        "transforms": ("rotate", "hadamard", "equalise"),
        "calibration": "bundled",
    }


def test_the_axes_are_those_that_recipes_are_made_of(folder: Checkpoint) -> None:
    pool = Candidates(folder, VNNI, 512)
    found = {key for step in pool.steps(pool.default) for key in changed(pool.default, step)}
    assert {
        "block_size",
        "activations",
        "transforms",
        "kv_dtype",
        "prefill",
        "rules",
        "accuracy_level",
        "quantizer",
        "prefill_chunk",
    } <= found


def test_without_products_of_bytes_no_step_leads_to_per_channel_int8(folder: Checkpoint) -> None:
    pool = Candidates(folder, ("avx2",), 512)
    plain = Candidate("int8", load_recipe("int8"))
    for step in pool.steps(plain):
        forms = {step.recipe.defaults.activations, *(rule.activations for rule in step.recipe.rules)}
        assert forms <= {None, "block"}, step.label
        assert step.recipe.defaults.prefill is None, step.label
    assert any("activations" in changed(plain, step) for step in Candidates(folder, VNNI, 512).steps(plain))


def test_no_recipe_comes_twice_by_whatever_steps(folder: Checkpoint) -> None:
    pool = Candidates(folder, VNNI, 512)
    found = [pool.default, *pool.named()]
    for start in list(found):
        found += pool.steps(start)
    assert len({one.key for one in found}) == len(found)
    assert len({one.label for one in found}) == len(found)


def test_the_key_is_of_what_is_exported(folder: Checkpoint) -> None:
    cpu = load_recipe("cpu")
    other = replace(cpu, description="else", defaults=replace(cpu.defaults, kl_limit=0.5))
    assert Candidate("a", cpu).key == Candidate("b", other).key
    assert Candidate("a", cpu).key != Candidate("a", load_recipe("int8")).key


def test_how_many_prompt_tokens_a_step_takes_is_a_step_of_the_worker_alone(folder: Checkpoint) -> None:
    pool = Candidates(folder, VNNI, 512)
    chunks = [step for step in pool.steps(pool.default) if "prefill_chunk" in changed(pool.default, step)]
    assert [step.prefill_chunk for step in chunks] == [128, 512]
    assert {step.artifact_key for step in chunks} == {pool.default.key}  # one export serves all
    assert len({pool.default.key, *(step.key for step in chunks)}) == 3
    onwards = pool.steps(chunks[0])
    assert onwards
    assert {step.prefill_chunk for step in onwards if step.recipe != chunks[0].recipe} == {128}


def test_steps_of_more_tokens_than_prompts_have_are_not_tried(folder: Checkpoint) -> None:
    for prompt_tokens, tried in ((100, []), (200, [128]), (300, [128, 512])):
        pool = Candidates(folder, VNNI, prompt_tokens)
        steps = [step for step in pool.steps(pool.default) if "prefill_chunk" in changed(pool.default, step)]
        assert [step.prefill_chunk for step in steps] == tried


def test_what_would_change_the_model_is_no_step(tmp_path: Path) -> None:
    """A family with norms behind its blocks cannot be rotated."""
    source = write_hf_folder(tmp_path / "olmo2", HF["olmo2"])
    pool = Candidates(open_checkpoint(str(source), "none"), VNNI, 512)
    assert pool.default.label == "int8"
    assert all("rotate" not in step.recipe.defaults.transforms for step in pool.steps(pool.default))
