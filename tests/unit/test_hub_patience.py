"""A hub that asks for a long pause, or says nothing, is given up instead of waited for."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from huggingface_hub import file_download

from llorch_export.source.open import open_checkpoint
from llorch_serve.errors import HubError
from llorch_serve.hub.patience import Patience, SilenceTimeoutError, requested_pause
from llorch_serve.hub.pull import pull
from llorch_serve.hub.reference import Reference
from support.builders.checkpoints import write_hf_folder
from support.fakes.hub import Fault, Hub
from support.harness.hub import hub_in_this_process

REPO = "some-org/tiny"


@pytest.fixture
def served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Hub, list[float]]]:
    """Serve a model; yield the hub, and what the client pauses, in seconds, without waiting."""
    with hub_in_this_process(tmp_path / "cache", monkeypatch) as hub:
        source = write_hf_folder(tmp_path / "m")
        hub.add(REPO, {file.name: file.read_bytes() for file in source.iterdir()})
        found: list[float] = []
        monkeypatch.setattr(file_download.time, "sleep", found.append)
        yield hub, found


@pytest.mark.parametrize(
    ("status", "headers"),
    [
        (429, {"Retry-After": "3600"}),
        (503, {"Retry-After": "99999999999"}),
        (429, {"RateLimit": '"api";r=0;t=3600'}),
    ],
)
def test_a_long_pause_is_not_waited_out(
    served: tuple[Hub, list[float]], status: int, headers: dict[str, str]
) -> None:
    hub, pauses = served
    hub.faults.append(Fault("/resolve/", times=99, status=status, headers=headers))
    with pytest.raises(HubError, match="in 3600 s" if status == 429 else "status 503"):
        open_checkpoint(REPO)
    assert max(pauses, default=0) <= 61


def test_neither_is_it_by_a_pull(served: tuple[Hub, list[float]], tmp_path: Path) -> None:
    hub, pauses = served
    hub.add(REPO, {"llorch.json": b"{}"})
    hub.faults.append(Fault("/resolve/", times=99, status=429, headers={"Retry-After": "3600"}))
    with pytest.raises(HubError, match="in 3600 s"):
        pull(Reference(REPO), tmp_path / "out")
    assert max(pauses, default=0) <= 61
    assert not (tmp_path / "out").exists()


def test_a_short_pause_is(served: tuple[Hub, list[float]]) -> None:
    hub, pauses = served
    hub.faults.append(Fault("/resolve/", times=2, status=429, headers={"Retry-After": "7"}))
    assert open_checkpoint(REPO).name == "tiny"
    assert 8 in pauses


def request(method: str) -> SimpleNamespace:
    return SimpleNamespace(method=method, extensions={"timeout": dict.fromkeys(("connect", "read"), 60.0)})


def test_a_hub_that_says_nothing_is_asked_for_half_a_minute() -> None:
    now = [0.0]
    patience = Patience(lambda: now[0])
    for now[0] in (0.0, 10.0, 21.0):
        asked = request("HEAD")
        patience.asking(asked)
        assert set(asked.extensions["timeout"].values()) == {10.0}
    now[0] = 33.0
    with pytest.raises(SilenceTimeoutError):
        patience.asking(request("GET"))
    patience.asking(request("PUT"))
    patience.answered(SimpleNamespace(status_code=200, headers={}))
    patience.asking(request("GET"))


@pytest.mark.parametrize(
    ("headers", "seconds"),
    [({"Retry-After": "5"}, 5), ({"Retry-After": "soon"}, None), ({"Retry-After": "٣"}, None), ({}, None)],
)
def test_what_is_no_number_of_seconds_is_none(headers: dict[str, str], seconds: int | None) -> None:
    assert requested_pause(headers) == seconds
