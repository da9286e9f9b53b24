"""Every family and rotary scaling, as a folder and as a GGUF file, computes what transformers computes in fp32."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from arch_rows import GGUF, HF
from checkpoints import write_gguf, write_hf_folder
from llorch_serve.session import DecoderSession
from tiny_exports import Logits, export_tiny, open_tiny, random_ids
from tolerances import FP32_LOGITS, STEPWISE_LOGITS

TOKENS = 128


def reference(folder: Path, ids: list[int], **place: Any) -> Logits:
    """Return transformers' logits of every position."""
    import torch
    import transformers

    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, local_files_only=True, attn_implementation="eager", **place
    )
    with torch.inference_mode():
        logits: Logits = model.eval()(torch.tensor([ids]), use_cache=False).logits[0].numpy()
    return logits


def stepwise(session: DecoderSession, ids: list[int]) -> tuple[Logits, Logits]:
    """Return the logits of every position of two slots: a prefill, a chunk, then token by token, the two together.

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


@pytest.mark.reference
@pytest.mark.parametrize("name", HF)
def test_a_folder_computes_what_transformers_computes(tmp_path: Path, name: str) -> None:
    folder = write_hf_folder(tmp_path / "model", HF[name])
    session = open_tiny(export_tiny(folder, tmp_path / "artifact"))
    ids = random_ids(TOKENS)
    full = session.prefill(1, ids, 0, range(TOKENS)).copy()
    np.testing.assert_allclose(full, reference(folder, ids), atol=FP32_LOGITS, rtol=0)
    check_steps(session, ids, full, STEPWISE_LOGITS)


@pytest.mark.reference
@pytest.mark.parametrize("name", GGUF)
def test_a_gguf_file_computes_what_transformers_computes(tmp_path: Path, name: str) -> None:
    """The folder is only there for transformers; the file holds the same weights in llama.cpp's names and order."""
    metadata = {"llama.rope.scaling.yarn_beta_fast": 6.0, "llama.rope.scaling.yarn_beta_slow": 0.5}
    source = write_gguf(tmp_path / "m.gguf", HF[name], metadata=metadata if "betas" in name else None)
    ids = random_ids(TOKENS)
    expected = reference(write_hf_folder(tmp_path / "model", HF[name]), ids)
    session = open_tiny(export_tiny(source, tmp_path / "artifact"))
    np.testing.assert_allclose(session.prefill(1, ids, 0, range(TOKENS)), expected, atol=FP32_LOGITS, rtol=0)
    check_steps(session, ids, expected, FP32_LOGITS)
