"""Sessions whose attention holds little memory at a time give the logits that others give."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llorch_serve.artifact.folder import Artifact
from llorch_serve.config import SessionConfig
from llorch_serve.runtime import binding, score_memory
from llorch_serve.runtime.bound_graph import BoundGraph, Logits
from llorch_serve.runtime.opening import open_session
from llorch_serve.runtime.session import DecoderSession
from support.builders.arch_rows import HF
from support.builders.checkpoints import write_hf_folder
from support.builders.tiny_exports import export_tiny, random_ids
from tolerances import STEPWISE_LOGITS


def opened(artifact: Artifact, **options: Any) -> DecoderSession:
    config = SessionConfig(threads=1, slots=2, **options)
    return open_session(artifact, config, lambda _report: None)


@pytest.fixture(scope="module")
def over_int8(tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    folder = tmp_path_factory.mktemp("scores")
    return export_tiny(
        write_hf_folder(folder / "source"), folder / "artifact", precision="int8", kv_dtype="int8"
    )


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Return what is told of each graph that is loaded: whether it takes the plain kernel."""
    taken: list[bool] = []
    load = binding.load_graph

    def noted(*arguments: Any, plain: bool, packed: bool) -> Any:
        taken.append(plain)
        return load(*arguments, plain=plain, packed=packed)

    monkeypatch.setattr(binding, "load_graph", noted)
    return taken


def test_a_prompt_of_a_model_with_soft_caps_is_cut_to_what_its_scores_may_take(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = write_hf_folder(tmp_path / "source", HF["gemma2"])
    artifact = export_tiny(source, tmp_path / "artifact")
    ids = random_ids(100)
    wanted = [0, 31, 32, 63, 99]
    expected = opened(artifact).prefill(0, ids, 0, wanted).copy()
    monkeypatch.setattr(score_memory, "MOST_BYTES", 1)
    session, calls = opened(artifact), []
    run = BoundGraph.run

    def counted(
        graph: BoundGraph, first: int, token_ids: Sequence[int], lengths: Sequence[int], rows: Sequence[int]
    ) -> Logits:
        calls.append(len(token_ids))
        return run(graph, first, token_ids, lengths, rows)

    monkeypatch.setattr(BoundGraph, "run", counted)
    found = session.prefill(0, ids, 0, wanted)
    assert calls == [32, 32, 32, 4]
    assert np.abs(found - expected).max() < STEPWISE_LOGITS


@pytest.mark.parametrize("single_graph", [False, True])
def test_over_int8_the_kernel_in_tiles_is_taken_where_scores_would_be_too_many(
    over_int8: Artifact, kernels: list[bool], monkeypatch: pytest.MonkeyPatch, single_graph: bool
) -> None:
    ids = random_ids(40)

    def logits(bound: int) -> Logits:
        monkeypatch.setattr(score_memory, "MOST_BYTES", bound)
        kernels.clear()
        session = opened(over_int8, single_graph=single_graph)
        session.prefill(0, ids, 0)
        return session.decode([3], [len(ids) + 1]).copy()

    plain = logits(2**28)
    assert all(kernels)
    capacity = over_int8.manifest.context_length
    of_a_row = 4 * over_int8.manifest.model.num_attention_heads * capacity
    tiled = logits(of_a_row)  # of one row, where there are two slots
    assert not any(kernels)
    assert np.abs(tiled - plain).max() < STEPWISE_LOGITS
    logits(2 * of_a_row)
    assert kernels == ([False] if single_graph else [True, False]), (
        "a prompt's call has more rows than a step"
    )


@pytest.mark.parametrize(("bound", "plain"), [(2**28, True), (1, False)])
def test_a_graph_that_is_loaded_late_is_bounded_too(
    over_int8: Artifact, kernels: list[bool], monkeypatch: pytest.MonkeyPatch, bound: int, plain: bool
) -> None:
    monkeypatch.setattr(score_memory, "MOST_BYTES", bound)
    config = SessionConfig(threads=1, slots=2)
    session = open_session(over_int8, config, lambda _report: None, prompts_first=True)
    session.prefill(0, random_ids(40), 0)
    kernels.clear()
    session.decode([3], [41])
    assert kernels == [plain]
