"""A signature goes to a hub and comes back with its artifact; a pulled folder exists if it is good."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from llorch_serve.artifact.signature import check_signature, sign
from llorch_serve.artifact.signed_files import SIGNATURE_NAME
from llorch_serve.errors import ArtifactError
from llorch_serve.hub.pull import pull
from llorch_serve.hub.push import push
from llorch_serve.hub.reference import Reference
from support.builders.signing_keys import KeyPair, write_keys
from support.builders.tiny_artifact import write_tiny_artifact
from support.builders.tiny_exports import contents
from support.fakes.hub import Hub
from support.harness.hub import hub_environment, hub_for_pushes
from support.harness.processes import llorch

# The client hands its uploads to httpx in a way that httpx discourages.
pytestmark = pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")

REPO = Reference("some-org/signed")


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    with hub_for_pushes(tmp_path / "cache", monkeypatch) as hub:
        yield hub


@pytest.fixture
def keys(tmp_path: Path) -> KeyPair:
    return write_keys(tmp_path)


@pytest.fixture
def signed(tmp_path: Path, keys: KeyPair) -> Path:
    folder = write_tiny_artifact(tmp_path / "artifact")
    sign(folder, keys.private)
    return folder


def in_hub(hub: Hub) -> dict[str, bytes]:
    repository = hub.repositories[REPO.repository]
    return repository.commits[repository.refs["main"]]


def test_a_signed_artifact_is_pushed_and_pulled(
    hub: Hub, signed: Path, keys: KeyPair, tmp_path: Path
) -> None:
    push(signed, REPO)
    assert {SIGNATURE_NAME, "README.md"} <= in_hub(hub).keys()
    folder = pull(REPO, tmp_path / "back", public_key=keys.public).folder
    assert contents(folder) == contents(signed)
    pull(REPO, tmp_path / "back", public_key=keys.public)
    (tmp_path / "back" / SIGNATURE_NAME).unlink()  # signed after it was pulled first
    pull(REPO, tmp_path / "back", public_key=keys.public)
    check_signature(tmp_path / "back", keys.public)


def test_without_the_right_signature_no_folder_appears(
    hub: Hub, signed: Path, keys: KeyPair, tmp_path: Path
) -> None:
    push(signed, REPO)
    with pytest.raises(ArtifactError, match="name the key that signed it"):
        pull(REPO, tmp_path / "back", public_key=write_keys(tmp_path, "other").public)
    assert not (tmp_path / "back").exists()
    hub.add(REPO.repository, {name: data for name, data in in_hub(hub).items() if name != SIGNATURE_NAME})
    with pytest.raises(ArtifactError, match="not signed"):
        pull(REPO, tmp_path / "back", public_key=keys.public)
    assert not (tmp_path / "back").exists()
    pull(REPO, tmp_path / "back")


def test_another_manifest_under_the_signature_is_refused(
    hub: Hub, signed: Path, keys: KeyPair, tmp_path: Path
) -> None:
    files = contents(signed)
    manifest = msgspec.json.decode(files["llorch.json"])
    manifest["files"] = [entry for entry in manifest["files"] if "template" not in entry["path"]]
    manifest["chat_template"] = None
    hub.add(REPO.repository, {**files, "llorch.json": msgspec.json.encode(manifest)})
    with pytest.raises(ArtifactError, match="has no chat_template"):
        pull(REPO, tmp_path / "back", public_key=keys.public)
    assert not (tmp_path / "back").exists()


def test_a_signature_that_is_refused_does_not_replace_a_good_one(
    hub: Hub, signed: Path, keys: KeyPair, tmp_path: Path
) -> None:
    hub.add(REPO.repository, contents(signed))
    folder = pull(REPO, tmp_path / "back").folder
    hub.add(REPO.repository, {**contents(signed), SIGNATURE_NAME: b"{}"})
    with pytest.raises(ArtifactError, match="no signature by a key"):
        pull(REPO, folder, public_key=keys.public)
    check_signature(folder, keys.public)


def test_a_signature_of_an_earlier_artifact_does_not_stay_in_the_hub(hub: Hub, signed: Path) -> None:
    push(signed, REPO)
    (signed / SIGNATURE_NAME).unlink()
    push(signed, REPO)
    assert SIGNATURE_NAME not in in_hub(hub)


def test_a_manifest_that_lists_the_signature_is_refused(hub: Hub, signed: Path, tmp_path: Path) -> None:
    files = contents(signed)
    manifest = msgspec.json.decode(files["llorch.json"])
    manifest["files"].append(
        {"path": SIGNATURE_NAME, "bytes": len(files[SIGNATURE_NAME]), "sha256": "0" * 64}
    )
    hub.add(REPO.repository, {**files, "llorch.json": msgspec.json.encode(manifest)})
    with pytest.raises(ArtifactError, match="it is not whole"):
        pull(REPO, tmp_path / "back")


def test_a_signature_of_absurd_size_is_not_fetched(hub: Hub, signed: Path, tmp_path: Path) -> None:
    hub.add(REPO.repository, {**contents(signed), SIGNATURE_NAME: b"x" * (4 * 2**20 + 1)})
    with pytest.raises(ArtifactError, match="a signature has at most"):
        pull(REPO, tmp_path / "back")


def test_the_command_checks(hub: Hub, signed: Path, keys: KeyPair, tmp_path: Path) -> None:
    variables = hub_environment(hub, tmp_path / "home")
    flags = ("--verify-signature", keys.public)
    hub.add(REPO.repository, {**contents(signed), SIGNATURE_NAME: b"{}"})
    outcome = llorch("pull", REPO.repository, tmp_path / "other", *flags, **variables)
    assert (outcome.code, outcome.stderr.count("\n")) == (3, 1)
    assert "no signature by a key" in outcome.stderr
