"""What candidates are compared with: the log-probabilities of the model in fp32, in a reference file.

By transformers where it is installed and can run the checkpoint, which reads the weights by itself. Else by
llorch's own graph in fp32, which shows what recipes cost, but not a fault that all of llorch's graphs share.
"""

from __future__ import annotations

import importlib.util
import tempfile
from pathlib import Path
from typing import Final

import numpy as np
import psutil

from llorch_export.checkpoint.base import Checkpoint
from llorch_export.checkpoint.names import parameters
from llorch_export.options import ExportOptions
from llorch_export.pipeline import export
from llorch_export.recipes.file import load_recipe
from llorch_export.source.open import fingerprint
from llorch_export.verify.sample_tokens import token_ids
from llorch_serve.artifact.folder import Artifact
from llorch_serve.config import SessionConfig
from llorch_serve.errors import ArtifactError, ResourceError
from llorch_serve.fidelity.divergence import Logits
from llorch_serve.fidelity.reference_file import (
    ReferenceHeader,
    text_hash,
    tokenizer_hash,
    write_reference,
)
from llorch_serve.providers.runtime import version_of
from llorch_serve.runtime.opening import open_session

MOST_POSITIONS: Final = 1024
_MOST_VALUES: Final = 2**26
"""Log-probabilities in all; they are made in float64, so these take half a gigabyte."""

_CHUNK: Final = 256


def has_transformers() -> bool:
    """Tell whether torch and transformers are installed."""
    return all(importlib.util.find_spec(name) is not None for name in ("torch", "transformers"))


def require_memory(checkpoint: Checkpoint) -> None:
    """Raise ResourceError if memory has no room for the model in fp32."""
    needed, free = 4 * parameters(checkpoint.config), psutil.virtual_memory().available
    if needed > free:
        gib = f"{needed / 2**30:.1f} GiB, and {free / 2**30:.1f} GiB of memory are free"
        raise ResourceError(
            f"the reference is the model in fp32, which takes {gib}; make one where there is more, with "
            "llorch verify --write-reference FILE, and give it with --reference FILE"
        )


def make_reference(path: Path, artifact: Artifact, checkpoint: Checkpoint) -> str | None:
    """Write the reference of a checkpoint to ``path``; return why it is not by transformers, if it is not.

    artifact: any of the checkpoint's, whose tokenizer says what is compared on.
    Raises ArtifactError or ResourceError if there can be none.
    """
    manifest = artifact.manifest
    ids, kind = token_ids(artifact)
    most = min(MOST_POSITIONS, _MOST_VALUES // manifest.model.vocab_size, manifest.context_length)
    ids = ids[: max(1, most)]
    logits, oracle, why = _logits(checkpoint, ids)
    header = ReferenceHeader(
        oracle=oracle,
        source_fingerprint=fingerprint(checkpoint),
        tokenizer_sha256=tokenizer_hash(artifact),
        text=kind,
        text_sha256=text_hash(tuple(ids)),
        vocab_size=manifest.model.vocab_size,
        token_ids=tuple(ids),
    )
    write_reference(path, header, logits)
    return why


def _logits(checkpoint: Checkpoint, ids: list[int]) -> tuple[Logits, str, str | None]:
    """Return logits [positions, vocabulary], by whom, and why not by transformers if not."""
    if has_transformers():
        from llorch_export.verify.reference import Reference

        try:
            reference = Reference(checkpoint)
            return reference.logits(ids), reference.description, None
        except ArtifactError as error:
            why = str(error)
    else:
        why = "torch and transformers are not installed (pip install 'llorch[reference]')"
    return _own_logits(checkpoint, ids), f"llorch's own graph in fp32, onnxruntime {_runtime()}", why


def _own_logits(checkpoint: Checkpoint, ids: list[int]) -> Logits:
    with tempfile.TemporaryDirectory(prefix="llorch-tune-") as folder:
        base = ExportOptions(source=str(checkpoint.path), output=Path(folder) / "fp32", embed="none")
        artifact = export(load_recipe("fp32").options(base), lambda phase, done, total: None).artifact
        config = SessionConfig(slots=1, max_context=max(2, len(ids)))
        session = open_session(artifact, config, lambda report: None)
        logits = np.empty((len(ids), artifact.manifest.model.vocab_size), np.float32)
        for start in range(0, len(ids), _CHUNK):
            piece = ids[start : start + _CHUNK]
            logits[start : start + len(piece)] = session.prefill(0, piece, start, range(len(piece)))
    return logits


def _runtime() -> str:
    return version_of("onnxruntime") or "of unknown version"
