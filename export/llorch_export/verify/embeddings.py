"""Are the vectors of an artifact those of the trained model? Text by text, against transformers' hidden
states, pooled here in float64.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt

from llorch_export.adapter.choice import AdapterChoice
from llorch_export.source.open import fingerprint
from llorch_export.verify.divergence import open_source
from llorch_export.verify.reference import Reference
from llorch_export.verify.sample_tokens import token_ids
from llorch_serve.artifact.folder import Artifact, load_artifact
from llorch_serve.artifact.manifest import EmbeddingForm, Precision, Recipe
from llorch_serve.config import SessionConfig
from llorch_serve.errors import UsageError
from llorch_serve.runtime.embedding_session import EmbeddingSession, open_embedder

COSINE_LIMITS: Final[dict[Precision, float]] = {
    "fp32": 0.99999,
    "fp16": 0.9999,
    "bf16": 0.995,
    "int8": 0.99,
    "int4": 0.7,
    "source": 0.99,
}
"""The lowest cosine that any text's vector may have with the reference's, by the coarsest of the weights'
precisions; ``int4`` is what a small model loses.
"""

_LENGTHS: Final = (1, 2, 5, 9, 17, 32, 64, 120, 250, 500)
"""Tokens of the texts, again and again until the sample is used up."""

_BATCH: Final = 8


@dataclass(frozen=True, slots=True)
class EmbeddingVerification:
    """What ``llorch verify --json`` prints of an artifact that embeds texts.

    cosine, lowest_cosine: the mean and the lowest of all texts. largest_error: of a vector, over the length
        of the reference's.
    texts, tokens: how many. text: ``sample`` or ``random``, as for logits.
    same_source: whether the artifact was made from this very source.
    """

    cosine: float
    lowest_cosine: float
    largest_error: float
    texts: int
    tokens: int
    text: str
    oracle: str
    limit: float
    passed: bool
    same_source: bool


def verify_embeddings(
    folder: Path,
    source: str,
    progress: Callable[[str, int, int], None],
    *,
    lora: Sequence[AdapterChoice] = (),
) -> EmbeddingVerification:
    """Compare an artifact's vectors with those of the checkpoint it was made from.

    Raises ArtifactError if either cannot be loaded or their vocabularies differ, UsageError for an artifact
    that gives logits.
    """
    artifact = load_artifact(folder)
    form = require_embedding(artifact)
    checkpoint = open_source(artifact, source, lora)
    ids, kind = token_ids(artifact)
    texts = list(cut(ids, artifact.manifest.context_length))
    session = open_embedder(artifact, SessionConfig(), lambda report: None)
    reference = Reference(checkpoint)
    total = sum(map(len, texts))

    def expected(text: Sequence[int]) -> npt.NDArray[np.float64]:
        progress("comparing texts", len(text), total)
        return pooled_reference(reference, text, form)

    cosines, errors = compared(session, texts, expected)
    limit = cosine_limit(artifact.manifest.recipe)
    return EmbeddingVerification(
        cosine=float(cosines.mean()),
        lowest_cosine=float(cosines.min()),
        largest_error=float(errors.max()),
        texts=len(texts),
        tokens=total,
        text=kind,
        oracle=reference.description,
        limit=limit,
        passed=bool(cosines.min() >= limit),
        same_source=fingerprint(checkpoint) == artifact.manifest.source.fingerprint,
    )


def require_embedding(artifact: Artifact) -> EmbeddingForm:
    """Return how an artifact embeds texts. Raises UsageError if it does not."""
    form = artifact.manifest.embeds
    if form is None:
        raise UsageError(
            f"{artifact.folder} gives logits and embeds no texts; export the checkpoint with --embed last or "
            "--embed mean"
        )
    return form


def cosine_limit(recipe: Recipe) -> float:
    """Return the lowest cosine that an artifact of this recipe may have."""
    return min(COSINE_LIMITS[precision] for precision in recipe.precisions)


def pooled_reference(
    reference: Reference, text: Sequence[int], form: EmbeddingForm
) -> npt.NDArray[np.float64]:
    """Return a text's vector from transformers' hidden states, [hidden_size]."""
    states = reference.hidden_states(list(text)).astype(np.float64)
    vector: npt.NDArray[np.float64] = states[-1] if form.pooling == "last" else states.mean(axis=0)
    return vector / np.linalg.norm(vector) if form.normalised else vector


def compared(
    session: EmbeddingSession,
    texts: Sequence[Sequence[int]],
    expected: Callable[[Sequence[int]], npt.NDArray[np.float64]],
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """Return each text's cosine with the reference, and its error over the reference's length."""
    cosines, errors = np.zeros(len(texts)), np.zeros(len(texts))
    order = sorted(range(len(texts)), key=lambda index: len(texts[index]))  # little of a batch is padding
    for start in range(0, len(order), _BATCH):
        batch = order[start : start + _BATCH]
        vectors = session.embed([texts[index] for index in batch]).astype(np.float64)
        for index, found in zip(batch, vectors, strict=True):
            wanted = expected(texts[index])
            length = float(np.linalg.norm(wanted))
            cosines[index] = float(found @ wanted) / (float(np.linalg.norm(found)) * length)
            errors[index] = float(np.linalg.norm(found - wanted)) / length
    return cosines, errors


def cut(ids: Sequence[int], most: int) -> Iterator[list[int]]:
    """Cut token ids into texts of many lengths, ``most`` tokens at most."""
    start = count = 0
    while start < len(ids):
        length = min(_LENGTHS[count % len(_LENGTHS)], most)
        yield list(ids[start : start + length])
        start, count = start + length, count + 1
