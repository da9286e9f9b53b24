"""A hub that sends more than it lists, or lists more than a model has, takes neither disk nor memory."""

from __future__ import annotations

import gzip
import hashlib
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from llorch_export.source.open import open_checkpoint
from llorch_serve.errors import ArtifactError, HubError, ResourceError
from llorch_serve.hub.limits import MOST_ANSWER_BYTES, MOST_FILES
from llorch_serve.hub.pull import pull
from llorch_serve.hub.reference import Reference
from support.builders.checkpoints import write_hf_folder
from support.builders.tiny_artifact import write_tiny_artifact
from support.builders.tiny_exports import contents
from support.fakes.hub import Fault, Hub
from support.harness.hub import hub_in_this_process

REPO = "some-org/tiny"
FLOOD = 2**26
ENDLESS = {"flood": FLOOD}
# Each answer is cut where the client takes the file up, and each goes on as if there were much more of it.
BIT = 10_000
BIT_BY_BIT = {"lie": bytes(2 * 10**6), "cut": BIT, "times": 999}
SLACK = 150_000


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    with hub_in_this_process(tmp_path / "cache", monkeypatch) as hub:
        yield hub


@pytest.fixture
def artifact(hub: Hub, tmp_path: Path) -> None:
    hub.add(REPO, contents(write_tiny_artifact(tmp_path / "artifact")))


@pytest.fixture
def checkpoint(hub: Hub, tmp_path: Path) -> None:
    hub.add(REPO, contents(write_hf_folder(tmp_path / "checkpoint")))


def files_below(folder: Path, longest: int = 0) -> list[str]:
    return [path.name for path in folder.rglob("*") if path.is_file() and path.stat().st_size > longest]


def fetched_at_most(hub: Hub, part: str) -> int:
    """Return bytes, where answers were cut."""
    return BIT * len([one for one in hub.requests if part in one.path and one.method == "GET"])


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


@pytest.mark.parametrize("fault", [ENDLESS, BIT_BY_BIT])
@pytest.mark.parametrize("name", ["llorch.json", "tokenizer.json"])
@pytest.mark.usefixtures("artifact")
def test_a_pull_stops_where_a_file_is_longer_than_listed(
    hub: Hub, tmp_path: Path, name: str, fault: dict[str, int]
) -> None:
    files = hub.repositories[REPO].commits[hub.repositories[REPO].refs["main"]]
    hub.faults.append(Fault(f"/objects/{sha256(files[name])}", method="GET", **fault))  # type: ignore[arg-type]
    with pytest.raises(HubError, match=f"{hub.endpoint} sends more than .* nothing of it is kept"):
        pull(Reference(REPO), tmp_path / "out")
    assert hub.flooded < FLOOD // 2
    assert fetched_at_most(hub, "/objects/") < len(files[name]) + SLACK
    assert not any(name in left for left in files_below(tmp_path / ".out.pull"))
    hub.faults.clear()
    pull(Reference(REPO), tmp_path / "out")


@pytest.mark.parametrize("fault", [ENDLESS, BIT_BY_BIT])
@pytest.mark.parametrize("name", ["model.safetensors", "config.json"])
@pytest.mark.usefixtures("checkpoint")
def test_a_checkpoint_stops_there_too(hub: Hub, tmp_path: Path, name: str, fault: dict[str, int]) -> None:
    files = hub.repositories[REPO].commits[hub.repositories[REPO].refs["main"]]
    place = f"/objects/{sha256(files[name])}" if len(files[name]) > 1000 else name
    hub.faults.append(Fault(place, method="GET", **fault))  # type: ignore[arg-type]
    with pytest.raises(HubError, match=f"{hub.endpoint} sends more than .* nothing of it is kept"):
        open_checkpoint(REPO)
    assert hub.flooded < FLOOD // 2
    assert fetched_at_most(hub, place) < len(files[name]) + SLACK
    assert not any(left.endswith(".incomplete") or left == name for left in files_below(tmp_path / "cache"))


@pytest.mark.usefixtures("checkpoint")
def test_a_hub_that_starts_each_answer_anew_is_given_up(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("llorch_serve.hub.limits._MOST_ANSWERS", 20)
    hub.faults.append(Fault("/objects/", method="GET", times=999, cut=BIT, anew=True))
    with pytest.raises(HubError, match="ends its answers early, again and again"):
        open_checkpoint(REPO)
    assert fetched_at_most(hub, "/objects/") < 30 * BIT


@pytest.mark.usefixtures("artifact")
def test_a_shorter_file_is_not_kept_either(hub: Hub, tmp_path: Path) -> None:
    files = hub.repositories[REPO].commits[hub.repositories[REPO].refs["main"]]
    hub.faults.append(Fault(f"/objects/{sha256(files['tokenizer.json'])}", method="GET", lie=b"short"))
    with pytest.raises(HubError, match="nothing of it is kept"):
        pull(Reference(REPO), tmp_path / "out")
    assert not any("tokenizer" in left for left in files_below(tmp_path / ".out.pull"))


@pytest.mark.parametrize(
    ("fault", "found"),
    [
        (Fault("/api/", flood=FLOOD), "sends more than"),
        (Fault("/api/", flood=FLOOD, status=500), "sends more than"),
        (
            Fault(
                "/api/",
                status=200,
                body=gzip.compress(bytes(2**25)),
                headers={"Content-Encoding": "gzip"},
            ),
            "compressed",
        ),
    ],
)
def test_an_answer_of_any_length_is_not_read_to_its_end(hub: Hub, fault: Fault, found: str) -> None:
    hub.add(REPO, {"config.json": b"{}"})
    hub.faults.append(Fault(**vars(fault)))
    with pytest.raises(HubError, match=found):
        open_checkpoint(REPO)
    assert hub.flooded < FLOOD // 2


def test_a_repository_of_very_many_files_is_refused(hub: Hub) -> None:
    hub.add(REPO, {f"{number}": b"" for number in range(MOST_FILES + 1)})
    with pytest.raises(ArtifactError, match=f"lists {MOST_FILES + 1} files; .* at most {MOST_FILES}"):
        open_checkpoint(REPO)
    assert MOST_FILES * 400 < MOST_ANSWER_BYTES


@pytest.mark.parametrize("fetched", [open_checkpoint, lambda name: pull(Reference(name), Path("out"))])
def test_what_the_disk_cannot_hold_is_not_begun(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fetched: Callable[[str], object]
) -> None:
    monkeypatch.chdir(tmp_path)
    for source in (write_hf_folder(tmp_path / "checkpoint"), write_tiny_artifact(tmp_path / "artifact")):
        hub.repositories.clear()
        hub.add(REPO, contents(source))
        if source.name == ("artifact" if fetched is not open_checkpoint else "checkpoint"):
            break
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=100))
    with pytest.raises(ResourceError, match=r"needs .* MB .* has .* free"):
        fetched(REPO)
    small = ("llorch.json",)
    got = [one.path for one in hub.requests if one.method == "GET" and "/resolve/" in one.path]
    assert all(path.endswith(small) for path in got)


@pytest.mark.parametrize("there", [True, False])
@pytest.mark.parametrize("header", ["ETag", "X-Linked-Etag"])
@pytest.mark.usefixtures("checkpoint")
def test_a_hub_names_no_file_outside_of_the_cache(hub: Hub, tmp_path: Path, header: str, there: bool) -> None:
    victim = tmp_path / "victim"
    if there:
        victim.write_text("mine")
    commit = hub.repositories[REPO].refs["main"]
    names = {"ETag": '"abc"', header: '"../../../victim"', "X-Repo-Commit": commit}
    hub.faults.append(Fault("/resolve/", method="HEAD", times=99, status=200, headers=names))
    with pytest.raises(HubError, match="names a file in a way that leads out of the cache"):
        open_checkpoint(REPO)
    assert victim.exists() == there
    assert not there or victim.read_text() == "mine"
