"""``llorch doctor`` as people run it: a report on stdout, each problem on stderr, and an exit code by
class.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from llorch_serve.providers import CPU
from support.harness.processes import llorch_here


def test_a_sound_machine_and_artifact(tiny: Path) -> None:
    outcome = llorch_here("doctor", tiny)
    assert (outcome.code, outcome.stderr) == (0, "")
    assert "used       CPUExecutionProvider" in outcome.stdout
    assert f"artifact   {tiny}: runs; 100.0% of nodes and 100.0% of weights on {CPU}" in outcome.stdout


def test_json_holds_the_same(tiny: Path) -> None:
    document = llorch_here("doctor", tiny, "--json").document()
    assert document["problems"] == []
    assert document["used"] == CPU
    assert all(result["passed"] for result in document["operators"])


def test_an_absent_provider_ends_with_4_after_the_report() -> None:
    outcome = llorch_here("doctor", "--provider", "cuda")
    assert outcome.code == 4
    assert "cuda       not here: the wheel onnxruntime-gpu is not installed" in outcome.stdout
    assert outcome.stderr.startswith("error: CUDAExecutionProvider is not available")


@pytest.mark.parametrize("fault", ["missing", "damaged"])
def test_a_bad_artifact_ends_with_3(tiny: Path, tmp_path: Path, fault: str) -> None:
    folder = tmp_path / "copy"
    if fault == "damaged":
        shutil.copytree(tiny, folder)
        (folder / "model.onnx").write_bytes(b"nothing")
    outcome = llorch_here("doctor", folder)
    assert outcome.code == 3, outcome
    assert str(folder) in outcome.stderr
    assert "operator   GroupQueryAttention: ok" in outcome.stdout


def test_an_artifact_for_another_provider_ends_with_4(tiny_source: Path, tmp_path: Path, export_here) -> None:
    folder = export_here(tiny_source, tmp_path / "cuda", "--target", "cuda", "--precision", "bf16")
    outcome = llorch_here("doctor", folder)
    assert outcome.code == 4
    assert "computes in bfloat16 and CPUExecutionProvider has no bfloat16 arithmetic" in outcome.stderr


def test_graphs_of_fixed_shapes_are_tried_too(tiny_source: Path, tmp_path: Path, export_here) -> None:
    folder = export_here(tiny_source, tmp_path / "coreml", "--target", "coreml")
    outcome = llorch_here("doctor", folder)
    assert outcome.code == 0, outcome
    assert f"artifact   {folder}: runs; 100.0% of nodes" in outcome.stdout
