"""``verify`` knows every family: its reference is right by itself, and it accepts what was exported from the
file.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from llorch_export.config.families import FAMILIES
from llorch_export.source.open import open_checkpoint
from llorch_export.verify.divergence import verify
from llorch_export.verify.reference import Reference
from llorch_serve.bench.workload import sample_text
from support.builders.arch_rows import GGUF, HF, usual_first
from support.builders.arch_rows_experts import EXPERTS
from support.builders.checkpoints import write_gguf, write_hf_folder
from support.builders.tiny_exports import export_tiny, random_ids, silent
from tolerances import FP32_LOGITS

READ_HERE = [name for name, row in FAMILIES.items() if not row.gguf_in_transformers]
pytestmark = pytest.mark.reference


@pytest.mark.parametrize(
    "name", usual_first((name for name in GGUF if "betas" not in name), only=("gemma3", "phi", *EXPERTS))
)
def test_the_reference_of_a_gguf_file_is_that_of_the_folder(tmp_path: Path, name: str) -> None:
    ids = random_ids(128)
    file = Reference(open_checkpoint(str(write_gguf(tmp_path / "m.gguf", HF[name]))))
    folder = Reference(open_checkpoint(str(write_hf_folder(tmp_path / "model", HF[name]))))
    np.testing.assert_allclose(file.logits(ids), folder.logits(ids), atol=FP32_LOGITS, rtol=0)
    read_here = HF[name].get("model_type") in READ_HERE
    assert file.description.endswith("on tensors as llorch reads them") is read_here


@pytest.mark.parametrize("precision", ["fp32", "int8"])
@pytest.mark.parametrize(
    "name",
    [
        "mistral, window",
        "qwen3, heads of 24",
        "smollm3",
        "granite",
        "phi3, longrope, partial",
        "gemma2",
        "qwen2_moe",
    ],
)
def test_verify_accepts_an_export_of_every_family(
    tmp_path: Path, name: str, precision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("llorch_export.verify.sample_tokens.sample_text", lambda: sample_text()[:800])
    source = write_hf_folder(tmp_path / "model", HF[name])
    export_tiny(source, tmp_path / "out", precision=precision)
    assert verify(tmp_path / "out", str(source), silent).passed
