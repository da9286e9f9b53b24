"""Every family and rotary scaling, as a folder and as a GGUF file, computes what transformers computes in fp32."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from arch_rows import GGUF, HF
from checkpoints import write_gguf, write_hf_folder
from llorch_serve.session import DecoderSession
from tiny_exports import export_tiny, open_tiny, random_ids
from tolerances import FP32_LOGITS, STEPWISE_LOGITS

TOKENS = 128


def reference(folder: Path, ids: list[int], **place: Any) -> npt.NDArray[np.float32]:
    """Return transformers' logits of every position."""
    import torch
    import transformers

    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, local_files_only=True, attn_implementation="eager", **place
    )
    with torch.inference_mode():
        logits: npt.NDArray[np.float32] = model.eval()(torch.tensor([ids]), use_cache=False).logits[0].numpy()
    return logits


def stepwise(session: DecoderSession, ids: list[int]) -> npt.NDArray[np.float32]:
    """Return logits of every position: a prefill of 20, a chunk of 30, then one token at a time."""
    parts = [
        session.prefill(0, ids[:20], 0, range(20)).copy(),
        session.prefill(0, ids[20:50], 20, range(30)).copy(),
    ]
    parts += [session.decode([ids[p]], [p + 1]).copy() for p in range(50, len(ids))]
    return np.concatenate(parts)


@pytest.mark.reference
@pytest.mark.parametrize("name", HF)
def test_a_folder_computes_what_transformers_computes(tmp_path: Path, name: str) -> None:
    folder = write_hf_folder(tmp_path / "model", HF[name])
    session = open_tiny(export_tiny(folder, tmp_path / "artifact"))
    ids = random_ids(TOKENS)
    full = session.prefill(1, ids, 0, range(TOKENS)).copy()
    np.testing.assert_allclose(full, reference(folder, ids), atol=FP32_LOGITS, rtol=0)
    np.testing.assert_allclose(stepwise(session, ids), full, atol=STEPWISE_LOGITS, rtol=0)


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
    np.testing.assert_allclose(stepwise(session, ids), expected, atol=FP32_LOGITS, rtol=0)
