"""Reference files for tests: an artifact's own logits in place of the reference's, so that nothing needs
torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from llorch_serve.artifact.folder import Artifact
from llorch_serve.fidelity.reference_file import ReferenceHeader, text_hash, tokenizer_hash, write_reference
from support.builders.tiny_exports import Logits, all_logits


def header_for(artifact: Artifact, token_ids: Sequence[int]) -> ReferenceHeader:
    """Return a header that fits an artifact."""
    return ReferenceHeader(
        oracle="the artifact itself",
        source_fingerprint=artifact.manifest.source.fingerprint,
        tokenizer_sha256=tokenizer_hash(artifact),
        text="random",
        text_sha256=text_hash(tuple(token_ids)),
        vocab_size=artifact.manifest.model.vocab_size,
        token_ids=tuple(token_ids),
    )


def own_reference(path: Path, artifact: Artifact, token_ids: Sequence[int], *, noise: float = 0.0) -> Logits:
    """Write what an artifact says of a text, with normal noise on every logit; return the exact logits."""
    logits = all_logits(artifact, token_ids)
    noisy = logits + np.float32(noise) * np.random.default_rng(0).standard_normal(logits.shape).astype(
        np.float32
    )
    write_reference(path, header_for(artifact, token_ids), noisy)
    return logits
