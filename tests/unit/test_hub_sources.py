"""Checkpoints come from a hub over HTTP, by the real client; a failure is one sentence and leaves nothing."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterator
from pathlib import Path

import pytest
from huggingface_hub import constants

from llorch_export.options import ExportOptions
from llorch_export.pipeline import export
from llorch_export.source.open import open_checkpoint, open_config
from llorch_serve.errors import ArtifactError, HubError
from support.builders.checkpoints import write_gguf, write_hf_folder
from support.builders.tiny_exports import silent
from support.fakes.hub import Fault, Hub
from support.harness.hub import hub_in_this_process, impatient_client

REPO = "some-org/tiny"
BAD_TOKEN = "Invalid credentials in Authorization header"
LOST = {"X-Error-Code": "EntryNotFound"}
INDEX = "model.safetensors.index.json"


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


@pytest.fixture
def hub(cache: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    with hub_in_this_process(cache, monkeypatch) as hub:
        yield hub


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    path = write_hf_folder(tmp_path_factory.mktemp("hub") / "m")
    return {file.name: file.read_bytes() for file in sorted(path.iterdir())}


@pytest.fixture(scope="module")
def ggufs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    path = tmp_path_factory.mktemp("hub-gguf")
    for kind in ("Q8_0", "F16"):
        write_gguf(path / f"tiny-{kind}.gguf", weight_type=kind)
    return {file.name: file.read_bytes() for file in path.iterdir()}


def left_in(cache: Path) -> list[str]:
    """Return which files of a model the cache holds, halves included."""
    paths = [*cache.glob("*/snapshots/*/*"), *cache.glob("*/blobs/*")]
    return sorted(path.name for path in paths)


def stored(content: bytes) -> str:
    """Return the path of a large file where the hub redirects to."""
    return f"/objects/{hashlib.sha256(content).hexdigest()}"


def refusal(source: str = REPO) -> str:
    with pytest.raises(ArtifactError) as caught:
        open_checkpoint(source)
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_a_model_is_fetched_once_and_names_its_commit(hub: Hub, folder: dict[str, bytes]) -> None:
    commit = hub.add(REPO, {**folder, "pytorch_model.bin": b"pickle", "onnx/model.onnx": b"x"})
    checkpoint = open_checkpoint(REPO)
    assert (checkpoint.kind, checkpoint.name, checkpoint.origin) == ("safetensors", "tiny", (REPO, commit))
    assert not any("pytorch_model" in one.path or "onnx" in one.path for one in hub.requests)
    hub.requests.clear()
    open_checkpoint(REPO)
    open_config(REPO)
    assert hub.requests == []


def test_modules_that_were_not_fetched_with_a_model_that_embeds_are(
    hub: Hub, cache: Path, folder: dict[str, bytes]
) -> None:
    pooling = b'{"pooling_mode_lasttoken": true}'
    modules = b'[{"type": "a.Transformer", "path": ""}, {"type": "a.Pooling", "path": "1_Pooling"}]'
    sentences = {"1_Pooling/config.json": pooling, "config_sentence_transformers.json": b"{}"}
    hub.add(REPO, {**folder, **sentences, "modules.json": modules})
    assert open_checkpoint(REPO).embedding is not None
    hub.requests.clear()
    assert open_checkpoint(REPO).embedding is not None
    assert hub.requests == []
    (lost,) = cache.glob("*/snapshots/*/modules.json")
    lost.unlink()
    assert open_checkpoint(REPO, "none").embedding is None
    assert hub.requests == [], "who says what it is needs no such file"
    assert open_checkpoint(REPO).embedding is not None
    assert lost.exists()


def test_a_config_is_fetched_without_weights(hub: Hub, folder: dict[str, bytes]) -> None:
    hub.add(REPO, folder)
    open_config(REPO)
    assert not any("safetensors" in one.path for one in hub.requests)


def test_a_revision_is_a_branch_a_tag_or_a_commit(hub: Hub, folder: dict[str, bytes]) -> None:
    first = hub.add(REPO, folder)
    second = hub.add(REPO, {**folder, "LICENSE": b"other"}, ref="refs/pr/1")
    assert open_checkpoint(f"{REPO}@refs/pr/1").origin == (REPO, second)
    assert open_checkpoint(f"{REPO}@{first}").origin == (REPO, first)
    assert open_checkpoint(REPO).origin == (REPO, first)
    assert refusal(f"{REPO}@nowhere").startswith(f"{REPO} has no revision 'nowhere'; choose a branch")


def test_a_quantisation_chooses_the_file(hub: Hub, ggufs: dict[str, bytes]) -> None:
    commit = hub.add(REPO, ggufs)
    assert "has 2 GGUF models: F16 (1 MB), Q8_0 (1 MB); choose one as in some-org/tiny:F16" in refusal()
    checkpoint = open_checkpoint(f"{REPO}:q8_0")
    assert (checkpoint.path.name, checkpoint.origin) == ("tiny-Q8_0.gguf", (REPO, commit))
    assert not any("F16" in one.path for one in hub.requests)
    # What is in the cache does not make the choice.
    assert "has 2 GGUF models" in refusal()
    hub.requests.clear()
    assert open_checkpoint(f"{REPO}:tiny-Q8_0.gguf").path == checkpoint.path
    assert hub.requests == []


def test_a_file_in_a_folder_of_the_repository_is_chosen(hub: Hub, ggufs: dict[str, bytes]) -> None:
    hub.add(REPO, {"Q8_0/tiny-Q8_0.gguf": ggufs["tiny-Q8_0.gguf"]})
    assert open_checkpoint(REPO).path.as_posix().endswith("Q8_0/tiny-Q8_0.gguf")


def test_the_only_cached_file_serves_offline_with_a_note(
    hub: Hub, ggufs: dict[str, bytes], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    hub.add(REPO, ggufs)
    open_checkpoint(f"{REPO}:Q8_0")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert open_checkpoint(REPO).path.name == "tiny-Q8_0.gguf"
    assert "note: tiny-Q8_0.gguf is taken from the cache" in capsys.readouterr().err


def test_offline_is_said_by_its_variable(
    hub: Hub, folder: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert "HF_HUB_OFFLINE forbids to ask" in refusal()
    assert hub.requests == []


def test_a_gated_repository_says_where_to_ask(
    hub: Hub, folder: dict[str, bytes], monkeypatch: pytest.MonkeyPatch, cache: Path
) -> None:
    hub.add(REPO, folder)
    hub.repositories[REPO].gated = True
    assert f"is gated: {hub.endpoint} gives it only" in refusal()
    assert left_in(cache) == []
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    assert open_checkpoint(REPO).name == "tiny"
    at_store = [one for one in hub.requests if one.path.startswith("/objects/")]
    assert at_store
    assert {one.token for one in at_store} == {None}
    assert "Bearer hf_secret" in {one.token for one in hub.requests}


@pytest.mark.parametrize(
    ("fault", "found", "exit_code"),
    [
        (Fault("/api/", status=401, headers={"X-Error-Message": BAD_TOKEN}), "does not accept the token", 7),
        (Fault("/api/", status=403, headers={"X-Error-Message": "no"}), "forbids some-org/tiny", 7),
        (Fault("/api/", status=403, headers={"X-Error-Code": "GatedRepo"}), "is gated", 7),
        (Fault("/api/", status=404, headers={"X-Error-Code": "RepoNotFound"}), "does not exist at", 3),
        (Fault("/api/", status=429, headers={"Retry-After": "77"}), "try again in 77 s", 7),
        (Fault("/api/", status=429, headers={"RateLimit": '"api";r=0;t=55'}), "try again in 55 s", 7),
        (Fault("/api/", status=503), "fails with status 503", 7),
        (Fault("/api/", status=200, body=b"<html>log in</html>"), "gives no hub's answer", 7),
        (Fault("/api/", status=200, body=b"[]"), "gives no hub's answer", 7),
        (Fault("/api/", status=200, body=b'{"id": 3, "siblings": 4}'), "gives no hub's answer", 7),
        (Fault("/api/", hang=True), "does not answer in time", 7),
        (Fault("/resolve/", times=99, status=503), "fails with status 503", 7),
        (Fault("/resolve/", times=99, hang=True), "does not answer in time", 7),
        (Fault("model.safetensors", times=99, status=404, headers=LOST), "has lost a file", 3),
        (Fault("/objects/", times=99, hang=True), "does not answer in time", 7),
        (Fault("/objects/", times=99, method="GET", cut=100), "the exchange with", 7),
        (Fault("/objects/", times=99, method="GET", lie=b"short"), "came with another size", 7),
    ],
)  # fmt: skip
def test_a_failure_is_one_sentence_and_leaves_nothing_half_written(
    hub: Hub,
    folder: dict[str, bytes],
    cache: Path,
    fault: Fault,
    found: str,
    exit_code: int,
) -> None:
    hub.add(REPO, folder)
    hub.faults.append(Fault(**vars(fault)))
    waits = impatient_client() if fault.hang else contextlib.nullcontext()
    with waits, pytest.raises(ArtifactError) as caught:
        open_checkpoint(REPO)
    assert found in str(caught.value)
    assert "\n" not in str(caught.value)
    assert caught.value.exit_code == exit_code
    assert not any(name.endswith(".incomplete") or name == "model.safetensors" for name in left_in(cache))
    hub.faults.clear()
    assert open_checkpoint(REPO).name == "tiny"


def test_an_interrupted_file_goes_on_where_it_stopped(hub: Hub, folder: dict[str, bytes]) -> None:
    hub.add(REPO, folder)
    hub.faults.append(Fault(stored(folder["model.safetensors"]), method="GET", cut=70_000))
    open_checkpoint(REPO)
    assert "bytes=70000-" in [one.range for one in hub.requests]


@pytest.mark.parametrize("name", ["model.safetensors", "config.json"])
def test_another_content_than_the_hub_lists_is_not_kept(
    hub: Hub, folder: dict[str, bytes], cache: Path, name: str
) -> None:
    hub.add(REPO, folder)
    lie = folder[name][:-1] + bytes([folder[name][-1] ^ 1])
    hub.faults.append(
        Fault(stored(folder[name]) if name == "model.safetensors" else name, method="GET", lie=lie)
    )
    with pytest.raises(HubError, match=rf"{name} of {REPO} came with another content than the hub lists"):
        open_checkpoint(REPO)
    assert name not in left_in(cache)
    assert open_checkpoint(REPO).name == "tiny"


def test_what_is_fetched_already_is_not_fetched_again(hub: Hub, folder: dict[str, bytes]) -> None:
    hub.add(REPO, folder)
    hub.faults.append(Fault("model.safetensors", status=500, times=99))
    refusal()
    hub.faults.clear()
    hub.requests.clear()
    open_checkpoint(REPO)
    fetched = [
        one.path.rsplit("/", 1)[-1] for one in hub.requests if one.method == "GET" and "/resolve/" in one.path
    ]
    assert "config.json" not in fetched


def test_a_hub_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch, hub: Hub) -> None:
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    assert "the exchange with http://127.0.0.1:9" in refusal()


def test_paths_that_lead_out_of_the_repository_are_left_out(hub: Hub, folder: dict[str, bytes]) -> None:
    hub.add(REPO, {**folder, "../model.gguf": b"x", "/etc/model.gguf": b"x", "a/../../x.gguf": b"x"})
    assert "has no GGUF files" in refusal(f"{REPO}:Q8_0")


@pytest.mark.parametrize(
    ("files", "wanted"),
    [
        (
            ["model.safetensors", "config.json", "tokenizer.json", "LICENSE", "onnx/model.onnx", "a.bin"],
            {"model.safetensors", "config.json", "tokenizer.json", "LICENSE"},
        ),
        (
            [INDEX, "model-00001-of-00001.safetensors", "consolidated.safetensors", "config.json"],
            {INDEX, "model-00001-of-00001.safetensors", "config.json"},
        ),
        ([INDEX, "model-00001-of-00001.safetensors", "model.safetensors"], {"model.safetensors"}),
        (["model.safetensors", "tekken.json", "tokenizer.model.v3.x"], {"model.safetensors", "tekken.json"}),
        (
            ["model.safetensors", "tekken.json", "tokenizer.model.v3", "tokenizer.json"],
            {"model.safetensors", "tokenizer.json"},
        ),
        (["config.json", "only.gguf", "original/tokenizer.model"], {"config.json", "only.gguf"}),
    ],
)  # fmt: skip
def test_only_what_an_export_needs_is_fetched(hub: Hub, files: list[str], wanted: set[str]) -> None:
    hub.add(REPO, dict.fromkeys(files, b"x"))
    refusal()
    assert {
        one.path.split("/resolve/")[1].split("/", 1)[1] for one in hub.requests if "/resolve/" in one.path
    } == wanted


@pytest.mark.parametrize(
    ("files", "found"),
    [
        (["a.gguf", "b.gguf"], r"has 2 GGUF models: a.gguf (1 MB), b.gguf (1 MB)"),
        (["mmproj-a.gguf"], r"no GGUF file of a language model"),
        (["pytorch_model.bin"], r"no safetensors or GGUF files; weights in .bin"),
        (["README.md"], r"no safetensors or GGUF files; choose another"),
    ],
)
def test_repositories_without_one_model_are_refused(hub: Hub, files: list[str], found: str) -> None:
    hub.add(REPO, dict.fromkeys(files, b"x"))
    assert found in refusal()


def test_the_manifest_says_repository_and_commit(hub: Hub, folder: dict[str, bytes], tmp_path: Path) -> None:
    commit = hub.add(REPO, folder, ref="v1")
    options = ExportOptions(source=f"{REPO}@v1", output=tmp_path / "out", precision="fp32")
    source = export(options, lambda *_: None).artifact.manifest.source
    assert (source.repository, source.revision) == (REPO, commit)


def test_a_split_file_is_fetched_and_exported_whole(
    hub: Hub, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_gguf(tmp_path / "tiny-Q8_0.gguf", weight_type="Q8_0")
    (tmp_path / "parts").mkdir()
    write_gguf(tmp_path / "parts" / path.name, weight_type="Q8_0", tensors_a_part=8)
    parts = sorted((tmp_path / "parts").iterdir())
    assert len(parts) == 3
    hub.add(REPO, {f"Q8_0/{part.name}": part.read_bytes() for part in parts})
    interrupted = stored(parts[1].read_bytes())
    hub.faults += [Fault(interrupted, method="GET", status=403, times=1)]
    with pytest.raises(HubError, match="403"):
        open_checkpoint(f"{REPO}:Q8_0")
    options = ExportOptions(f"{REPO}:Q8_0", tmp_path / "out", precision="source", head_precision="source")
    fetched = export(options, silent).artifact
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert open_checkpoint(f"{REPO}:Q8_0").origin == (REPO, fetched.manifest.source.revision)
    local = ExportOptions(str(path), tmp_path / "local", precision="source", head_precision="source")
    assert set(fetched.manifest.files) == set(export(local, silent).artifact.manifest.files)
