"""The rules of import between rooms (``ci/import-linter.ini``) hold, and each of them is seen to break."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
RULES = REPOSITORY / "ci" / "import-linter.ini"

PLANTED = {
    "Rooms of serve import downwards only": ("llorch_serve/text/stops.py", "llorch_serve.worker.worker"),
    "Rooms of export import downwards only": ("llorch_export/config/rope.py", "llorch_export.pipeline"),
    "serve never imports export": ("llorch_serve/bench/page.py", "llorch_export.options"),
    "Neither package imports the one in front of both": ("llorch_serve/client/calls.py", "llorch.blocking"),
    "The engine and sampling know no runtime and no cache": (
        "llorch_serve/sampling/draws.py",
        "onnxruntime",
    ),
    "The core knows no front": ("llorch_serve/chat/template.py", "llorch_serve.foreign.detect"),
    "HTTP borrows nothing from gRPC": ("llorch_serve/http/page.py", "llorch_serve.rpc.server"),
    "Serving needs none of the exporter's libraries": ("llorch_serve/fidelity/divergence.py", "onnx"),
}


@pytest.fixture
def copied(tmp_path: Path) -> Path:
    """The sources of both packages, where they may be changed."""
    for package in ("serve/llorch_serve", "serve/llorch", "export/llorch_export"):
        source = REPOSITORY / package
        for file in source.rglob("*.py"):
            target = tmp_path / source.name / file.relative_to(source)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(file, target)
    return tmp_path


def verdicts(folder: Path) -> dict[str, str]:
    """Return KEPT or BROKEN for each rule."""
    done = subprocess.run(
        [Path(sys.executable).with_name("lint-imports"), "--no-cache", "--config", RULES],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(folder), "COLUMNS": "200"},
        capture_output=True,
        text=True,
        check=False,
    )
    plain = re.sub(r"\x1b\[[0-9;]*m", "", done.stdout)  # older versions colour it for anybody
    return dict(re.findall(r"^(.+) (KEPT|BROKEN)$", plain, re.MULTILINE))


def test_every_rule_holds(copied: Path) -> None:
    assert verdicts(copied) == dict.fromkeys(PLANTED, "KEPT")


def test_every_rule_is_broken_by_an_import_against_it(copied: Path) -> None:
    for file, imported in PLANTED.values():
        path = copied / file
        path.write_text(f"{path.read_text(encoding='utf-8')}\nimport {imported}\n", encoding="utf-8")
    assert verdicts(copied) == dict.fromkeys(PLANTED, "BROKEN")
