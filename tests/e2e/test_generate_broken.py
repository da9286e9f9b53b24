"""A graph that cannot be loaded ends ``llorch generate`` with its name, before any token of the other one."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from llorch_export.options import ExportOptions, Rule
from llorch_serve.errors import ArtifactError
from support.builders.checkpoints import write_hf_folder
from support.builders.tiny_exports import export_tiny
from support.harness.processes import llorch_here

ROWS: dict[str, Any] = {
    "precision": "int8",
    "activations": "row",
    "rules": (Rule(("*.mlp.down_proj",), activations="block"),),
}
ASKED = ("--prompt", "a b c", "--max-tokens", "2")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An artifact with a graph for prompts, one over a cache in int8, and a chat template."""
    root = tmp_path_factory.mktemp("broken")
    prompts = ExportOptions("", Path(), kv_dtype="float32", **ROWS)
    export_tiny(write_hf_folder(root / "source"), root / "artifact", prompts=prompts, precision="int8")
    return root / "artifact"


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("graph", ["decode.onnx", "prompts.onnx"])
def test_a_graph_that_is_broken_is_named_and_nothing_is_answered(
    folder: Path, graph: str, threads: int, tmp_path: Path
) -> None:
    copy = shutil.copytree(folder, tmp_path / "artifact")
    path = copy / graph
    path.write_bytes(b"\xff" * path.stat().st_size)
    outcome = llorch_here("generate", copy, *ASKED, "--threads", threads)
    assert (outcome.code, outcome.stdout) == (ArtifactError.exit_code, "")
    assert graph in outcome.stderr
    assert "cannot be loaded" in outcome.stderr


def test_the_same_artifact_answers_as_it_was_exported(folder: Path) -> None:
    assert llorch_here("generate", folder, *ASKED, "--threads", 2).code == 0


def test_a_broken_tokenizer_is_told_before_a_broken_graph(folder: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(folder, tmp_path / "artifact")
    for name in ("decode.onnx", "tokenizer.json"):
        (copy / name).write_bytes(b"\xff" * (copy / name).stat().st_size)
    outcome = llorch_here("generate", copy, *ASKED)
    assert (outcome.code, outcome.stdout) == (ArtifactError.exit_code, "")
    assert "tokenizer.json" in outcome.stderr
