"""The real model on CUDA: greedy answers, with every node, the cache and recorded steps on the GPU.

Needs an NVIDIA GPU, and an interpreter with onnxruntime-gpu named by LLORCH_CUDA_PYTHON; ``ci/test-cuda``
provides the latter.
"""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from support.harness.processes import interpreter, llorch, with_scripts
from tolerances import HALF_PROVIDER_DIFFERENCE

pytestmark = [pytest.mark.cuda, pytest.mark.real_model]

QUESTION = ("--chat", "What is the capital of France?", "--temperature", "0", "--repetition-penalty", "1")
UNRECORDED = ("--provider-option", "enable_cuda_graph=0")


@pytest.fixture(scope="module")
def python() -> str:
    return interpreter("LLORCH_CUDA_PYTHON", "ci/test-cuda")


@pytest.fixture(params=["fp16", "bf16", "int8", "int4"])
def artifact(request: pytest.FixtureRequest, smollm2: Callable[..., Path]) -> Path:
    return smollm2(request.param, "--target", "cuda")


def test_doctor_finds_the_operators_right_on_the_gpu(python: str) -> None:
    outcome = llorch("doctor", "--provider", "cuda", python=python)
    assert outcome.code == 0, outcome
    assert "GroupQueryAttention: ok" in outcome.stdout
    assert "on CPUExecutionProvider" not in outcome.stdout


def test_recorded_steps_give_the_ids_of_plain_ones(artifact: Path, python: str) -> None:
    asked = (
        "generate",
        artifact,
        *QUESTION,
        "--max-tokens",
        "48",
        "--ignore-eos",
        "--json",
        "--provider",
        "cuda",
    )
    plain = llorch(*asked, *UNRECORDED, python=python)
    recorded = llorch(*asked, python=python)
    assert recorded.document()["token_ids"] == plain.document()["token_ids"]
    assert "no batching" not in plain.stderr
    assert "on the host" not in recorded.stderr, "tokens are chosen on the GPU"


def test_tokens_chosen_on_the_gpu_are_those_of_its_logits(artifact: Path, python: str) -> None:
    """With log-probabilities logits come to the host, where tokens are chosen then."""
    asked = ("generate", artifact, *QUESTION, "--max-tokens", "48", "--ignore-eos", "--json")
    chosen = llorch(*asked, "--provider", "cuda", python=python)
    told = llorch(*asked, "--provider", "cuda", "--logprobs", "1", python=python)
    assert chosen.document()["token_ids"] == told.document()["token_ids"]


def test_slots_are_copied_and_exchanged_on_the_gpu(smollm2: Callable[..., Path], python: str) -> None:
    for flags in ((), ("enable_cuda_graph=0",)):
        command = [python, "-m", "measure.cuda_slots", smollm2("fp16", "--target", "cuda"), *flags]
        result = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=with_scripts())
        differences = [float(line) for line in result.stdout.split()]
        assert len(differences) == 14
        assert max(differences) < HALF_PROVIDER_DIFFERENCE, differences


def test_answers_that_share_a_prompt_are_the_one_alone(smollm2: Callable[..., Path], python: str) -> None:
    asked = ("generate", smollm2("fp16", "--target", "cuda"), *QUESTION, "--json", "--provider", "cuda")
    alone = llorch(*asked, python=python).document()
    together = llorch(*asked, "--n", "3", python=python).document()["answers"]
    assert [answer["token_ids"] for answer in together] == 3 * [alone["token_ids"]]  # type: ignore[attr-defined]


def test_it_answers(smollm2: Callable[..., Path], python: str) -> None:
    for flags in ((), UNRECORDED):
        outcome = llorch(
            "generate",
            smollm2("fp16", "--target", "cuda"),
            *QUESTION,
            "--provider",
            "cuda",
            *flags,
            python=python,
        )
        assert outcome.stdout.strip() == "The capital of France is Paris.", outcome


def test_many_streams_on_the_gpu_all_complete(smollm2: Callable[..., Path], python: str) -> None:
    for flags in ((), UNRECORDED):
        outcome = llorch(
            "bench", smollm2("fp16", "--target", "cuda"), "--provider", "cuda", *flags, "--streams", "1,5",
            "--prompt-tokens", "64", "--max-tokens", "16", "--repeat", "1", "--json", python=python,
        )  # fmt: skip
        (entry,) = outcome.document()["entries"]  # type: ignore[misc]
        assert entry["problem"] is None
        assert all(not row["failures"] for row in entry["rows"])


def test_memory_that_does_not_suffice_is_said(smollm2: Callable[..., Path], python: str) -> None:
    outcome = llorch(
        "generate", smollm2("fp16", "--target", "cuda"), *QUESTION, "--provider", "cuda",
        "--provider-option", "gpu_mem_limit=300000000", "--max-context", "8192", python=python,
    )  # fmt: skip
    assert outcome.code == 6
    assert "choose a smaller --max-context" in outcome.error()
