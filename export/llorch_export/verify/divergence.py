"""Is the artifact the trained model? Its logits against the reference's, position by position."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from llorch_export.adapter.apply import with_adapters
from llorch_export.adapter.choice import AdapterChoice
from llorch_export.checkpoint.base import Checkpoint
from llorch_export.source.open import fingerprint, open_checkpoint
from llorch_export.verify.reference import Reference
from llorch_export.verify.sample_tokens import token_ids
from llorch_serve.artifact.folder import Artifact, load_artifact
from llorch_serve.artifact.kinds import ModelKind
from llorch_serve.config import SessionConfig
from llorch_serve.errors import ArtifactError
from llorch_serve.fidelity.divergence import Logits
from llorch_serve.fidelity.judging import SLOTS, Judge
from llorch_serve.fidelity.reference_file import (
    POSITIONS,
    ReferenceHeader,
    text_hash,
    tokenizer_hash,
    write_reference,
)
from llorch_serve.loading.models import open_model

WINDOW: Final = 2048
"""Most tokens that one context holds; a shorter artifact context shortens it."""

_CHUNK: Final = 256
_WHOLE_WINDOW: Final = 512
"""The same for a graph that takes each window in one call, with the logits and attention scores of all of
it.
"""


@dataclass(frozen=True, slots=True)
class Verification:
    """What ``llorch verify --json`` prints; see :class:`llorch_serve.fidelity.divergence.Divergence` for the
    figures.

    text: ``sample`` (the English text that comes with llorch) or ``random`` (seeded ids, for a tokenizer that
        does not know the text).
    same_source: whether the artifact was made from this very source.
    prefill_kl, decode_kl: see :class:`llorch_serve.fidelity.judging.Verdict`; the figures above are of the
        graph that diverges most.
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
    prefill_kl: float | None
    decode_kl: float | None


def verify(
    folder: Path,
    source: str,
    progress: Callable[[str, int, int], None],
    *,
    lora: Sequence[AdapterChoice] = (),
    keep: Path | None = None,
) -> Verification:
    """Compare an artifact with the checkpoint it was made from, merged with the adapters in ``lora``.

    keep: a file for the reference's log-probabilities at the first positions, see
        :mod:`llorch_serve.fidelity.reference_file`.
    Raises ArtifactError if either cannot be loaded or their vocabularies differ, ResourceError if ``keep``
    cannot be written.
    """
    artifact = load_artifact(folder)
    checkpoint = open_source(artifact, source, lora)
    ids, kind = token_ids(artifact)
    chunked = artifact.kind is ModelKind.LLORCH
    window = min(WINDOW if chunked else _WHOLE_WINDOW, artifact.manifest.context_length)
    chunk_size = _CHUNK if chunked else window
    session = open_model(artifact, SessionConfig(slots=SLOTS, max_context=window), lambda report: None)
    reference = Reference(checkpoint)
    source_print = fingerprint(checkpoint)
    judge = Judge(session, artifact.manifest)
    for piece in _windows(ids, window):
        expected = reference.logits(piece)
        if keep is not None:
            _keep(keep, artifact, expected, piece, kind, reference.description, source_print)
            keep = None
        for start in range(0, len(piece), chunk_size):
            chunk = piece[start : start + chunk_size]
            judge.add(chunk, start, expected[start : start + len(chunk)])
            progress("comparing tokens", len(chunk), len(ids))
    verdict = judge.result()
    figures = verdict.worst
    return Verification(
        kl=figures.kl,
        top1=figures.top1,
        max_abs=figures.max_abs,
        tokens=figures.tokens,
        window=window,
        text=kind,
        oracle=reference.description,
        limit=verdict.limit,
        passed=verdict.passed,
        same_source=source_print == artifact.manifest.source.fingerprint,
        prefill_kl=verdict.prefill_kl,
        decode_kl=verdict.decode_kl,
    )


def _keep(
    path: Path,
    artifact: Artifact,
    logits: Logits,
    token_ids: list[int],
    text: str,
    oracle: str,
    source_print: str,
) -> None:
    kept = tuple(token_ids[:POSITIONS])
    header = ReferenceHeader(
        oracle=oracle,
        source_fingerprint=source_print,
        tokenizer_sha256=tokenizer_hash(artifact),
        text=text,
        text_sha256=text_hash(kept),
        vocab_size=artifact.manifest.model.vocab_size,
        token_ids=kept,
    )
    write_reference(path, header, logits[: len(kept)])


def open_source(artifact: Artifact, source: str, lora: Sequence[AdapterChoice]) -> Checkpoint:
    """Open the checkpoint that an artifact is held against, with the adapters in ``lora`` merged.

    Raises ArtifactError if it cannot be loaded, or if the two cannot be one model.
    """
    form = artifact.manifest.embeds
    checkpoint = with_adapters(open_checkpoint(source, "none" if form is None else form.pooling), lora)
    vocabularies = artifact.manifest.model.vocab_size, checkpoint.config.vocab_size
    if vocabularies[0] != vocabularies[1]:
        raise ArtifactError(
            f"{artifact.folder} has a vocabulary of {vocabularies[0]} tokens and {source} one of "
            f"{vocabularies[1]}; "
            "verify against the checkpoint that the artifact was made from"
        )
    return checkpoint


def _windows(ids: list[int], window: int) -> Iterator[list[int]]:
    for start in range(0, len(ids), window):
        yield ids[start : start + window]
