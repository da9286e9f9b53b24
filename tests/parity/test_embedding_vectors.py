"""Vectors of texts against transformers' hidden states, pooled by numpy from the definition."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from llorch_export.verify.embeddings import verify_embeddings
from llorch_serve.artifact.folder import Artifact
from llorch_serve.config import SessionConfig
from llorch_serve.runtime.embedding_session import EmbeddingSession, open_embedder
from support.builders.arch_rows import HF
from support.builders.checkpoints import write_gguf, write_hf_folder
from support.builders.tiny_exports import export_tiny, random_ids, silent
from tolerances import FP32_VECTORS, INT8_COSINE

LENGTHS = (40, 1, 7, 23)
FAMILIES = (
    "mistral, window",
    "qwen3",
    "heads of 24",
    "granite, tied, biases",
    "gemma3",
    "cohere2",
    "phi",
    "nemotron, biases, tied",
    "olmo3",
    "qwen3_moe",
)
Vectors = npt.NDArray[np.float64]


def texts() -> list[list[int]]:
    return [random_ids(length, seed=length) for length in LENGTHS]


def opened(artifact: Artifact) -> EmbeddingSession:
    return open_embedder(artifact, SessionConfig(threads=1), lambda report: None)


def expected(folder: Path, pooling: str, *, normalised: bool = True) -> Vectors:
    """Return the vectors that transformers' states give."""
    import torch
    import transformers

    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()
    model = transformers.AutoModel.from_pretrained(folder, dtype=torch.float32, local_files_only=True).eval()
    found = []
    for text in texts():
        with torch.inference_mode():
            states = model(torch.tensor([text]), use_cache=False).last_hidden_state[0].double().numpy()
        found.append(states[-1] if pooling == "last" else states.mean(axis=0))
    vectors = np.stack(found)
    return vectors / np.linalg.norm(vectors, axis=1, keepdims=True) if normalised else vectors


def cosines(found: npt.NDArray[Any], wanted: Vectors) -> Sequence[float]:
    lengths = np.linalg.norm(found, axis=1) * np.linalg.norm(wanted, axis=1)
    return list((found * wanted).sum(axis=1) / lengths)


@pytest.mark.reference
@pytest.mark.parametrize(
    ("name", "pooling"), [(name, ("last", "mean")[index % 2]) for index, name in enumerate(FAMILIES)]
)
def test_texts_padded_to_one_length_have_the_vectors_of_transformers(
    tmp_path: Path, name: str, pooling: Any
) -> None:
    folder = write_hf_folder(tmp_path / "model", HF[name])
    session = opened(export_tiny(folder, tmp_path / "artifact", embed=pooling))
    found = session.embed(texts())
    np.testing.assert_allclose(found, expected(folder, pooling), atol=FP32_VECTORS, rtol=0)
    np.testing.assert_allclose(np.linalg.norm(found, axis=1), 1, atol=1e-6)


@pytest.mark.reference
@pytest.mark.parametrize("pooling", ["last", "mean"])
def test_a_rotated_model_gives_its_vectors_in_the_basis_that_it_had(tmp_path: Path, pooling: Any) -> None:
    folder = write_hf_folder(tmp_path / "model", HF["qwen3"])
    artifact = export_tiny(folder, tmp_path / "artifact", embed=pooling, transforms=("rotate", "hadamard"))
    found = opened(artifact).embed(texts())
    np.testing.assert_allclose(found, expected(folder, pooling), atol=FP32_VECTORS, rtol=0)


@pytest.mark.reference
@pytest.mark.parametrize("precision", ["int8", "fp16"])
def test_other_precisions_stay_near(tmp_path: Path, precision: Any) -> None:
    folder = write_hf_folder(tmp_path / "model")
    session = opened(export_tiny(folder, tmp_path / "artifact", embed="mean", precision=precision))
    assert min(cosines(session.embed(texts()), expected(folder, "mean"))) > INT8_COSINE


@pytest.mark.reference
def test_a_gguf_file_has_the_vectors_of_the_folder(tmp_path: Path) -> None:
    folder = write_hf_folder(tmp_path / "model")
    source = write_gguf(tmp_path / "m.gguf", metadata={"llama.pooling_type": 3})
    artifact = export_tiny(source, tmp_path / "artifact")
    assert artifact.manifest.embeds is not None
    found = opened(artifact).embed(texts())
    np.testing.assert_allclose(found, expected(folder, "last"), atol=FP32_VECTORS, rtol=0)


@pytest.mark.reference
def test_a_text_has_the_same_vector_whatever_it_is_run_with(tmp_path: Path) -> None:
    session = opened(export_tiny(write_hf_folder(tmp_path / "model"), tmp_path / "artifact", embed="last"))
    together = session.embed(texts())
    alone = np.concatenate([session.embed([text]) for text in texts()])
    np.testing.assert_array_equal(together, alone)


@pytest.mark.reference
@pytest.mark.parametrize("pooling", ["last", "mean"])
def test_verify_takes_an_artifact_that_embeds(tmp_path: Path, pooling: Any) -> None:
    folder = write_hf_folder(tmp_path / "model", HF["qwen2"])
    artifact = export_tiny(folder, tmp_path / "artifact", embed=pooling)
    result = verify_embeddings(artifact.folder, str(folder), silent)
    assert (result.passed, result.same_source) == (True, True)
    assert result.lowest_cosine > result.limit == 0.99999
    other = write_hf_folder(tmp_path / "other", HF["qwen2"], seed=9)
    assert not verify_embeddings(artifact.folder, str(other), silent).passed
