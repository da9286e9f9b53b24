"""Gemma 3 270M, the real model: fp32 answers as transformers does on the dequantised file, and what each
precision costs.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from llorch_export.source.open import open_checkpoint
from llorch_export.verify.divergence import verify
from llorch_export.verify.layers.verify import verify_layers
from llorch_export.verify.reference import Reference
from llorch_serve.artifact.folder import Artifact
from llorch_serve.config import SessionConfig
from llorch_serve.runtime.opening import open_session
from llorch_serve.text.tokenizer import Tokenizer
from support.builders.tiny_exports import export_tiny, silent

pytestmark = [pytest.mark.slow, pytest.mark.reference]

PROMPTS = (
    "The capital of France is",
    "Once upon a time",
    "def fibonacci(n):",
    "The three laws of thermodynamics",
    "In 1969, humans",
    "A recipe for bread:",
    "Die Hauptstadt von Deutschland",
    "My favourite book is",
    "SELECT name FROM",
    "To be or not to be",
)
STEPS = 64
NEAR = 1e-3  # between two logits of the reference, which rounding may tell apart either way


@pytest.fixture(scope="module")
def plain(gemma3_gguf: Path, tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    return export_tiny(gemma3_gguf, tmp_path_factory.mktemp("gemma3") / "fp32", max_context=2048)


def test_greedy_answers_are_those_of_transformers(plain: Artifact, gemma3_gguf: Path) -> None:
    reference = Reference(open_checkpoint(str(gemma3_gguf)))
    tokenizer = Tokenizer.load(plain.tokenizer_path)
    session = open_session(plain, SessionConfig(slots=1, max_context=256), lambda report: None)
    for prompt in PROMPTS:
        ids = [2, *tokenizer.encode(prompt, add_special_tokens=False)]
        answer = [int(session.prefill(0, ids, 0, [len(ids) - 1])[0].argmax())]
        while len(answer) < STEPS:
            answer.append(int(session.decode([answer[-1]], [len(ids) + len(answer)])[0].argmax()))
        expected = reference.logits([*ids, *answer])[len(ids) - 1 : -1]
        chosen = expected[np.arange(STEPS), answer]
        assert (expected.max(axis=1) - chosen <= NEAR).all(), prompt


def test_every_layer_is_that_of_transformers(plain: Artifact, gemma3_gguf: Path) -> None:
    found = verify_layers(plain.folder, str(gemma3_gguf), silent)
    assert found.passed, found.first_departing


@pytest.mark.parametrize("precision", ["int8", "source"])
def test_a_precision_costs_no_more_than_its_limit(gemma3_gguf: Path, tmp_path: Path, precision: str) -> None:
    artifact = export_tiny(gemma3_gguf, tmp_path / "out", precision=precision, max_context=2048)
    found = verify(artifact.folder, str(gemma3_gguf), silent)
    assert found.passed, found.kl
