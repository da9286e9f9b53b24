"""The real model on the WebGPU plugin: the same greedy answer as the CPU's, with every node and the cache on
the device.

Needs an interpreter with the plugin, named by LLORCH_WEBGPU_PYTHON, and a Vulkan driver; ``ci/test-webgpu``
provides both. A driver in software takes seconds a token, so answers are short.
"""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from support.harness.processes import interpreter, llorch, llorch_here

pytestmark = [pytest.mark.webgpu, pytest.mark.real_model]

GREEDY = ("--temperature", "0", "--repetition-penalty", "1", "--max-context", "128", "--json")
ASKED = ("--prompt", "The capital of France is", "--max-tokens", "4", "--ignore-eos", *GREEDY)
QUESTION = ("--chat", "What is the capital of France?", "--max-tokens", "12", *GREEDY)


@pytest.fixture(scope="module")
def python() -> str:
    return interpreter("LLORCH_WEBGPU_PYTHON", "ci/test-webgpu")


def library(python: str) -> str:
    code = "import onnxruntime_ep_webgpu as plugin; print(plugin.get_library_path())"
    return subprocess.run([python, "-c", code], check=True, stdout=subprocess.PIPE, text=True).stdout.strip()


@pytest.mark.parametrize(
    ("precision", "by_path", "asked"), [("int8", False, ASKED), ("fp32", True, QUESTION)]
)
def test_the_answer_is_the_cpus(
    smollm2: Callable[..., Path], python: str, precision: str, by_path: bool, asked: tuple[str, ...]
) -> None:
    expected = llorch_here("generate", smollm2(precision), *asked).document()
    folder = smollm2(precision, "--target", "webgpu", "--compute-type", "float32")
    flags = ("--ep-library", library(python)) if by_path else ("--provider", "webgpu")
    outcome = llorch("generate", folder, *asked, *flags, python=python)
    answer = outcome.document()
    assert answer["token_ids"] == expected["token_ids"]
    assert "Paris" in str(answer["text"])
    assert "CPUExecutionProvider" not in outcome.stderr


def test_an_artifact_for_the_cpu_is_refused(smollm2: Callable[..., Path], python: str) -> None:
    outcome = llorch("generate", smollm2("int8"), *ASKED, "--provider", "webgpu", python=python)
    assert outcome.code == 4
    assert "--target webgpu" in outcome.stderr
