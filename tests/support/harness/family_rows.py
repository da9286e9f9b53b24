"""A configuration that is exported and held against transformers: logits, steps and layers."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import numpy as np

from llorch_export.verify.layers.verify import verify_layers
from support.builders.checkpoints import write_hf_folder
from support.builders.tiny_exports import export_tiny, open_tiny, random_ids, silent
from support.oracles.stepwise import check_steps, reference
from tolerances import FP32_LOGITS, STEPWISE_LOGITS

TOKENS: Final = 80


def largest_difference(row: dict[str, Any], place: Path, *, layers: bool) -> float:
    """Return the largest difference of the logits of ``TOKENS`` tokens.

    layers: hold each layer against the reference too. Raises AssertionError for what departs.
    """
    source = write_hf_folder(place / "model", row)
    artifact = export_tiny(source, place / "out")
    ids = random_ids(TOKENS, vocabulary=int(row.get("vocab_size") or 512))
    session = open_tiny(artifact)
    full = session.prefill(1, ids, 0, range(TOKENS)).copy()
    difference = float(np.abs(full - reference(source, ids)).max())
    assert difference <= FP32_LOGITS, (difference, row)
    check_steps(session, ids, full, STEPWISE_LOGITS)
    if layers:
        found = verify_layers(artifact.folder, str(source), silent)
        assert found.passed, (found.first_departing, row)
    return difference
