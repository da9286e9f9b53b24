"""No message shows a password or a token, whichever way it came to be in an address or a header."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from huggingface_hub import constants

from llorch_export.source.open import open_checkpoint
from llorch_serve.errors import ArtifactError, LlorchError, UsageError
from llorch_serve.hub.credentials import hide_credentials
from llorch_serve.hub.pull import pull
from llorch_serve.hub.reference import Reference
from support.fakes.hub import Fault, Hub
from support.harness.hub import hub_environment, hub_in_this_process
from support.harness.processes import llorch

REPO = "some-org/tiny"


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    with hub_in_this_process(tmp_path / "cache", monkeypatch) as hub:
        yield hub


def with_password(address: str) -> str:
    return address.replace("://", "://someone:s3cr@t@")


@pytest.mark.parametrize(
    "fault",
    [
        Fault("/api/", status=500, times=9),
        Fault("/api/", status=404, times=9),
        Fault("/api/", status=429, times=9),
        Fault("/api/", status=418, times=9),
        Fault("/api/", status=200, body=b"[]", times=9),
        Fault("/api/", flood=2**24, times=9),
        None,
    ],
)
def test_a_password_in_the_address_is_not_shown(
    hub: Hub, monkeypatch: pytest.MonkeyPatch, fault: Fault | None
) -> None:
    if fault is not None:
        hub.faults.append(Fault(**vars(fault)))
    address = hub.endpoint if fault else "http://127.0.0.1:9"
    monkeypatch.setattr(constants, "ENDPOINT", with_password(address))
    with pytest.raises(ArtifactError) as caught:
        open_checkpoint(REPO)
    assert address.removeprefix("http://") in str(caught.value)
    assert "someone" not in str(caught.value)
    assert "s3cr" not in str(caught.value)


def test_neither_is_it_by_the_clients_warnings_or_in_a_traceback(hub: Hub, tmp_path: Path) -> None:
    hub.add(REPO, {"llorch.json": b"{}"})
    hub.faults += [
        Fault("/resolve/", method="GET", cut=1),
        Fault("/resolve/", method="GET", status=500, times=9),
    ]
    variables = hub_environment(hub, tmp_path / "home")
    variables["HF_ENDPOINT"] = with_password(hub.endpoint)
    outcome = llorch("--debug", "pull", REPO, tmp_path / "out", **variables)
    assert outcome.code == 7
    assert "Traceback" in outcome.stderr
    assert "Error while downloading from http://127.0.0.1" in outcome.stderr
    assert "for url 'http://127.0.0.1" in outcome.stderr
    assert "s3cr" not in outcome.stderr


@pytest.mark.parametrize("token", ["hf_sec\x01ret", "hf_sec\tret", "hf_sec ret", "hf_sécret"])
def test_a_token_that_cannot_be_sent_is_refused_without_being_shown(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, token: str
) -> None:
    monkeypatch.setenv("HF_TOKEN", token)
    for ask in (lambda: open_checkpoint(REPO), lambda: pull(Reference(REPO), tmp_path / "out")):
        with pytest.raises(UsageError, match="has a character that no token has, at place") as caught:
            ask()
        assert "hf_s" not in str(caught.value)
    assert hub.requests == []


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("at https://a:b@host/x", "at https://host/x"),
        ("at https://a:b@c@host/x?y=z@w", "at https://host/x?y=z@w"),
        ("proxy http://token@host:80: no", "proxy http://host:80: no"),
        (r"Illegal header value b'Bearer hf_a\x01b'", "Illegal header value b'Bearer [redacted]'"),
        ("authorization: Basic YWJj, more", "authorization: Basic [redacted], more"),
        ("https://host/org/name@main", "https://host/org/name@main"),
    ],
)
def test_what_is_shown(text: str, shown: str) -> None:
    assert hide_credentials(text) == shown


def test_an_error_stays_what_it_is(hub: Hub) -> None:
    with pytest.raises(LlorchError, match=f"does not exist at {hub.endpoint}"):
        open_checkpoint(REPO)
