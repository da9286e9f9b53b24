"""The real model on OpenVINO's provider: the same greedy answer as the CPU's, and every node accounted for.

Needs an interpreter with onnxruntime-openvino, named by LLORCH_OPENVINO_PYTHON; ``ci/test-openvino`` makes
one and runs this.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from llorch_serve.artifact.folder import load_artifact
from llorch_serve.bench.schema import Report
from llorch_serve.client.blocking import WorkerClient
from support.builders.reference_files import own_reference
from support.builders.tiny_exports import random_ids
from support.harness.processes import Outcome, interpreter, llorch, llorch_here, serving

pytestmark = [pytest.mark.openvino, pytest.mark.real_model]

ASKED = ("--prompt", "The capital of France is", "--temperature", "0", "--repetition-penalty", "1")
SHORT = ("--max-tokens", "12", "--max-context", "256", "--ignore-eos", "--json")
PROVIDER = ("--provider", "openvino")


@pytest.fixture(scope="module")
def python() -> str:
    return interpreter("LLORCH_OPENVINO_PYTHON", "ci/test-openvino")


@pytest.fixture
def ask(python: str) -> Callable[..., Outcome]:
    return lambda folder, *flags: llorch("generate", folder, *ASKED, *SHORT, *PROVIDER, *flags, python=python)


@pytest.mark.parametrize("precision", ["fp32", "int8"])
def test_the_answer_is_the_cpus(
    smollm2: Callable[..., Path], ask: Callable[..., Outcome], precision: str
) -> None:
    expected = llorch_here("generate", smollm2(precision), *ASKED, *SHORT).document()
    outcome = ask(smollm2(precision, "--target", "openvino"), "--allow-cpu-nodes")
    answer = outcome.document()
    assert answer["token_ids"] == expected["token_ids"]
    assert "Paris" in str(answer["text"])
    assert "of weights on OpenVINOExecutionProvider, " in outcome.stderr
    assert "of weights on CPUExecutionProvider" in outcome.stderr


def test_nodes_on_the_cpu_are_refused_with_their_operators(
    smollm2: Callable[..., Path], ask: Callable[..., Outcome]
) -> None:
    outcome = ask(smollm2("int8", "--target", "openvino"))
    assert outcome.code == 4
    assert "CPUExecutionProvider has 30 GroupQueryAttention, 1 GatherBlockQuantized" in outcome.error()


def test_an_artifact_for_the_cpu_is_refused_with_the_line_that_makes_another(
    smollm2: Callable[..., Path], ask: Callable[..., Outcome]
) -> None:
    outcome = ask(smollm2("int8"))
    assert outcome.code == 4
    assert "llorch export SOURCE --output DIR --target openvino" in outcome.error()


def test_a_worker_says_what_runs_where(smollm2: Callable[..., Path], python: str) -> None:
    flags = (*PROVIDER, "--allow-cpu-nodes", "--max-context", "256", "--slots", "2")
    folder = smollm2("int8", "--target", "openvino")
    with serving(folder, *flags, python=python) as worker, WorkerClient(worker.address) as client:
        shares = client.model_info().provider_shares
    assert [share.provider for share in shares] == ["OpenVINOExecutionProvider", "CPUExecutionProvider"]
    assert sum(share.node_share for share in shares) == pytest.approx(1)
    assert sum(share.weight_share for share in shares) == pytest.approx(1)
    assert shares[0].node_share > 0.9
    assert shares[0].weight_share > 0.8


def test_bench_puts_it_beside_the_cpu(smollm2: Callable[..., Path], python: str, tmp_path: Path) -> None:
    reference, page = tmp_path / "reference", tmp_path / "report.html"
    own_reference(reference, load_artifact(smollm2("fp32")), random_ids(24))
    entries = (f"cpu={smollm2('int8')}", f"openvino@{python}={smollm2('int8', '--target', 'openvino')}")
    providers = [part for entry in entries for part in ("--provider", entry)]
    flags = (
        "--tests",
        "decode",
        "--max-tokens",
        "4",
        "--streams",
        "1",
        "--repeat",
        "1",
        "--max-context",
        "64",
    )
    outcome = llorch(
        "bench", *providers, "--allow-cpu-nodes", *flags, "--reference", reference, "--html", page, "--json"
    )
    assert outcome.code == 0, outcome
    cpu, openvino = msgspec.json.decode(outcome.stdout, type=Report).entries
    assert any(name.startswith("onnxruntime-openvino ") for name in openvino.software)
    assert not any(name.startswith("onnxruntime-openvino ") for name in cpu.software)
    assert [share.provider for share in openvino.placement] == [
        "OpenVINOExecutionProvider",
        "CPUExecutionProvider",
    ]
    for entry in (cpu, openvino):
        assert entry.rows[0].figures["decode_tokens_per_s"].median > 0
        assert entry.fidelity is not None
        assert 1e-6 < entry.fidelity.kl < 0.1  # random tokens are further off than text, which limits are for
    assert "OpenVINOExecutionProvider" in page.read_text()
