"""Logits of every position: transformers' own, and a session's by prefill, chunk and steps of two slots."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from llorch_serve.runtime.session import DecoderSession
from support.builders.tiny_exports import Logits
from support.oracles.minicpm import as_llama, is_minicpm


def reference(folder: Path, ids: list[int], **place: Any) -> Logits:
    """Return transformers' logits of every position."""
    import torch
    import transformers

    folder = as_llama(folder) if is_minicpm(folder) else folder
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, local_files_only=True, attn_implementation="eager", **place
    )
    with torch.inference_mode():
        logits: Logits = model.eval()(torch.tensor([ids]), use_cache=False).logits[0].numpy()
    return logits


def stepwise(session: DecoderSession, ids: list[int]) -> tuple[Logits, Logits]:
    """Return the logits of every position of two slots: a prefill, a chunk, then token by token, the two
    together.

    Slot 1 is five tokens behind slot 0 throughout, so each row of a step has a position of its own.
    """
    rows: tuple[list[Logits], list[Logits]] = ([], [])
    for slot in (0, 1):
        for start, stop in ((0, 20), (20, 50 - 5 * slot)):
            rows[slot].append(session.prefill(slot, ids[start:stop], start, range(stop - start)).copy())
    for position in range(50, len(ids)):
        found = session.decode([ids[position], ids[position - 5]], [position + 1, position - 4])
        for slot in (0, 1):
            rows[slot].append(found[slot : slot + 1].copy())
    return np.concatenate(rows[0]), np.concatenate(rows[1])


def check_steps(session: DecoderSession, ids: list[int], expected: Logits, tolerance: float) -> None:
    for found in stepwise(session, ids):
        np.testing.assert_allclose(found, expected[: len(found)], atol=tolerance, rtol=0)
