"""A reference's log-probabilities in a file, so that fidelity can be measured where the reference cannot run.

Written by ``llorch verify --write-reference`` with torch at hand; read by ``llorch verify --reference`` and
``llorch bench --reference`` with numpy alone. Layout: a magic line, the header's length as 4 bytes
little-endian, the header as JSON (:class:`ReferenceHeader`), then [positions, vocabulary] float16,
little-endian, to the end of the file. Nothing in it is executed, and its size must be what the header says.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Final, Literal

import msgspec
import numpy as np
import numpy.typing as npt

from llorch_serve.artifact.folder import Artifact
from llorch_serve.artifact.links import open_real
from llorch_serve.artifact.manifest import Count, Sha256, TokenId
from llorch_serve.errors import ArtifactError, ResourceError
from llorch_serve.fidelity.divergence import Logits, log_softmax
from llorch_serve.fidelity.judging import SLOTS, Judge
from llorch_serve.files.durable import write_whole
from llorch_serve.files.json_errors import NOT_JSON
from llorch_serve.runtime.fixed_session import FixedSession
from llorch_serve.runtime.session import DecoderSession

POSITIONS: Final = 256
ROUNDING: Final = 2e-6
"""Nats that float16 may add to a divergence (measured: 4e-7 to 7e-7); a limit is widened by it."""

_MAGIC: Final = b"llorch reference 1\n"
_MAX_HEADER_BYTES: Final = 2**20
_MAX_POSITIONS: Final = 2**16
_CHUNK: Final = 64  # positions; 64 x 128k tokens in float64 are 67 MB


class ReferenceHeader(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the log-probabilities are of.

    token_ids: the text, one position each. text: ``sample`` or ``random``, as ``llorch verify`` says.
    text_sha256: over the ids as little-endian int64. tokenizer_sha256: of tokenizer.json.
    source_fingerprint: of the checkpoint that the reference ran. oracle: the libraries and the precision it
        ran in.
    """

    schema_version: Literal[1] = 1
    oracle: str
    source_fingerprint: str
    tokenizer_sha256: Sha256
    text: str
    text_sha256: Sha256
    vocab_size: Count
    token_ids: Annotated[tuple[TokenId, ...], msgspec.Meta(min_length=1, max_length=_MAX_POSITIONS)]


@dataclass(frozen=True, slots=True)
class ReferenceFile:
    """A checked file: its header, and where the log-probabilities begin."""

    path: Path
    header: ReferenceHeader
    offset: int

    def chunks(self) -> Iterator[tuple[int, npt.NDArray[np.float32]]]:
        """Yield (first position, log-probabilities [positions, vocabulary]), some positions at a time."""
        count, width = len(self.header.token_ids), self.header.vocab_size
        for start in range(0, count, _CHUNK):
            rows = min(_CHUNK, count - start)
            raw = np.fromfile(self.path, "<f2", count=rows * width, offset=self.offset + 2 * start * width)
            if raw.size != rows * width:
                raise ArtifactError(
                    f"{self.path} became shorter while it was read; write the reference again"
                )
            yield start, raw.reshape(rows, width).astype(np.float32)


@dataclass(frozen=True, slots=True)
class Fidelity:
    """Divergence of an artifact from a reference file, in the terms of
    :class:`llorch_serve.fidelity.divergence.Divergence`.

    max_abs: largest difference of two log-probabilities. limit: the recipe's, widened by what float16 costs.
    kl, top1, max_abs are those of the graph that diverges most; prefill_kl, decode_kl: see
    :class:`llorch_serve.fidelity.judging.Verdict`.
    """

    kl: float
    top1: float
    max_abs: float
    tokens: int
    text: str
    oracle: str
    limit: float
    passed: bool
    same_source: bool
    prefill_kl: float | None
    decode_kl: float | None


def text_hash(token_ids: tuple[int, ...]) -> str:
    """Return the SHA-256 of token ids."""
    return hashlib.sha256(np.array(token_ids, "<i8").tobytes()).hexdigest()


def tokenizer_hash(artifact: Artifact) -> str:
    """Return the SHA-256 of the artifact's tokenizer.json, as its manifest lists it."""
    name = artifact.manifest.tokenizer
    return next(entry.sha256 for entry in artifact.manifest.files if entry.path == name)


def write_reference(path: Path, header: ReferenceHeader, logits: Logits) -> None:
    """Write a reference: ``logits`` [positions, vocabulary] become log-probabilities in float16.

    Raises ResourceError if the file cannot be written; then none is left half-written.
    """
    assert logits.shape == (len(header.token_ids), header.vocab_size)
    encoded = msgspec.json.encode(header)
    values = np.maximum(log_softmax(logits), np.finfo(np.float16).min).astype("<f2")
    try:
        write_whole(path, _MAGIC + len(encoded).to_bytes(4, "little") + encoded, values.data)
    except OSError as error:
        raise ResourceError(f"{path} cannot be written ({error.strerror}); name another file") from error


def read_reference(path: Path) -> ReferenceFile:
    """Read and check the header. Raises ArtifactError for anything but a whole reference file."""
    try:
        with open_real(path.resolve()) as file:
            size = os.fstat(file.fileno()).st_size
            magic = file.read(len(_MAGIC))
            length = int.from_bytes(file.read(4), "little")
            encoded = file.read(length) if magic == _MAGIC and length <= _MAX_HEADER_BYTES else b""
    except OSError as error:
        raise ArtifactError(
            f"{path} cannot be read ({error.strerror}); expected a file made by llorch verify "
            f"--write-reference"
        ) from error
    if magic != _MAGIC or len(encoded) != length or length == 0:
        raise ArtifactError(f"{path} is not a reference; make one with: llorch verify --write-reference FILE")
    try:
        header = msgspec.json.decode(encoded, type=ReferenceHeader)
    except NOT_JSON as error:
        raise ArtifactError(f"{path} has a bad header: {error}; write the reference again") from error
    offset = len(_MAGIC) + 4 + length
    expected = offset + 2 * len(header.token_ids) * header.vocab_size
    if size != expected:
        raise ArtifactError(
            f"{path} has {size} bytes where its header says {expected}; it is damaged, write the reference "
            f"again"
        )
    if max(header.token_ids) >= header.vocab_size or text_hash(header.token_ids) != header.text_sha256:
        raise ArtifactError(f"{path} does not hold the text its header names; write the reference again")
    return ReferenceFile(path, header, offset)


def check_reference(reference: ReferenceFile, artifact: Artifact) -> None:
    """Raise ArtifactError if the artifact is no model of the reference's tokens, or too short for its
    text.
    """
    header, manifest = reference.header, artifact.manifest
    if header.tokenizer_sha256 != tokenizer_hash(artifact) or header.vocab_size != manifest.model.vocab_size:
        raise ArtifactError(
            f"{reference.path} was written with another tokenizer than {artifact.folder} has; "
            "write a reference from the checkpoint that the artifact was made from"
        )
    if len(header.token_ids) > manifest.context_length:
        raise ArtifactError(
            f"{reference.path} has {len(header.token_ids)} positions and {artifact.folder} takes "
            f"{manifest.context_length}; write a reference from this artifact"
        )


def divergence(session: DecoderSession | FixedSession, reference: ReferenceFile) -> Fidelity:
    """Run the reference's text through an artifact and compare.

    Raises ArtifactError as :func:`check_reference` does, or if the file is damaged, ResourceError if the KV
    cache may not grow to the text in each of :data:`llorch_serve.fidelity.judging.SLOTS` slots.
    """
    artifact, header = session.artifact, reference.header
    check_reference(reference, artifact)
    if session.capabilities.separate_prompts:
        needed, budget = SLOTS * len(header.token_ids), session.capacity.budget
        if budget < needed:
            raise ResourceError(
                f"the KV cache may grow to {budget} tokens, and comparing both graphs with {reference.path} "
                f"takes {needed}; allow more by --kv-cache-memory, or compare with a shorter text"
            )
    judge = Judge(
        session,
        artifact.manifest,
        of=lambda found: log_softmax(found).astype(np.float32),
        rounding=ROUNDING,
    )
    for start, expected in reference.chunks():
        if not np.isfinite(expected).all():
            raise ArtifactError(
                f"{reference.path} holds values that are not finite; write the reference again"
            )
        tokens = header.token_ids[start : start + len(expected)]
        judge.add(tokens, start, expected)
    verdict = judge.result()
    figures = verdict.worst
    return Fidelity(
        kl=figures.kl,
        top1=figures.top1,
        max_abs=figures.max_abs,
        tokens=figures.tokens,
        text=header.text,
        oracle=header.oracle,
        limit=verdict.limit,
        passed=verdict.passed,
        same_source=header.source_fingerprint == artifact.manifest.source.fingerprint,
        prefill_kl=verdict.prefill_kl,
        decode_kl=verdict.decode_kl,
    )
