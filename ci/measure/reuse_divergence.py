"""How much it matters that a reused prefix was decoded and not prefilled.

``ci/measurement reuse_divergence REFERENCE ARTIFACT...`` runs the sample text twice: positions 256 to 767
prefilled, and decoded one by one, as a conversation leaves them in the cache. Over the 512 positions that
follow it prints the divergence of the second run from the first, and of both from REFERENCE, an fp32 artifact
of the same model.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import numpy.typing as npt

from llorch_serve.artifact.folder import Artifact, load_artifact
from llorch_serve.bench.workload import sample_text
from llorch_serve.config import SessionConfig
from llorch_serve.fidelity.divergence import Divergence, DivergenceSum
from llorch_serve.runtime.opening import open_session
from llorch_serve.text.tokenizer import Tokenizer

CHUNK, FIRST, LAST, END = 256, 256, 768, 1280


def reuse_divergence(artifact: Artifact) -> Divergence:
    """Return the divergence of logits after a decoded prefix from those after a prefilled one."""
    return _divergence(*(_logits(artifact, decoded=decoded) for decoded in (False, True)))


def _divergence(expected: npt.NDArray[np.float32], found: npt.NDArray[np.float32]) -> Divergence:
    total = DivergenceSum()
    total.add(expected, found)
    return total.result()


def _logits(artifact: Artifact, *, decoded: bool) -> npt.NDArray[np.float32]:
    session = open_session(artifact, SessionConfig(slots=1, max_context=END), lambda _report: None)
    ids = Tokenizer.load(artifact.tokenizer_path).encode(sample_text(), add_special_tokens=True)[:END]
    session.prefill(0, ids[:FIRST], 0)
    if decoded:
        for position in range(FIRST, LAST):
            session.decode([ids[position]], [position + 1])
    else:
        for start in range(FIRST, LAST, CHUNK):
            session.prefill(0, ids[start : start + CHUNK], start)
    rows = [
        session.prefill(0, ids[start : start + CHUNK], start, range(CHUNK)).copy()
        for start in range(LAST, END, CHUNK)
    ]
    return np.concatenate(rows)


if __name__ == "__main__":
    reference = _logits(load_artifact(Path(sys.argv[1])), decoded=False)
    for folder in sys.argv[2:]:
        cold, warm = (_logits(load_artifact(Path(folder)), decoded=decoded) for decoded in (False, True))
        pairs = ((cold, warm), (reference, cold), (reference, warm))
        print(folder, *(f"{_divergence(*pair).kl:.2g}" for pair in pairs))  # noqa: T201 - a script's output
