"""The lowest onnxruntime that an artifact names gathers its table of embeddings as ours does.

Releases before 1.27 look the zero points of 4-bit rows up in the wrong place where a row has an odd number of
blocks: each row's zero points begin at a byte of their own, which they leave out of account.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from llorch_export.options import ExportOptions
from llorch_export.pipeline import export
from support.builders.checkpoints import write_hf_folder
from support.builders.tiny_exports import silent

ODD: dict[str, Any] = {"hidden_size": 96, "num_hidden_layers": 1, "tie_word_embeddings": True}
EVEN = ODD | {"hidden_size": 128}
INT4 = {"precision": "int8", "head_precision": "int4", "block_size": 32, "kv_dtype": "float32"}


@pytest.mark.parametrize(
    ("shape", "options", "lowest"),
    [
        (ODD, INT4 | {"quantizer": "affine"}, "1.27"),
        (ODD, INT4 | {"quantizer": "nearest"}, "1.24"),  # without zero points
        (EVEN, INT4 | {"quantizer": "affine"}, "1.24"),
        (ODD, INT4 | {"head_precision": "int8"}, "1.24"),
    ],
)
def test_a_table_that_older_releases_gather_wrongly_asks_for_a_newer_one(
    tmp_path: Path, shape: dict[str, Any], options: dict[str, Any], lowest: str
) -> None:
    source = write_hf_folder(tmp_path / "m", shape)
    found = export(ExportOptions(str(source), tmp_path / "a", **options), silent)
    assert found.artifact.manifest.min_onnxruntime == lowest
    assert not any("onnxruntime" in notice for notice in found.notices)


@pytest.mark.parametrize(
    ("options", "way_out"),
    [(INT4 | {"quantizer": "affine"}, "--head-precision int8")],
)
def test_a_target_whose_wheels_are_older_says_so(
    tmp_path: Path, options: dict[str, Any], way_out: str
) -> None:
    source = write_hf_folder(tmp_path / "m", ODD)
    found = export(ExportOptions(str(source), tmp_path / "a", target="openvino", **options), silent)
    assert found.artifact.manifest.min_onnxruntime == "1.27"
    (notice,) = [notice for notice in found.notices if "onnxruntime" in notice]
    assert "needs onnxruntime 1.27" in notice
    assert "1.24" in notice
    assert way_out in notice
