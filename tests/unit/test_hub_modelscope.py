"""ModelScope's repositories come by its own client over HTTP, checked and told as Hugging Face's are."""

from __future__ import annotations

import hashlib
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from llorch_export.options import ExportOptions
from llorch_export.pipeline import export
from llorch_export.source.open import open_checkpoint, open_config
from llorch_export.terminal.inspect import _source
from llorch_serve.errors import ArtifactError, HubError, ProviderError, UsageError
from llorch_serve.hub.card import model_card
from llorch_serve.hub.limits import MOST_FILES
from llorch_serve.hub.pull import pull
from llorch_serve.hub.push import push
from llorch_serve.hub.reference import Hub as Where
from llorch_serve.hub.reference import Reference, parse_reference, with_hub
from support.builders.checkpoints import write_gguf, write_hf_folder
from support.builders.tiny_artifact import write_tiny_artifact
from support.builders.tiny_exports import contents, silent
from support.fakes.hub import Fault, Hub
from support.harness.hub import modelscope_environment, modelscope_in_this_process
from support.harness.processes import llorch

REPO = "some-org/tiny.model"
SOURCE = f"modelscope://{REPO}"


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


@pytest.fixture
def hub(cache: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    with modelscope_in_this_process(cache, monkeypatch) as hub:
        yield hub


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    return contents(write_hf_folder(tmp_path_factory.mktemp("modelscope") / "m"))


@pytest.fixture
def artifact(tmp_path: Path) -> dict[str, bytes]:
    return contents(write_tiny_artifact(tmp_path / "artifact"))


def files_in(cache: Path) -> list[str]:
    return sorted(path.name for path in cache.rglob("*") if path.is_file() and ".lock" not in path.parts)


def test_a_model_is_fetched_once_and_named(hub: Hub, folder: dict[str, bytes], tmp_path: Path) -> None:
    hub.add(REPO, {**folder, "pytorch_model.bin": b"pickle", "onnx/model.onnx": b"x"}, ref="master")
    checkpoint = open_checkpoint(SOURCE)
    assert (checkpoint.name, checkpoint.origin, checkpoint.hub) == (
        "tiny.model",
        (REPO, "master"),
        "modelscope",
    )
    assert not any("pytorch_model" in one.path or "onnx" in one.path for one in hub.requests)
    hub.requests.clear()
    open_checkpoint(SOURCE)
    open_config(SOURCE)
    assert hub.requests == []
    options = ExportOptions(source=SOURCE, output=tmp_path / "out", precision="fp32")
    manifest = export(options, silent).artifact.manifest
    source = manifest.source
    assert (source.repository, source.revision, source.hub) == (REPO, "master", "modelscope")
    assert _source(source).endswith(f"from modelscope://{REPO}@master")
    assert "base_model" not in model_card(manifest, "o/n", None, None)


def test_revisions_lie_apart_and_share_what_is_the_same(
    hub: Hub, folder: dict[str, bytes], cache: Path
) -> None:
    hub.add(REPO, folder, ref="master")
    first = open_checkpoint(SOURCE)
    hub.requests.clear()
    hub.add(REPO, {**folder, "LICENSE": b"terms"}, ref="feature/x")
    second = open_checkpoint(f"{SOURCE}@feature/x")
    assert (first.origin, second.origin) == ((REPO, "master"), (REPO, "feature/x"))
    assert first.path != second.path
    assert not any("model.safetensors" in one.path for one in hub.requests)
    with pytest.raises(ArtifactError, match="has no revision 'nowhere' at http"):
        open_checkpoint(f"{SOURCE}@nowhere")


def test_a_file_is_chosen(hub: Hub, tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "tiny-Q8_0.gguf", weight_type="Q8_0")
    hub.add(REPO, {"Q8_0/a-Q8_0.gguf": path.read_bytes(), "F16/a-F16.gguf": b"x" * 2000}, ref="master")
    with pytest.raises(ArtifactError, match=f"choose one as in {SOURCE}:F16"):
        open_checkpoint(SOURCE)
    assert open_checkpoint(f"{SOURCE}:Q8_0").origin == (REPO, "master")
    assert not any("F16" in one.path for one in hub.requests if "FilePath" in one.path)


def test_the_token_goes_to_the_hub_alone(
    hub: Hub, folder: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.add(REPO, folder, ref="master")
    hub.repositories[REPO].gated = True
    with pytest.raises(
        HubError, match="it is private or gated; ask for access there, then set MODELSCOPE_API"
    ):
        open_checkpoint(SOURCE)
    monkeypatch.setenv("MODELSCOPE_API_TOKEN", "ms-secret")
    assert open_checkpoint(SOURCE).name == "tiny.model"
    at_store = [one for one in hub.requests if one.path.startswith("/objects/")]
    assert at_store
    assert {(one.token, one.cookie) for one in at_store} == {(None, None)}
    assert "Bearer ms-secret" in {one.token for one in hub.requests}
    monkeypatch.setenv("MODELSCOPE_API_TOKEN", "ms-sec\x01ret")
    with pytest.raises(UsageError, match="the token of MODELSCOPE_API_TOKEN has a character") as caught:
        pull(Reference(REPO, hub=Where.MODELSCOPE), Path("out"))
    assert "ms-s" not in str(caught.value)


FILES = "/repo/files"


@pytest.mark.parametrize(
    ("fault", "found", "exit_code"),
    [
        (Fault(FILES, times=99, status=401, body=b"{}"), "does not accept the token", 7),
        (Fault(FILES, times=99, status=404, body=b"{}"), "does not exist at", 3),
        (Fault(FILES, times=99, status=429, headers={"Retry-After": "77"}), "try again in 77 s", 7),
        (Fault(FILES, times=99, status=503), "fails with status 503", 7),
        (Fault(FILES, times=99, status=418), "with status 418", 7),
        (Fault(FILES, status=200, body=b"<html>log in</html>"), "gives no hub's answer", 7),
        (Fault(FILES, status=200, body=b"[3]"), "gives no hub's answer", 7),
        (Fault(FILES, status=200, body=b'{"Data": {"Files": [4]}}'), "gives no hub's answer", 7),
        (Fault(FILES, status=200, body=b'{"Data": [{"Path": "a", "Size": "x"}]}'), "no hub's answer", 7),
        (Fault(FILES, flood=2**27), "sends more than 8388608 bytes as a listing", 7),
        (Fault("/objects/", times=99, status=503), "fails with status 503", 7),
        (Fault("/objects/", times=99, cut=100), "the exchange with", 7),
        (Fault("/objects/", times=99, lie=b"short"), "came with another size or content", 7),
        (Fault("/objects/", times=99, flood=2**25), "came with another size or content", 7),
        (Fault("FilePath=config.json", times=99, flood=2**25), "came with another size or content", 7),
    ],
)  # fmt: skip
def test_a_failure_is_one_sentence_and_leaves_nothing_half_written(
    hub: Hub, folder: dict[str, bytes], cache: Path, fault: Fault, found: str, exit_code: int
) -> None:
    hub.add(REPO, folder, ref="master")
    hub.faults.append(Fault(**vars(fault)))
    with pytest.raises(ArtifactError) as caught:
        open_checkpoint(SOURCE)
    message = str(caught.value)
    assert found in message
    assert message.isascii()
    assert "\n" not in message
    assert caught.value.exit_code == exit_code
    assert "model.safetensors" not in files_in(cache)
    assert hub.flooded < max(2**24, fault.flood // 2)
    hub.faults.clear()
    assert open_checkpoint(SOURCE).name == "tiny.model"


@pytest.mark.parametrize("name", ["model.safetensors", "config.json"])
def test_another_content_than_the_hub_lists_is_not_kept(
    hub: Hub, folder: dict[str, bytes], cache: Path, name: str
) -> None:
    hub.add(REPO, folder, ref="master")
    lie = folder[name][:-1] + bytes([folder[name][-1] ^ 1])
    stored = hashlib.sha256(folder[name]).hexdigest() if len(lie) > 1000 else f"FilePath={name}"
    hub.faults.append(Fault(stored, times=99, lie=lie))
    with pytest.raises(HubError, match="came with another size or content"):
        open_checkpoint(SOURCE)
    assert not any(left.startswith(name) for left in files_in(cache))


def test_what_cannot_be_checked_or_kept_inside_is_not_fetched(hub: Hub, folder: dict[str, bytes]) -> None:
    hub.add(REPO, folder, ref="master")
    unchecked = (
        b'{"Data": {"Files": [{"Path": "config.json", "Size": 3}, {"Path": "model.safetensors", "Size": 9}]}}'
    )
    hub.faults.append(Fault(FILES, status=200, body=unchecked))
    with pytest.raises(HubError, match=r"lists config\.json without its size or its SHA-256"):
        open_checkpoint(SOURCE)
    hub.add(REPO, {"../a.gguf": b"x", "/b.gguf": b"x", "c/../../d.gguf": b"x"}, ref="master")
    with pytest.raises(ArtifactError, match="or no files"):
        open_checkpoint(SOURCE)
    assert not any("FilePath" in one.path for one in hub.requests)
    hub.add(REPO, {f"{number}": b"" for number in range(MOST_FILES + 1)}, ref="master")
    with pytest.raises(ArtifactError, match=f"a model has at most {MOST_FILES}"):
        open_checkpoint(SOURCE)


def test_an_artifact_is_pulled_and_gone_on_with(
    hub: Hub, artifact: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.add(REPO, {**artifact, "README.md": b"card"}, ref="master")
    largest = max(artifact.values(), key=len)
    name = hashlib.sha256(largest).hexdigest()
    half = len(largest) // 2
    hub.faults += [Fault(name, cut=half), Fault(name, status=404, times=99)]
    reference = Reference(REPO, hub=Where.MODELSCOPE)
    with pytest.raises(ArtifactError):
        pull(reference, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    hub.faults.clear()
    hub.requests.clear()
    assert contents(pull(reference, tmp_path / "out").folder) == artifact
    assert [one.range for one in hub.requests if name in one.path] == [f"bytes={half}-"]
    assert not (tmp_path / ".out.pull").exists()
    with pytest.raises(UsageError, match="sent to the Hugging Face hub alone"):
        push(tmp_path / "out", reference)


def test_the_commands_ask_it(hub: Hub, artifact: dict[str, bytes], cache: Path, tmp_path: Path) -> None:
    hub.add(REPO, artifact, ref="v1")
    variables = modelscope_environment(hub, cache)
    flags = ("--hub", "modelscope", "--revision", "v1")
    outcome = llorch("pull", REPO, tmp_path / "out", *flags, **variables)
    assert (outcome.code, outcome.stderr) == (0, "")


def test_without_the_client_the_line_that_installs_it_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "modelscope_hub", None)
    with pytest.raises(ProviderError, match=re.escape("pip install 'llorch[modelscope]'")):
        open_checkpoint(SOURCE)


def test_a_reference_names_its_hub() -> None:
    assert parse_reference(f"{SOURCE}@v1:Q8_0") == Reference(REPO, "v1", "Q8_0", Where.MODELSCOPE)
    assert str(Reference(REPO, "v1", "Q8_0", Where.MODELSCOPE)) == f"{SOURCE}@v1:Q8_0"
    assert with_hub(REPO, Where.MODELSCOPE) == with_hub(SOURCE, Where.MODELSCOPE) == SOURCE
    assert with_hub(REPO, Where.HUGGING_FACE) == REPO
    assert parse_reference("modelscope:/a/b") is None
    for source, hub, found in [
        ("./folder", Where.MODELSCOPE, "is for a hub id"),
        (SOURCE, Where.HUGGING_FACE, "two hubs"),
    ]:
        with pytest.raises(UsageError, match=found):
            with_hub(source, hub)
