"""A pushed artifact is one commit with a card, and pulls back to the same bytes."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import yaml

from llorch_export.graph.stage_choice import StageChoice
from llorch_serve.artifact.folder import load_artifact
from llorch_serve.artifact.manifest import FileEntry, encode_manifest
from llorch_serve.errors import ArtifactError, HubError, UsageError
from llorch_serve.hub.card import Fidelity, model_card, read_fidelity
from llorch_serve.hub.pull import pull
from llorch_serve.hub.push import push
from llorch_serve.hub.reference import Reference
from support.builders.checkpoints import write_hf_folder
from support.builders.tiny_artifact import tiny_manifest, write_tiny_artifact
from support.builders.tiny_exports import contents, export_tiny
from support.fakes.hub import Fault, Hub
from support.harness.hub import hub_environment, hub_for_pushes
from support.harness.processes import llorch

# The client hands its uploads to httpx in a way that httpx discourages.
pytestmark = pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")

REPO = Reference("some-org/new")
FIDELITY = Fidelity(0.0042, 0.987, 0.01, 2048, "sample", "transformers", same_source=True)


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    with hub_for_pushes(tmp_path / "cache", monkeypatch) as hub:
        yield hub


@pytest.fixture
def artifact(tmp_path: Path) -> Path:
    return write_tiny_artifact(tmp_path / "artifact")


def latest(hub: Hub) -> dict[str, bytes]:
    repository = hub.repositories[REPO.repository]
    return repository.commits[repository.refs["main"]]


def test_what_is_pushed_pulls_back(hub: Hub, artifact: Path, tmp_path: Path) -> None:
    commit, kept = push(artifact, REPO, licence="apache-2.0", fidelity=FIDELITY)
    assert (hub.repositories[REPO.repository].refs["main"], kept) == (commit, False)
    assert contents(pull(REPO, tmp_path / "back").folder) == contents(artifact)
    card = latest(hub)["README.md"].decode()
    front = yaml.safe_load(card.split("---")[1])
    assert front["license"] == "apache-2.0"
    assert front["pipeline_tag"] == "text-generation"
    manifest = load_artifact(artifact).manifest
    for told in ("0.0042 nats", "98.70%", manifest.source.fingerprint, manifest.files[0].sha256):
        assert told in card
    assert {one.token for one in hub.requests if one.path.startswith("/objects/")} <= {None}


def test_so_does_a_model_in_stages(hub: Hub, tmp_path: Path) -> None:
    source = write_hf_folder(tmp_path / "model", {"tie_word_embeddings": True})
    staged = export_tiny(source, tmp_path / "staged", stages=StageChoice(2)).folder
    push(staged, REPO)
    assert contents(pull(REPO, tmp_path / "back").folder) == contents(staged)
    assert {"stage0.onnx.data", "stage1.onnx.data", "table.onnx.data"} < contents(staged).keys()


def test_a_card_that_somebody_wrote_stays_and_ours_is_renewed(hub: Hub, artifact: Path) -> None:
    push(artifact, REPO)
    assert not push(artifact, REPO, licence="mit")[1]
    assert b"mit" in latest(hub)["README.md"]
    hub.add(REPO.repository, {**latest(hub), "README.md": b"# mine"})
    assert push(artifact, REPO)[1]
    assert latest(hub)["README.md"] == b"# mine"


def test_a_damaged_artifact_is_not_sent(hub: Hub, artifact: Path) -> None:
    name = load_artifact(artifact).manifest.files[0].path
    content = (artifact / name).read_bytes()
    (artifact / name).write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    with pytest.raises(ArtifactError, match="where the manifest says"):
        push(artifact, REPO)
    assert hub.requests == []


@pytest.mark.parametrize(
    "name", [".git/hooks/post-checkout", "deep/.git", ".cache/x", "./more.bin", "a//b", "a:b"]
)
def test_a_name_that_no_repository_takes_is_told_before_anything_is_asked(
    hub: Hub, artifact: Path, name: str
) -> None:
    manifest = load_artifact(artifact).manifest
    (artifact / name).parent.mkdir(parents=True, exist_ok=True)
    (artifact / name).write_bytes(b"x")
    entry = FileEntry(path=name, bytes=1, sha256=hashlib.sha256(b"x").hexdigest())
    changed = msgspec.structs.replace(manifest, files=(*manifest.files, entry))
    (artifact / "llorch.json").write_bytes(encode_manifest(changed))
    with pytest.raises(ArtifactError, match=rf"lists {re.escape(repr(name))}, .* export the model again"):
        push(artifact, REPO)
    assert hub.requests == []


@pytest.mark.parametrize("part", ["/api/repos/create", "/preupload/", "/commit/"])
def test_a_hub_that_refuses_is_told(hub: Hub, artifact: Path, part: str) -> None:
    hub.faults.append(Fault(part, status=403, headers={"X-Error-Message": "read-only token"}, times=9))
    with pytest.raises(HubError, match="forbids some-org/new with this token"):
        push(artifact, REPO)
    assert REPO.repository not in hub.repositories or "llorch.json" not in latest(hub)


def test_names_of_strangers_make_no_markup() -> None:
    manifest = tiny_manifest(model_id='a"\n---\n<script>|')
    card = model_card(manifest, "o/n", 'x"\nlicense: mit', None)
    assert "<script>" not in card
    assert yaml.safe_load(card.split("---")[1])["license"] == 'x"\nlicense: mit'
    assert "not stated with this upload" in card


def test_a_report_that_is_none_is_refused(tmp_path: Path) -> None:
    (tmp_path / "report").write_text("{}")
    with pytest.raises(UsageError, match="is no report of a comparison"):
        read_fidelity(tmp_path / "report")
    with pytest.raises(UsageError, match="cannot be read"):
        read_fidelity(tmp_path / "absent")


def test_the_command_shows_no_bars_where_nobody_watches(hub: Hub, artifact: Path, tmp_path: Path) -> None:
    variables = hub_environment(hub, tmp_path / "home")
    variables |= {"TQDM_DISABLE": "", "HF_TOKEN": "hf_secret"}
    outcome = llorch("push", artifact, REPO.repository, **variables)
    assert (outcome.code, outcome.stderr) == (0, "")
    assert f"{REPO} has {artifact} as commit" in outcome.stdout
