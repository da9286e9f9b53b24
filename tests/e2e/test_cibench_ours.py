"""Our side of ``ci/bench`` on the real model, with few tokens: the commands it calls and the figures it reads
from them.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import replace
from pathlib import Path

import pytest

import bench_peers
from bench_peers.contestant import Work
from bench_peers.ours import Recipe
from bench_peers.reference import reference
from bench_peers.reuse import PROMPTS

pytestmark = [pytest.mark.real_model, pytest.mark.reference]

ROOM = Path(bench_peers.__file__).parent.parent


@pytest.fixture
def recipe(smollm2):
    return Recipe("int8", (), smollm2("int8"))


def work(folder, tokens):
    ids = tuple(range(100, 100 + tokens))
    file = folder / "prompt.json"
    file.write_text(json.dumps(ids))
    return Work(ids, file, new_tokens=4, streams=(1, 2), repeat=1, threads=1)


def test_speeds_are_read_from_llorch_bench(recipe, tmp_path):
    one, two = recipe.measure(work(tmp_path, 24))
    assert (one.engine, one.streams, two.streams) == ("llorch", 1, 2)
    assert (one.prompt_tokens, one.new_tokens) == (24, 4)
    assert min(one.prefill_tokens_per_s, one.decode_tokens_per_s, two.decode_tokens_per_s) > 0
    assert one.peak_mib is not None
    assert one.peak_mib > 100


def test_speed_and_fidelity_on_a_provider_are_read_from_llorch_bench(recipe, tmp_path, smollm2_gguf):
    there = replace(recipe, provider=f"cpu@{sys.executable}")
    one, two = there.measure(work(tmp_path, 24))
    assert (one.streams, two.streams) == (1, 2)
    assert "onnxruntime" in one.version
    kept = reference(smollm2_gguf, recipe.folder, tmp_path / "kept", 32)
    assert there.closeness(kept, tmp_path, threads=1).kl == pytest.approx(
        recipe.closeness(kept, tmp_path, threads=1).kl, rel=0.5
    )


def test_gains_are_measured_with_the_same_ids(recipe, tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOM), os.environ.get("PYTHONPATH", "")]))
    found = recipe.gains(work(tmp_path, 64))
    assert [gain.prompt for gain in found.lookup] == list(PROMPTS)
    assert found.reused_tokens == found.prefix_tokens == 64
    assert 0 < found.second_ttft_ms < found.first_ttft_ms
    assert all(gain.parted is None for gain in found.lookup)  # four tokens of plain repetition


def test_fidelity_is_read_from_llorch_verify(recipe, tmp_path, smollm2_gguf, monkeypatch):
    kept = reference(smollm2_gguf, recipe.folder, tmp_path / "kept", 32)
    assert len(kept.header.token_ids) == 32
    close = recipe.closeness(kept, tmp_path, threads=1)
    assert 1e-4 < close.kl < 0.01
    assert close.top1 > 0.8
    monkeypatch.setattr("bench_peers.reference.Reference", None)  # a second time it is read, not computed
    assert reference(smollm2_gguf, recipe.folder, tmp_path / "kept", 32).header == kept.header


def test_a_command_is_timed_to_its_first_token(recipe):
    assert 0.1 < recipe.first_token_s("The capital of France is", threads=1) < 60
