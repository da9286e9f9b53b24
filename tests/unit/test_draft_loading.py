"""A draft model as it is loaded: which go together, what is refused by name, and what memory each gets."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import msgspec
import pytest

from llorch_export.graph.stage_choice import StageChoice
from llorch_serve.artifact.folder import Artifact, load_artifact
from llorch_serve.cache.kv_cache import KvCapacity
from llorch_serve.config import EngineConfig, SessionConfig, check_guesses
from llorch_serve.errors import ArtifactError, LlorchError, ProviderError, UsageError
from llorch_serve.loading.draft import find_draft
from llorch_serve.loading.models import load_model
from llorch_serve.loading.repeatable import repeatable
from llorch_serve.loading.worker import load_any, load_worker
from llorch_serve.providers import CPU, ProviderChoice, activate, import_runtime
from llorch_serve.requests import GenerationRequest, TokenPrompt
from llorch_serve.runtime.graph_choice import choose_graphs
from llorch_serve.runtime.memory_plan import Beside, plan_memory
from llorch_serve.runtime.opening import LoadReport
from llorch_serve.runtime.session import DecoderSession
from llorch_serve.sampling.params import SamplingParams
from llorch_serve.worker.local import stream
from llorch_serve.worker.worker import Worker
from support.builders.checkpoints import write_hf_folder
from support.builders.foreign_folders import write_genai_folder, write_optimum_folder
from support.builders.tiny_exports import export_tiny

PROMPT = TokenPrompt(tuple(100 + i % 40 for i in range(30)))
THREADS = SessionConfig(threads=1, slots=2)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A model; drafts of other weights, of a shorter context and of other tokens; and what cannot guess."""
    folder = tmp_path_factory.mktemp("drafts")
    source = write_hf_folder(folder / "source")
    made = {"model": export_tiny(source, folder / "model").folder}
    for name, changes, seed in (
        ("other", {"num_hidden_layers": 1}, 5),
        ("short", {"max_position_embeddings": 48}, 0),
    ):
        made[name] = export_tiny(
            write_hf_folder(folder / f"{name}-source", changes, seed), folder / name
        ).folder
    for name, options in (
        ("int8", {"precision": "int8", "kv_dtype": "int8"}),
        ("embeds", {"embed": "mean"}),
        ("staged", {"stages": StageChoice(2)}),
        ("fixed", {"target": "coreml"}),
    ):
        made[name] = export_tiny(source, folder / name, **options).folder
    made["genai"] = write_genai_folder(folder / "genai")
    made["optimum"] = write_optimum_folder(folder / "optimum")
    for name, token in (("renamed", "word"), ("spaced", None)):
        made[name] = folder / name
        shutil.copytree(made["model"], made[name])
        _change_tokenizer(made[name], token)
    return made


def _change_tokenizer(folder: Path, token: str | None) -> None:
    """Give the last token another text, or write the same tokens otherwise; the manifest is made to fit."""
    path = folder / "tokenizer.json"
    document = json.loads(path.read_text())
    if token is not None:
        vocabulary = document["model"]["vocab"]
        last = max(vocabulary, key=vocabulary.__getitem__)
        document["model"]["vocab"] = {k: v for k, v in vocabulary.items() if k != last} | {
            token: vocabulary[last]
        }
        document["model"]["merges"] = document["model"]["merges"][:-1]
    text = json.dumps(document, indent=1)
    path.write_text(text)
    manifest = json.loads((folder / "llorch.json").read_text())
    for entry in manifest["files"]:
        if entry["path"] == "tokenizer.json":
            entry["bytes"] = path.stat().st_size
    (folder / "llorch.json").write_text(json.dumps(manifest))


def loaded(folder: Path, draft: Path | None, **more: object) -> Worker:
    session = replace(THREADS, **more)  # type: ignore[arg-type]
    return load_worker(folder, EngineConfig(session=session, draft=draft), lambda report: None)


def answer(worker: Worker, *, tokens: int = 60, **params: object) -> tuple[list[int], int, int]:
    sampling = SamplingParams(max_tokens=tokens, ignore_eos=True, **params)  # type: ignore[arg-type]
    updates = list(stream(worker, GenerationRequest("a", PROMPT, sampling)))
    done = updates[-1].completion
    assert done is not None
    ids = [token for update in updates for token in update.token_ids]
    return ids, done.drafted_tokens, done.accepted_tokens


SAMPLINGS = {"greedy": {"temperature": 0.0}, "sampled": {"temperature": 1.0, "seed": 3}}


@pytest.mark.parametrize("params", SAMPLINGS.values(), ids=SAMPLINGS)
@pytest.mark.parametrize("draft", ["model", "other", "short", "int8", "spaced"])
def test_answers_are_those_without_a_draft(
    folders: dict[str, Path], draft: str, params: dict[str, object]
) -> None:
    plain, guessing = loaded(folders["model"], None), loaded(folders["model"], folders[draft])
    try:
        guessing.warm_up()
        wanted, drafted, _ = answer(plain, **params)
        assert drafted == 0
        found, drafted, accepted = answer(guessing, **params)
        assert found == wanted
        assert drafted >= accepted
        assert drafted > 0
        if draft == "model":
            assert accepted == drafted
        if draft == "other":
            assert accepted < drafted
        assert guessing.model_info().batch_invariant is False
    finally:
        plain.close()
        guessing.close()


@pytest.mark.parametrize(
    ("draft", "found"),
    [
        ("embeds", "which holds a graph that embeds texts"),
        ("staged", "which is cut into 2 stages"),
        ("fixed", "which is for the target coreml"),
        ("genai", "which was made by onnxruntime-genai"),
        ("optimum", "which was made by optimum"),
    ],
)
def test_what_cannot_guess_is_refused_by_what_it_is(folders: dict[str, Path], draft: str, found: str) -> None:
    with pytest.raises(UsageError, match=found) as refusal:
        loaded(folders["model"], folders[draft])
    assert f"--draft is {folders[draft]}" in str(refusal.value)
    assert "Export a smaller model" in str(refusal.value)


@pytest.mark.parametrize(
    ("model", "found"),
    [
        ("staged", "is cut into 2 stages"),
        ("genai", "was made by onnxruntime-genai"),
        ("optimum", "was made by optimum"),
        ("fixed", "--draft .* has no effect on the graph"),
        ("embeds", "--draft has no effect on .* embeds texts"),
    ],
)
def test_a_model_that_no_draft_goes_with_refuses_it(folders: dict[str, Path], model: str, found: str) -> None:
    config = EngineConfig(session=THREADS, draft=folders["model"])
    with pytest.raises(UsageError, match=found):
        load_any(folders[model], config, lambda report: None)


def test_other_tokens_are_refused_and_named(folders: dict[str, Path]) -> None:
    with pytest.raises(ArtifactError, match="1 ids stand for different ones, the first of them 511") as found:
        loaded(folders["model"], folders["renamed"])
    assert "expects an artifact of the same tokenizer" in str(found.value)


def test_a_tokenizer_of_the_models_own_is_the_one_that_counts(folders: dict[str, Path]) -> None:
    model, own = load_model(folders["model"]), folders["renamed"] / "tokenizer.json"
    assert find_draft(folders["renamed"], model, own, THREADS).artifact.folder == folders["renamed"]
    with pytest.raises(ArtifactError):
        find_draft(folders["other"], model, own, THREADS)


def test_a_folder_that_is_none_is_refused_before_anything_is_loaded(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    with pytest.raises(LlorchError, match="no-draft"):
        loaded(folders["model"], tmp_path / "no-draft")


@pytest.mark.parametrize(
    ("changes", "found"),
    [
        ({"lookup": 4}, "--draft does not go with --lookup"),
        ({"kv_cache": False}, "--draft has no effect with --no-kv-cache"),
        ({"session": SessionConfig(batch_invariant=True)}, "--batch-invariant does not go with --draft"),
    ],
)
def test_what_does_not_go_with_a_draft_is_refused(changes: dict[str, object], found: str) -> None:
    with pytest.raises(UsageError, match=found):
        check_guesses(replace(EngineConfig(draft=Path("d")), **changes))  # type: ignore[arg-type]
    if "lookup" not in changes:
        check_guesses(replace(EngineConfig(), **changes))  # type: ignore[arg-type]


def test_a_worker_is_not_warm_where_its_draft_has_failed(folders: dict[str, Path]) -> None:
    def fail(*_: object) -> None:
        raise ProviderError("out of luck")

    worker = loaded(folders["model"], folders["other"])
    try:
        assert worker._drafter is not None
        worker._drafter._session.verify = fail  # type: ignore[assignment,method-assign]
        with pytest.raises(ProviderError, match="out of luck"):
            worker.warm_up()
    finally:
        worker.close()


def test_pairs_of_rows_are_not_asked_for_beside_a_draft(folders: dict[str, Path]) -> None:
    config = EngineConfig(draft=folders["model"])
    assert not repeatable(config, folders["int8"]).session.batch_invariant


def test_the_caches_share_the_memory_and_hold_as_many_tokens(folders: dict[str, Path]) -> None:
    model, draft = load_artifact(folders["model"]), load_artifact(folders["other"])
    own, other = (artifact.manifest.kv.bytes_per_token for artifact in (model, draft))
    asked = replace(THREADS, kv_cache_bytes=(own + other) * 150)
    found = find_draft(folders["other"], model, None, asked)
    assert isinstance(found.artifact, Artifact)
    graphs, provider = (
        choose_graphs(model.manifest, asked),
        activate(ProviderChoice(), import_runtime("1.24")),
    )
    assert provider.runtime_name == CPU
    alone = plan_memory(model.manifest, graphs, asked, provider, None).capacity
    beside = plan_memory(model.manifest, graphs, asked, provider, None, found.beside).capacity
    assert alone.budget > beside.budget == 150
    told: list[LoadReport] = []
    session = found.open(beside, told.append)
    capacity = session.capacity
    assert (capacity.slots, capacity.context, capacity.budget) == (beside.slots, beside.context, 150)
    assert told == []
    short = find_draft(folders["short"], model, None, asked).open(beside, told.append)
    assert short.capacity.context == 48


def test_of_what_loading_a_draft_decided_only_what_the_model_has_not_said_is_told(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    draft = find_draft(folders["other"], load_artifact(folders["model"]), None, THREADS)
    capacity = KvCapacity(slots=2, context=100, bytes_per_token=1024, budget=150)
    shared = capacity.notice(100)
    assert shared is not None
    told: list[LoadReport] = []
    for notice in (None, shared, "steps are not recorded"):

        def opened(_artifact: object, _config: object, report: Any, found: str | None = notice) -> object:
            report(LoadReport(1, capacity, found))
            return mock.Mock(spec=DecoderSession)

        monkeypatch.setattr("llorch_serve.loading.draft.open_model", opened)
        draft.open(capacity, told.append)
    assert [report.notice for report in told] == ["the draft: steps are not recorded"]


def test_weights_of_the_draft_count(folders: dict[str, Path]) -> None:
    model, draft = load_artifact(folders["model"]), load_artifact(folders["other"])
    graphs = choose_graphs(model.manifest, THREADS)
    heavy = replace_files(draft, 2**45)
    provider = activate(ProviderChoice(), import_runtime("1.24"))
    with pytest.raises(LlorchError, match="KV cache"):
        plan_memory(
            model.manifest,
            graphs,
            replace(THREADS, max_context=100),
            provider,
            None,
            Beside(heavy.manifest, choose_graphs(draft.manifest, THREADS)),
        )


def replace_files(artifact: Artifact, size: int) -> Artifact:
    files = tuple(msgspec.structs.replace(entry, bytes=size) for entry in artifact.manifest.files)
    return Artifact(artifact.folder, msgspec.structs.replace(artifact.manifest, files=files))
