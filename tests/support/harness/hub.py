"""The tests' hub in place of the real one, for the client in this process or in a command's."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from huggingface_hub import constants, file_download
from huggingface_hub.utils import _http

from support.fakes.hub import Hub, running_hub
from support.fakes.modelscope import ModelScopeHandler


@contextlib.contextmanager
def hub_in_this_process(cache: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """Point the client at a hub with an empty cache, without a token, without pauses between attempts."""
    with running_hub() as hub:
        for name, value in {
            "ENDPOINT": hub.endpoint,
            "HUGGINGFACE_CO_URL_TEMPLATE": hub.endpoint + "/{repo_id}/resolve/{revision}/{filename}",
            "HF_HUB_CACHE": str(cache),
            "DOWNLOAD_CHUNK_SIZE": 10_000,
            "HF_HUB_DISABLE_XET": True,
            "HF_HUB_OFFLINE": False,
            "HF_TOKEN_PATH": str(cache / "no-token"),
        }.items():
            monkeypatch.setattr(constants, name, value)
            if hasattr(file_download, name):  # which in older clients has its own
                monkeypatch.setattr(file_download, name, value)
        monkeypatch.delenv("HF_TOKEN", raising=False)
        monkeypatch.setattr(file_download.time, "sleep", lambda _seconds: None)
        if hasattr(_http, "_HUB_ORIGINS"):  # whom newer clients show the token
            monkeypatch.setattr(_http, "_HUB_ORIGINS", frozenset({_http._url_origin(hub.endpoint)}))
        assert urlsplit(hub.store).hostname != urlsplit(hub.endpoint).hostname
        yield hub


@contextlib.contextmanager
def hub_for_pushes(cache: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """As :func:`hub_in_this_process`, with a token that may write."""
    with hub_in_this_process(cache, monkeypatch) as hub:
        monkeypatch.setenv("HF_TOKEN", "hf_secret")
        yield hub


@contextlib.contextmanager
def impatient_client() -> Iterator[None]:
    """Let the client wait a moment alone for each answer, where a test's hub gives none."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("llorch_serve.hub.hugging_face._TIMEOUT_S", 0.2)
        patch.setattr(constants, "HF_HUB_DOWNLOAD_TIMEOUT", 0.2)
        patch.setattr(file_download, "_ETAG_RETRY_TIMEOUT", 0.2)
        yield


def hub_environment(hub: Hub, home: Path) -> dict[str, str]:
    """Return the variables that point a command's client at the hub."""
    return {
        "HF_ENDPOINT": hub.endpoint,
        "HF_HOME": str(home),
        "HF_HUB_DISABLE_XET": "1",
        "HF_HUB_OFFLINE": "0",
    }


@contextlib.contextmanager
def modelscope_in_this_process(cache: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """Point ModelScope's client at a hub with an empty cache, without a token or pauses between attempts."""
    from modelscope_hub import _download, _legacy_api

    with running_hub(ModelScopeHandler) as hub:
        for name, value in modelscope_environment(hub, cache).items():
            monkeypatch.setenv(name, value)
        monkeypatch.delenv("MODELSCOPE_API_TOKEN", raising=False)
        monkeypatch.setattr(_download._DownloadControl, "sleep", lambda _self, _seconds: None)
        monkeypatch.setattr(_legacy_api.time, "sleep", lambda _seconds: None)
        yield hub


def modelscope_environment(hub: Hub, cache: Path) -> dict[str, str]:
    """Return the variables that point a command's client of ModelScope at the hub."""
    return {
        "MODELSCOPE_ENDPOINT": hub.endpoint,
        "MODELSCOPE_CACHE": str(cache),
        "MODELSCOPE_HOME": str(cache),
    }
