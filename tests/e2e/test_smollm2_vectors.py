"""SmolLM2's vectors by the default of ``--embed``, of the texts on which int8 was the furthest from the
model's own: three of four tokens and fewer, where a small error early on becomes a large one.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llorch_export.verify.embeddings import COSINE_LIMITS
from llorch_serve.artifact.folder import load_artifact
from llorch_serve.config import SessionConfig
from llorch_serve.runtime.embedding_session import open_embedder
from llorch_serve.text.tokenizer import Tokenizer
from support.harness.processes import llorch_here

pytestmark = [pytest.mark.slow, pytest.mark.reference]

TEXTS = ("HTTPServer", "he rice ", "the trip that ", "to meet", "and enjoy the pud")


@pytest.mark.parametrize("pooling", ["last", "mean"])
def test_no_text_is_far_from_the_model_by_default(
    smollm2_gguf: Path, smollm2_reference: Any, tmp_path: Path, pooling: str
) -> None:
    import torch

    folder = tmp_path / pooling
    llorch_here("export", str(smollm2_gguf), "--embed", pooling, "--output", str(folder))
    artifact = load_artifact(folder)
    tokenizer = Tokenizer.load(artifact.tokenizer_path)
    texts = [list(tokenizer.encode(text, add_special_tokens=True)) for text in TEXTS]
    found = open_embedder(artifact, SessionConfig(threads=1), lambda _: None).embed(texts)
    for text, vector in zip(texts, found, strict=True):
        with torch.inference_mode():
            output = smollm2_reference.base_model(torch.tensor([text]), use_cache=False)
        states = output.last_hidden_state[0].double().numpy()
        wanted = states[-1] if pooling == "last" else states.mean(axis=0)
        assert vector @ wanted / np.linalg.norm(wanted) > COSINE_LIMITS["fp32"]
