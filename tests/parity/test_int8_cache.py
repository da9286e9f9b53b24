"""A KV cache in int8: what is rounded and how, and that batches, chunks and moves change no bit of it."""

from __future__ import annotations

import itertools
import mmap
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from llorch_export.artifact.cache_scales import measure_scales
from llorch_serve.artifact.folder import Artifact, load_artifact
from llorch_serve.cache import handoff
from llorch_serve.config import SessionConfig
from llorch_serve.errors import ArtifactError, ProviderError, ResourceError, UsageError
from llorch_serve.fidelity.divergence import DivergenceSum
from llorch_serve.fidelity.judging import SLOTS, Judge
from llorch_serve.fidelity.reference_file import divergence, read_reference
from llorch_serve.runtime.opening import open_session
from llorch_serve.runtime.session import DecoderSession
from support.builders.arch_rows import HF
from support.builders.checkpoints import write_hf_folder
from support.builders.reference_files import own_reference
from support.builders.tiny_exports import export_tiny, random_ids
from tolerances import KL_INT8_CACHE, STEPWISE_LOGITS

Logits = npt.NDArray[np.float32]
Rounded = npt.NDArray[np.int8]

ROWS = ["plain", "heads of 24", "smollm3, layers", "phi3, half rotated", "mistral, window"]
"""Of every way that attention is fed; further rows are in the test of what rounding costs."""

OTHER_ROWS = [
    "heads of 8",
    "heads of 40, one kv head",
    "yarn",
    "qwen3, wide heads",
    "phi3",
    "granite",
    "gemma2",
    "gemma3, pattern",
    "hunyuan",
    "cohere2",
    "mistral, window of 1",
]


@pytest.fixture(scope="module", params=ROWS)
def artifact(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    folder = tmp_path_factory.mktemp("int8-cache")
    source = write_hf_folder(folder / "source", HF.get(request.param))
    return export_tiny(source, folder / "artifact", precision="int8", kv_dtype="int8")


def opened(artifact: Artifact, **options: Any) -> DecoderSession:
    config = replace(SessionConfig(threads=1, slots=4), **options)
    return open_session(artifact, config, lambda _report: None)


def held(session: DecoderSession, slot: int, tokens: int) -> dict[tuple[int, str], Rounded]:
    """Return what a slot's cache holds, by layer and kind."""
    layers = session.artifact.manifest.kv.layers
    return {
        (layer, kind): session.cache.rows(layer, kind, slot, 1)[0, :, :tokens].copy()  # type: ignore[misc]  # int8 here
        for layer, kind in itertools.product(range(layers), ("key", "value"))
    }


def scales(artifact: Artifact) -> npt.NDArray[np.float32]:
    kv, int8 = artifact.manifest.kv, artifact.manifest.int8_cache
    assert int8 is not None
    data = np.fromfile(artifact.folder / int8.scales, "<f4")
    return data.reshape(kv.layers, 2, kv.kv_heads, kv.head_dim)


def test_int8_is_the_default_and_takes_a_quarter(artifact: Artifact) -> None:
    session, plain = opened(artifact), opened(artifact, kv_dtype="float32")
    assert session.kv_dtype == "int8"
    assert plain.kv_dtype == "float32"
    assert session.capacity.bytes_per_token * 4 == plain.capacity.bytes_per_token
    assert session.capabilities.separate_prompts
    assert not plain.capabilities.separate_prompts


def test_a_prompt_is_rounded_as_the_runtime_rounds(artifact: Artifact) -> None:
    # The first layer's keys and values do not depend on the cache, so both ways must give the same bytes.
    session, single = opened(artifact), opened(artifact, single_graph=True)
    ids = random_ids(50)
    for each in (session, single):
        each.prefill(1, ids, 0)
    ours, theirs = held(session, 1, 50), held(single, 1, 50)
    for kind in ("key", "value"):
        assert np.array_equal(ours[0, kind], theirs[0, kind])
        assert np.abs(ours[0, kind]).max() > 32  # it is the scale's range that is used


def test_rounding_is_to_the_nearest_step(artifact: Artifact) -> None:
    session, plain = opened(artifact), opened(artifact, kv_dtype="float32")
    ids = random_ids(40)
    for each in (session, plain):
        each.prefill(2, ids, 0)
    rounded, exact, steps = held(session, 2, 40), held(plain, 2, 40), scales(artifact)
    assert rounded.keys() == exact.keys() != set()
    for (layer, kind), values in rounded.items():
        step = steps[layer, ("key", "value").index(kind)][:, None, :]
        wanted = np.clip(exact[layer, kind] / step, -128, 127)  # what is out of range is cut off
        assert np.abs(values - wanted).max() <= 0.5001


def test_a_rotated_pair_shares_its_range(artifact: Artifact) -> None:
    config, steps = artifact.manifest.model, scales(artifact)
    half = config.rotary_dim // 2
    for layer in range(config.num_hidden_layers):
        keys = steps[layer, 0]
        same = np.array_equal(keys[:, :half], keys[:, half : 2 * half])
        assert same == config.rotates(layer)


def test_a_keys_range_holds_at_every_position(artifact: Artifact) -> None:
    """Slow pairs turn through all angles only in contexts that are longer than the text."""
    some, count = random_ids(4), artifact.manifest.context_length
    steps = measure_scales(artifact, [some], lambda _tokens: None)
    session = opened(artifact, slots=1, kv_dtype="float32")
    session.prefill(0, (some * count)[:count], 0, ())
    keys = session.cache.rows(0, "key", 0, 1)[0]
    reach = np.abs(keys).max(axis=1) / steps[0, 0]
    assert 0.9 * 127 / 1.25 < reach.max() < 1.001 * 127 / 1.25


def test_alone_batched_and_checked_rows_are_the_same_bits(artifact: Artifact) -> None:
    session = opened(artifact)
    prompts = [random_ids(n, seed=n) for n in (9, 30, 2, 17)]
    answer = random_ids(6, seed=3)
    for slot, prompt in enumerate(prompts):
        session.prefill(slot, prompt, 0)
    together = [
        session.decode([token] * 4, [len(p) + step + 1 for p in prompts]).copy()
        for step, token in enumerate(answer)
    ]
    for slot, prompt in enumerate(prompts):
        session.prefill(0, prompt, 0)
        checked = session.verify(0, answer, len(prompt)).copy()
        for step, token in enumerate(answer):
            alone = session.decode([token], [len(prompt) + step + 1])[0]
            assert np.array_equal(alone, together[step][slot])
            assert np.array_equal(alone, checked[step])


def test_chunks_of_a_prompt_see_it_unrounded(artifact: Artifact) -> None:
    session = opened(artifact)
    ids = random_ids(96)
    whole = session.prefill(0, ids, 0).copy()
    for start in range(0, 96, 32):
        cut = session.prefill(1, ids[start : start + 32], start)
    assert np.array_equal(cut, whole)
    first, second = held(session, 0, 96), held(session, 1, 96)
    assert all(np.array_equal(first[place], second[place]) for place in first)


def test_a_prompt_under_way_follows_its_slot(artifact: Artifact) -> None:
    session = opened(artifact)
    ids = random_ids(64)
    whole = session.prefill(3, ids, 0).copy()
    session.prefill(0, ids[:32], 0, ())
    session.swap_slots(0, 2, 32)
    assert np.array_equal(session.prefill(2, ids[32:], 32), whole)


def test_a_prefix_of_another_slot_is_taken_up_as_it_was_rounded(
    artifact: Artifact, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = opened(artifact)
    monkeypatch.setenv("ORT_GQA_DISABLE_FLASH_ATTENTION", "1")  # the kernel that prompts have
    plain = opened(artifact, kv_dtype="float32")
    ids = random_ids(64)
    whole = session.prefill(0, ids, 0, range(32, 64)).copy()
    rounded, steps = held(session, 0, 32), scales(artifact)
    for (layer, kind), values in rounded.items():  # the same prefix by hand, in a session that rounds nothing
        step = steps[layer, ("key", "value").index(kind)][:, None, :]
        plain.cache.rows(layer, kind, 1, 1)[0, :, :32] = values * step
    expected = plain.prefill(1, ids[32:], 32, range(32)).copy()
    session.prefill(2, random_ids(5, seed=9), 0)  # another prompt comes between
    session.copy_slot(0, 1, 32)
    resumed = session.prefill(1, ids[32:], 32, range(32)).copy()
    assert np.array_equal(resumed, expected)
    assert not np.array_equal(resumed, whole)
    # Where a copy has just replaced what the prompt's cache stood for, that must not be taken for it.
    session.prefill(1, random_ids(32, seed=11), 0)
    session.copy_slot(0, 1, 32)
    assert np.array_equal(session.prefill(1, ids[32:], 32, range(32)), expected)


def test_part_of_the_last_prompt_is_taken_up_unrounded_in_its_own_slot(artifact: Artifact) -> None:
    session = opened(artifact)
    ids, others = random_ids(64), random_ids(20, seed=7)
    expected = session.prefill(1, [*ids[:40], *others], 0, range(40, 60)).copy()
    session.prefill(0, ids, 0)
    session.decode([5], [65])  # behind it
    found = session.prefill(0, others, 40, range(20)).copy()
    assert np.array_equal(found, expected)
    session.swap_slots(0, 2, 64)
    assert np.array_equal(session.prefill(2, others, 40, range(20)), expected)
    # Beyond where the last prompt ended, the slot holds what steps have rounded.
    session.prefill(0, ids[:40], 0)
    session.verify(0, ids[40:50], 40)
    assert not np.array_equal(session.prefill(0, others[10:], 50, range(10)), expected[10:])


@pytest.mark.parametrize("how", ["decode", "verify"])
def test_what_running_calls_wrote_below_the_last_prompts_end_is_taken_up(
    artifact: Artifact, how: str
) -> None:
    """As a draft model's sequences do, whose first tokens may take no call of prompts."""
    ids, others = random_ids(64), random_ids(40, seed=7)
    expected, found = opened(artifact), opened(artifact)
    found.prefill(0, ids, 0)
    for session in (expected, found):
        if how == "decode":
            for place in range(5):
                session.decode([others[place]], [place + 1])
        else:
            session.verify(0, others[:5], 0)
    wanted = expected.prefill(0, others[5:], 5, range(35)).copy()
    assert np.array_equal(found.prefill(0, others[5:], 5, range(35)), wanted)


@pytest.mark.parametrize("graph", ["prefill", "verify"])
def test_each_graph_is_judged_over_what_it_has_written_itself(artifact: Artifact, graph: str) -> None:
    ids, parts = random_ids(60), range(0, 60, 25)
    alone, judge = opened(artifact), Judge(opened(artifact, slots=SLOTS), artifact.manifest)
    run = {"prefill": alone.prefill, "verify": alone.verify}[graph]
    for start in parts:
        part = ids[start : start + 25]
        wanted = (range(len(part)),) if graph == "prefill" else ()
        judge.add(part, start, run(0, part, start, *wanted).copy())
    found = judge.result()
    assert {"prefill": found.prefill_kl, "verify": found.decode_kl}[graph] == pytest.approx(0, abs=1e-9)


def test_a_cache_without_room_for_both_graphs_is_no_place_to_judge_them(
    artifact: Artifact, tmp_path: Path
) -> None:
    own_reference(tmp_path / "ref", artifact, random_ids(60))
    reference = read_reference(tmp_path / "ref")
    for_one = 100 * artifact.manifest.kv.bytes_per_token
    with pytest.raises(ResourceError, match="grow to 100 tokens, and comparing both graphs"):
        divergence(opened(artifact, slots=SLOTS, max_context=60, kv_cache_bytes=for_one // 4), reference)


@pytest.mark.skipif(
    sys.platform == "win32" or mmap.PAGESIZE > 4096,
    reason="Windows takes no memory back, and a tiny model's rows have no whole large page",
)
def test_what_a_long_prompt_took_goes_back_when_another_begins(
    artifact: Artifact, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = opened(artifact).prefill(1, random_ids(70, seed=5), 0).copy()
    monkeypatch.setattr(handoff, "KEPT", 8)
    session = opened(artifact)
    session.prefill(0, random_ids(100), 0)
    under_way = session._handoff  # what it keeps has no other effect than memory
    assert under_way is not None
    rows = [
        under_way.prompt.rows(layer, kind, 0, 1)
        for layer in range(artifact.manifest.kv.layers)
        for kind in ("key", "value")
    ]
    taken = sum(np.count_nonzero(row) for row in rows)
    session.prefill(1, random_ids(2, seed=4), 0)
    assert sum(np.count_nonzero(row) for row in rows) < 0.75 * taken
    # A prompt that goes on keeps what it has.
    ids = random_ids(70, seed=5)
    session.prefill(1, ids[:32], 0, ())
    assert np.abs(session.prefill(1, ids[32:], 32) - expected).max() < STEPWISE_LOGITS


def test_the_cost_of_rounding_is_small(artifact: Artifact) -> None:
    assert 0 < cost_of_rounding(artifact) < KL_INT8_CACHE


@pytest.mark.parametrize("row", OTHER_ROWS)
def test_the_cost_of_rounding_is_small_in_every_family(row: str, tmp_path: Path) -> None:
    source = write_hf_folder(tmp_path / "source", HF[row])
    artifact = export_tiny(source, tmp_path / "artifact", precision="int8", kv_dtype="int8")
    assert 0 < cost_of_rounding(artifact) < KL_INT8_CACHE


def cost_of_rounding(artifact: Artifact) -> float:
    """Return the divergence of answers over int8 from those over float32, on tokens of a seed of their
    own.
    """
    session, plain = opened(artifact), opened(artifact, kv_dtype="float32")
    count = min(120, artifact.manifest.context_length)
    ids = random_ids(count, seed=21)
    figures = DivergenceSum()
    for start in range(0, count, 40):
        chunk = ids[start : start + 40]
        expected = plain.verify(0, chunk, start).copy()
        figures.add(expected, session.verify(0, chunk, start))
    return figures.result().kl


def test_a_single_graph_does_both(artifact: Artifact) -> None:
    session = opened(artifact, single_graph=True)
    assert session.kv_dtype == "int8"
    assert not session.capabilities.separate_prompts
    ids = random_ids(20)
    together = session.prefill(0, ids, 0, range(20)).copy()
    assert np.array_equal(session.verify(1, ids, 0), together)


def test_kernels_over_float_keep_theirs(artifact: Artifact, monkeypatch: pytest.MonkeyPatch) -> None:
    import os

    monkeypatch.setenv("ORT_GQA_DISABLE_FLASH_ATTENTION", "0")
    opened(artifact)
    assert os.environ["ORT_GQA_DISABLE_FLASH_ATTENTION"] == "0"
    monkeypatch.delenv("ORT_GQA_DISABLE_FLASH_ATTENTION")
    opened(artifact)
    assert "ORT_GQA_DISABLE_FLASH_ATTENTION" not in os.environ


def test_what_an_artifact_has_not_is_refused(artifact: Artifact, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"--kv-dtype is float16; .* int8 and float32"):
        opened(artifact, kv_dtype="float16")
    with pytest.raises(UsageError, match="--single-graph has no effect"):
        opened(artifact, kv_dtype="float32", single_graph=True)
    plain = export_tiny(write_hf_folder(tmp_path / "source"), tmp_path / "fp32")
    with pytest.raises(UsageError, match=r"--kv-dtype is int8; .* graphs for float32"):
        opened(plain, kv_dtype="int8")


@pytest.mark.parametrize("damage", ["short", "long", "negative", "nan"])
def test_damaged_scales_are_refused(artifact: Artifact, tmp_path: Path, damage: str) -> None:
    import shutil

    folder = Path(shutil.copytree(artifact.folder, tmp_path / "copy"))
    path = folder / "kv_scales.bin"
    steps = scales(artifact).copy()
    steps[0, 0, 0, 0] = {"negative": -1, "nan": np.nan}.get(damage, steps[0, 0, 0, 0])
    data = steps.tobytes()
    path.write_bytes(data[:-4] if damage == "short" else data + b"\0" * 4 if damage == "long" else data)
    loaded = Artifact(folder=folder, manifest=load_artifact(artifact.folder).manifest)
    with pytest.raises(ArtifactError, match=r"positive float32 scales|cannot be loaded"):
        opened(loaded)


def test_an_older_runtime_is_refused_with_a_way_out(
    artifact: Artifact, monkeypatch: pytest.MonkeyPatch
) -> None:
    import onnxruntime

    monkeypatch.setattr(onnxruntime, "__version__", "1.26.0")
    with pytest.raises(ProviderError, match=r"1\.26\.0 .* 1\.27 or later.*--kv-dtype float32"):
        opened(artifact)
    assert opened(artifact, kv_dtype="float32").kv_dtype == "float32"
