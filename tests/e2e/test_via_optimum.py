"""Optimum itself exports a checkpoint, and the wrapped graph agrees with transformers and with llorch's own.

Needs an interpreter with optimum-onnx, named by LLORCH_OPTIMUM_PYTHON; ``ci/test-optimum`` makes one and runs
this.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from support.builders.arch_rows import HF
from support.builders.checkpoints import write_hf_folder
from support.builders.tiny_exports import random_ids
from support.harness.processes import interpreter, llorch_here

pytestmark = [pytest.mark.optimum, pytest.mark.reference]

ROWS = ["yarn in rope_parameters", "mistral, window", "qwen2", "qwen3", "smollm3", "granite", "phi3"]


@pytest.fixture(scope="module")
def python() -> str:
    return interpreter("LLORCH_OPTIMUM_PYTHON", "ci/test-optimum")


def generated(folder: Path) -> object:
    prompt = ",".join(map(str, random_ids(20)))
    flags = ("--prompt-ids", prompt, "--temperature", "0", "--max-tokens", "16", "--ignore-eos", "--json")
    return llorch_here("generate", folder, *flags).document()["token_ids"]


@pytest.mark.parametrize("row", ROWS)
def test_a_traced_model_is_a_second_opinion(tmp_path: Path, python: str, row: str) -> None:
    source = write_hf_folder(tmp_path / "model", HF[row])
    traced, own = tmp_path / "traced", tmp_path / "own"
    outcome = llorch_here("export", source, "-o", traced, "--via", "optimum", "--optimum-python", python)
    assert outcome.code == 0, outcome
    verified = llorch_here("verify", traced, "--against", source, "--json").document()
    assert verified["passed"]
    assert llorch_here("export", source, "-o", own, "--precision", "fp32").code == 0
    assert generated(traced) == generated(own)
