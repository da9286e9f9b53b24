"""What ``ci/test-versions lowest`` installs is what pyproject.toml declares."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest

from lowest_versions import lowest_versions

REPOSITORY = Path(__file__).resolve().parent.parent.parent


def declared(*entries: str, **extras: list[str]) -> dict[str, Any]:
    return {"name": "llorch", "dependencies": list(entries), "optional-dependencies": extras}


def test_each_dependency_has_its_lowest_version() -> None:
    project = declared(
        "numpy>=1.26", "tokenizers>=0.22,<0.24", http=["uvicorn[standard]>=0.47"], no=["torch>=2.6"]
    )
    assert list(lowest_versions(project, ["http"]).values()) == [
        "numpy==1.26",
        "tokenizers==0.22",
        "uvicorn[standard]==0.47",
    ]


def test_extras_of_extras_are_followed() -> None:
    project = declared(dev=["llorch[http,chat]", "mypy==1.18"], http=["starlette>=0.50"], chat=["rich>=13.9"])
    assert list(lowest_versions(project, ["dev"])) == ["starlette", "rich", "mypy"]


@pytest.mark.parametrize(
    "entry", ["numpy", "numpy<3", "numpy~=1.26", "numpy>=1.26; sys_platform == 'darwin'"]
)
def test_an_entry_without_a_lowest_version_is_an_error(entry: str) -> None:
    with pytest.raises(ValueError, match="expected NAME>=VERSION"):
        lowest_versions(declared(entry), [])


def test_every_dependency_and_extra_that_is_tested_declares_one() -> None:
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    script = (REPOSITORY / "ci" / "test-versions").read_text(encoding="utf-8")
    extras = script.split("extras=")[1].split("\n")[0].split(",")
    found = lowest_versions(project, extras)
    assert len(found) > len(project["dependencies"]) > 10
    assert {"starlette", "onnxruntime", "prometheus-client"} <= found.keys()
