"""Transforms leave the model as it was: fp32 logits of a transformed artifact against transformers on the
checkpoint.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llorch_export.recipes.exact_transforms import why_inexact
from llorch_export.source.open import open_checkpoint
from llorch_export.verify.reference import Reference
from support.builders.arch_rows import usual_first
from support.builders.arch_rows_experts import EXPERTS
from support.builders.checkpoints import tiny_llama_config, write_gguf, write_hf_folder
from support.builders.tiny_exports import all_logits, export_tiny, random_ids
from support.builders.transform_rows import ALL, EACH, MEASURED, TEXT, TOGETHER, uneven
from tolerances import FP32_LOGITS

pytestmark = pytest.mark.reference


def check(tmp_path: Path, overrides: dict[str, Any], transforms: tuple[str, ...]) -> None:
    source = write_hf_folder(tmp_path / "model", overrides, edit=uneven)
    (tmp_path / "text.txt").write_text(TEXT)
    calibration = tmp_path / "text.txt" if set(transforms) & set(MEASURED) else None
    artifact = export_tiny(source, tmp_path / "out", transforms=transforms, calibration=calibration)
    ids = random_ids(60)
    expected = Reference(open_checkpoint(str(source))).logits(ids)
    np.testing.assert_allclose(all_logits(artifact, ids), expected, atol=FP32_LOGITS, rtol=0)
    plain = export_tiny(source, tmp_path / "plain")
    assert (tmp_path / "plain" / "model.onnx.data").read_bytes() != (
        artifact.folder / "model.onnx.data"
    ).read_bytes(), "the transform must have done something"
    assert plain.manifest.fingerprint != artifact.manifest.fingerprint


@pytest.mark.parametrize("name", EACH)
@pytest.mark.parametrize("transform", ALL)
def test_each_transform_alone_is_exact(tmp_path: Path, name: str, transform: str) -> None:
    check(tmp_path, EACH[name], (transform,))


@pytest.mark.parametrize("name", usual_first(TOGETHER, only=("olmo2", "phi", *EXPERTS)))
def test_all_transforms_together_are_exact(tmp_path: Path, name: str) -> None:
    """All that the family takes: the others are refused."""
    config = tiny_llama_config(**TOGETHER[name])
    check(tmp_path, TOGETHER[name], tuple(each for each in ALL if why_inexact(each, config) is None))


def test_a_gguf_file_is_transformed_to_the_same_model(tmp_path: Path) -> None:
    source = write_gguf(tmp_path / "m.gguf", edit=uneven)
    (tmp_path / "text.txt").write_text(TEXT)
    artifact = export_tiny(source, tmp_path / "out", transforms=ALL, calibration=tmp_path / "text.txt")
    ids = random_ids(60)
    expected = Reference(open_checkpoint(str(source))).logits(ids)
    np.testing.assert_allclose(all_logits(artifact, ids), expected, atol=FP32_LOGITS, rtol=0)
