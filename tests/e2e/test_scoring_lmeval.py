"""lm-eval's own transformers model and the example's model agree, question by question, on fp32 weights.

Needs an interpreter with lm-eval, named by LLORCH_LMEVAL_PYTHON; ``ci/test-lmeval`` makes one and runs this.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from conftest import REPOSITORY
from support.harness.processes import WorkerProcess, environment, interpreter

pytestmark = [pytest.mark.lmeval, pytest.mark.real_model]

EXAMPLE = REPOSITORY / "examples" / "lm_eval"
LOG_LIKELIHOODS = 1e-3
"""Sums over a few tokens; each is as exact as the logits."""


def evaluate(
    output: Path, command: tuple[str, ...], model: str, arguments: str
) -> tuple[dict[str, float], list[float]]:
    """Run lm-eval; return the accuracies, and the log-likelihoods of all choices in their order."""
    python = interpreter("LLORCH_LMEVAL_PYTHON", "ci/test-lmeval")
    flags = ("--model", model, "--model_args", arguments, "--tasks", "llorch_everyday", "--device", "cpu")
    subprocess.run(
        [python, *command, *flags, "--output_path", str(output), "--log_samples"],
        check=True,
        env=environment(HF_DATASETS_OFFLINE="1"),
        stdout=subprocess.DEVNULL,
    )
    [results] = output.rglob("results_*.json")
    [samples] = output.rglob("samples_*.jsonl")
    found = json.loads(results.read_text())["results"]["llorch_everyday"]
    lines = [json.loads(line) for line in samples.read_text().splitlines()]
    lines.sort(key=lambda line: line["doc_id"])
    logprobs = [float(answer[0]) for line in lines for answer in line["filtered_resps"]]
    return {name: found[f"{name},none"] for name in ("acc", "acc_norm")}, logprobs


def test_the_accuracy_through_score_is_that_of_lm_evals_own_model(
    tmp_path: Path, smollm2_gguf: Path, smollm2_worker: Callable[..., WorkerProcess]
) -> None:
    address = smollm2_worker("fp32").address
    ours = evaluate(tmp_path / "ours", (str(EXAMPLE / "run.py"),), "llorch", f"address={address}")
    weights = f"pretrained={smollm2_gguf.parent},gguf_file={smollm2_gguf.name},dtype=float32"
    theirs = evaluate(
        tmp_path / "theirs", ("-m", "lm_eval", "run", "--include_path", str(EXAMPLE)), "hf", weights
    )
    assert ours[0] == theirs[0]
    assert len(ours[1]) == 200
    assert ours[1] == pytest.approx(theirs[1], abs=LOG_LIKELIHOODS)


def test_an_argument_that_is_none_is_refused_before_anything_is_sent(tmp_path: Path) -> None:
    python = interpreter("LLORCH_LMEVAL_PYTHON", "ci/test-lmeval")
    flags = (
        "--model",
        "llorch",
        "--model_args",
        "address=127.0.0.1:1,tls_caa=ca.pem",
        "--tasks",
        "llorch_everyday",
    )
    result = subprocess.run(
        [python, str(EXAMPLE / "run.py"), *flags, "--output_path", str(tmp_path)],
        check=False,
        env=environment(HF_DATASETS_OFFLINE="1"),
        capture_output=True,
        text=True,
    )
    assert result.returncode != 0
    assert "unexpected keyword argument 'tls_caa'" in result.stderr
