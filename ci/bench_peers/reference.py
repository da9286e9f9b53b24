"""The fp32 reference that every engine of a run is held against: log-probabilities of the sample text."""

from __future__ import annotations

from pathlib import Path

from llorch_export.source.open import fingerprint, open_checkpoint
from llorch_export.verify.reference import Reference
from llorch_export.verify.sample_tokens import token_ids
from llorch_serve.artifact.folder import load_artifact
from llorch_serve.fidelity.reference_file import (
    ReferenceFile,
    ReferenceHeader,
    read_reference,
    text_hash,
    tokenizer_hash,
    write_reference,
)


def reference(gguf: Path, artifact_folder: Path, path: Path, positions: int) -> ReferenceFile:
    """Return the reference at ``path``, written by transformers in fp32 unless it is there.

    artifact_folder: any artifact of the file, for its tokenizer. positions: tokens of the sample text, in one
        context.
    Raises ArtifactError if the checkpoint cannot be loaded, ResourceError if the file cannot be written.
    """
    artifact = load_artifact(artifact_folder)
    ids, kind = token_ids(artifact)
    kept = tuple(ids[:positions])
    checkpoint = open_checkpoint(str(gguf))
    source_print = fingerprint(checkpoint)
    if path.exists():
        found = read_reference(path)
        if (found.header.token_ids, found.header.source_fingerprint) == (kept, source_print):
            return found
    model = Reference(checkpoint)
    header = ReferenceHeader(
        oracle=model.description,
        source_fingerprint=source_print,
        tokenizer_sha256=tokenizer_hash(artifact),
        text=kind,
        text_sha256=text_hash(kept),
        vocab_size=artifact.manifest.model.vocab_size,
        token_ids=kept,
    )
    write_reference(path, header, model.logits(list(kept)))
    return read_reference(path)
