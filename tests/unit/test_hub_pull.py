"""A pulled artifact is whole and checked, or not there; a later call goes on where an earlier one stopped."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from llorch_serve.artifact.lock import exclusive
from llorch_serve.errors import ArtifactError, HubError, UsageError
from llorch_serve.hub.pull import pull
from llorch_serve.hub.reference import Reference
from support.builders.checkpoints import write_hf_folder
from support.builders.tiny_exports import export_tiny
from support.fakes.hub import Fault, Hub
from support.harness.hub import hub_environment, hub_in_this_process
from support.harness.processes import llorch

REPO = Reference("some-org/artifact")


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    with hub_in_this_process(tmp_path / "cache", monkeypatch) as hub:
        yield hub


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    return export_tiny(write_hf_folder(folder / "source"), folder / "artifact").folder


@pytest.fixture
def files(tiny: Path) -> dict[str, bytes]:
    paths = [path for path in tiny.rglob("*") if path.is_file()]
    return {path.relative_to(tiny).as_posix(): path.read_bytes() for path in paths}


@pytest.fixture
def largest(files: dict[str, bytes]) -> bytes:
    return max((content for content in files.values()), key=len)


def beside(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.parent.iterdir() if path.name not in ("cache", "tiny"))


def test_an_artifact_is_pulled_once(hub: Hub, files: dict[str, bytes], tmp_path: Path) -> None:
    hub.add(REPO.repository, {**files, "README.md": b"card", "other.bin": b"x" * 2000})
    artifact = pull(REPO, tmp_path / "out")
    found = {p.relative_to(artifact.folder).as_posix() for p in artifact.folder.rglob("*") if p.is_file()}
    assert found == {"llorch.json", *(entry.path for entry in artifact.manifest.files)}
    assert beside(tmp_path / "out") == ["out"]
    hub.requests.clear()
    pull(REPO, tmp_path / "out")
    manifest = f"/objects/{hashlib.sha256(files['llorch.json']).hexdigest()}"
    assert {one.path for one in hub.requests if one.path.startswith("/objects/")} == {manifest}


def test_a_later_call_goes_on_where_one_was_cut_off(
    hub: Hub, files: dict[str, bytes], largest: bytes, tmp_path: Path
) -> None:
    hub.add(REPO.repository, files)
    half = len(largest) // 2 // 10_000 * 10_000
    name = hashlib.sha256(largest).hexdigest()
    hub.faults += [Fault(name, method="GET", cut=half), Fault(name, method="GET", status=500, times=9)]
    with pytest.raises(HubError, match="status 500"):
        pull(REPO, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    hub.faults.clear()
    hub.requests.clear()
    pull(REPO, tmp_path / "out")
    assert [one.range for one in hub.requests if name in one.path] == [f"bytes={half}-"]
    assert beside(tmp_path / "out") == ["out"]


def test_two_pulls_do_not_write_one_folder(hub: Hub, files: dict[str, bytes], tmp_path: Path) -> None:
    hub.add(REPO.repository, files)
    (tmp_path / "in").mkdir()
    with exclusive(tmp_path / "in" / "out"), pytest.raises(UsageError, match="another export or pull"):
        pull(REPO, tmp_path / "in" / "out")
    assert list((tmp_path / "in").iterdir()) == []
    assert pull(REPO, tmp_path / "in" / "out").folder == tmp_path / "in" / "out"
    assert [path.name for path in (tmp_path / "in").iterdir()] == ["out"]


def test_another_content_than_the_manifest_says_is_refused(
    hub: Hub, files: dict[str, bytes], largest: bytes, tmp_path: Path
) -> None:
    hub.add(REPO.repository, files)
    lie = largest[:-1] + bytes([largest[-1] ^ 1])
    hub.faults.append(Fault(hashlib.sha256(largest).hexdigest(), method="GET", lie=lie))
    with pytest.raises(HubError, match="where the manifest says"):
        pull(REPO, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    pull(REPO, tmp_path / "out")


def test_what_an_earlier_revision_left_does_not_stay(
    hub: Hub, files: dict[str, bytes], tmp_path: Path
) -> None:
    hub.add(REPO.repository, files)
    left = tmp_path / ".out.pull"
    left.mkdir()
    (left / "old.onnx").write_bytes(b"old")
    (left / "tokenizer.json").write_bytes(b"damaged")
    assert not (pull(REPO, tmp_path / "out").folder / "old.onnx").exists()


def test_no_token_reaches_the_store(
    hub: Hub, files: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.add(REPO.repository, files)
    hub.repositories[REPO.repository].gated = True
    with pytest.raises(HubError, match="is gated"):
        pull(REPO, tmp_path / "out")
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    pull(REPO, tmp_path / "out")
    assert {one.token for one in hub.requests if one.path.startswith("/objects/")} == {None}


def test_a_manifest_that_leads_elsewhere_writes_nothing(
    hub: Hub, files: dict[str, bytes], tmp_path: Path
) -> None:
    manifest = msgspec.json.decode(files["llorch.json"])
    manifest["files"][0]["path"] = "../outside"
    hub.add(REPO.repository, {**files, "../outside": b"x", "llorch.json": msgspec.json.encode(manifest)})
    with pytest.raises(ArtifactError, match=r"lists '\.\./outside'"):
        pull(REPO, tmp_path / "out")
    assert not (tmp_path / "outside").exists()


def test_a_folder_that_holds_something_else_is_left_alone(
    hub: Hub, files: dict[str, bytes], tmp_path: Path
) -> None:
    hub.add(REPO.repository, files)
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine.txt").write_text("mine")
    with pytest.raises(UsageError, match="holds something else"):
        pull(REPO, tmp_path / "out")
    assert (tmp_path / "out" / "mine.txt").read_text() == "mine"


@pytest.mark.parametrize(
    ("missing", "found"),
    [
        ("llorch.json", "holds no llorch.json, so it is no artifact"),
        ("tokenizer.json", "not whole"),
    ],
)
def test_a_repository_without_a_whole_artifact_is_refused(
    hub: Hub, files: dict[str, bytes], tmp_path: Path, missing: str, found: str
) -> None:
    hub.add(REPO.repository, {name: content for name, content in files.items() if name != missing})
    with pytest.raises(ArtifactError, match=found):
        pull(REPO, tmp_path / "out")
    assert beside(tmp_path / "out") == []


def test_the_command_is_pointed_at_a_hub_by_the_environment(
    hub: Hub, files: dict[str, bytes], tmp_path: Path
) -> None:
    hub.add(REPO.repository, files)
    variables = hub_environment(hub, tmp_path / "home")
    outcome = llorch("pull", REPO.repository, str(tmp_path / "out"), **variables)
    assert (outcome.code, outcome.stderr) == (0, "")
    assert "every hash as its manifest says" in outcome.stdout
    outcome = llorch("pull", f"{REPO.repository}@v9", str(tmp_path / "new"), **variables)
    assert outcome.code == 3
    assert "has no revision 'v9'" in outcome.stderr
