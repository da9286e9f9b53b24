"""Is the artifact the trained model? Its logits against the reference's, position by position."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np

from llorch_export.checkpoint.lora import with_adapter
from llorch_export.checkpoint.source import fingerprint, open_checkpoint
from llorch_export.reference import Reference
from llorch_serve.artifact import Artifact, load_artifact
from llorch_serve.bench.workload import sample_text
from llorch_serve.config import SessionConfig
from llorch_serve.errors import ArtifactError
from llorch_serve.fidelity import DivergenceSum
from llorch_serve.session import open_session
from llorch_serve.text import Tokenizer

WINDOW: Final = 2048
"""Most tokens that one context holds; a shorter artifact context shortens it."""

_CHUNK: Final = 256
_RANDOM_TOKENS: Final = 512
_MAX_UNKNOWN: Final = 0.1


@dataclass(frozen=True, slots=True)
class Verification:
    """What ``llorch verify --json`` prints; see :class:`llorch_serve.fidelity.Divergence` for the figures.

    text: ``sample`` (the English text that comes with llorch) or ``random`` (seeded ids, for a tokenizer that does
        not know the text).
    same_source: whether the artifact was made from this very source.
    """

    kl: float
    top1: float
    max_abs: float
    tokens: int
    window: int
    text: str
    oracle: str
    limit: float
    passed: bool
    same_source: bool


def verify(
    folder: Path, source: str, progress: Callable[[str, int, int], None], *, lora: Path | None = None
) -> Verification:
    """Compare an artifact with the checkpoint it was made from, merged with the adapter in ``lora`` if it was.

    Raises ArtifactError if either cannot be loaded or their vocabularies differ.
    """
    artifact = load_artifact(folder)
    checkpoint = open_checkpoint(source)
    if lora is not None:
        checkpoint = with_adapter(checkpoint, lora)
    vocabularies = artifact.manifest.model.vocab_size, checkpoint.config.vocab_size
    if vocabularies[0] != vocabularies[1]:
        raise ArtifactError(
            f"{folder} has a vocabulary of {vocabularies[0]} tokens and {source} one of {vocabularies[1]}; "
            "verify against the checkpoint that the artifact was made from"
        )
    ids, kind = _token_ids(artifact)
    window = min(WINDOW, artifact.manifest.context_length)
    session = open_session(artifact, SessionConfig(slots=1, max_context=window), lambda report: None)
    reference = Reference(checkpoint)
    total = DivergenceSum()
    for piece in _windows(ids, window):
        expected = reference.logits(piece)
        for start in range(0, len(piece), _CHUNK):
            chunk = piece[start : start + _CHUNK]
            found = session.prefill(0, chunk, start, range(len(chunk)))
            total.add(expected[start : start + len(chunk)], found)
            progress("comparing tokens", len(chunk), len(ids))
    figures = total.result()
    limit = artifact.manifest.recipe.kl_limit
    return Verification(
        kl=figures.kl,
        top1=figures.top1,
        max_abs=figures.max_abs,
        tokens=figures.tokens,
        window=window,
        text=kind,
        oracle=reference.description,
        limit=limit,
        passed=figures.kl <= limit,
        same_source=fingerprint(checkpoint) == artifact.manifest.source.fingerprint,
    )


def _token_ids(artifact: Artifact) -> tuple[list[int], str]:
    """Return the ids to compare on, and whether they are ``sample`` text or ``random``."""
    tokenizer = Tokenizer.load(artifact.tokenizer_path)
    vocabulary = artifact.manifest.model.vocab_size
    ids = tokenizer.encode(sample_text(), add_special_tokens=False)
    unknown = sum(id_ >= vocabulary or id_ == tokenizer.unknown_id for id_ in ids)
    if ids and unknown <= _MAX_UNKNOWN * len(ids):
        return [id_ for id_ in ids if id_ < vocabulary], "sample"
    return np.random.default_rng(0).integers(0, vocabulary, _RANDOM_TOKENS).tolist(), "random"


def _windows(ids: list[int], window: int) -> Iterator[list[int]]:
    for start in range(0, len(ids), window):
        yield ids[start : start + window]
