"""Rows of a tensor, read apart, are the rows of the whole: for every storage type, order and chunk
boundary.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from llorch_export.checkpoint import base
from llorch_export.graph import linear
from llorch_export.source.open import open_checkpoint
from support.builders.checkpoints import write_gguf, write_hf_folder
from support.builders.tiny_exports import contents, export_tiny

# Grouped heads of several rows each, so that the query and key permutation crosses chunk boundaries.
CONFIG = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "attention_bias": True}


@pytest.mark.parametrize("source", ["F32", "BF16", "gguf F32", "gguf Q8_0", "gguf Q4_0"])
def test_any_range_of_rows_equals_that_of_the_whole(tmp_path: Path, source: str) -> None:
    if source.startswith("gguf"):
        path = write_gguf(tmp_path / "m.gguf", CONFIG, weight_type=source.split()[1])
    else:
        path = write_hf_folder(tmp_path / "m", CONFIG, dtype=source)
    tensors = open_checkpoint(str(path)).tensors
    assert tensors
    for name, tensor in tensors.items():
        whole = tensor.load()
        assert whole.shape == tensor.shape
        rows = tensor.shape[0]
        for start, stop in ((0, 1), (1, 2), (3, 29), (rows - 1, rows), (7, rows)):
            np.testing.assert_array_equal(tensor.load_rows(start, stop), whole[start:stop], err_msg=name)


@pytest.mark.parametrize("chunk", [1, 100, 1000])
def test_chunks_join_to_the_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chunk: int) -> None:
    tensors = open_checkpoint(str(write_gguf(tmp_path / "m.gguf", CONFIG, weight_type="Q8_0"))).tensors
    assert tensors
    whole = {name: tensor.load() for name, tensor in tensors.items()}
    monkeypatch.setattr(base, "CHUNK_ELEMENTS", chunk)
    for name, tensor in tensors.items():
        chunks = list(tensor.row_chunks())
        assert max(part.size for part in chunks) <= max(chunk, tensor.shape[-1])
        np.testing.assert_array_equal(np.concatenate(chunks), whole[name], err_msg=name)


@pytest.mark.parametrize("precision", ["fp32", "int8", "int4"])
def test_an_artifact_does_not_depend_on_the_size_of_chunks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, precision: str
) -> None:
    path = write_gguf(tmp_path / "m.gguf", CONFIG, weight_type="Q8_0")
    export_tiny(path, tmp_path / "whole", precision=precision)
    monkeypatch.setattr(base, "CHUNK_ELEMENTS", 500)
    monkeypatch.setattr(linear, "_BAND_ELEMENTS", 900)
    export_tiny(path, tmp_path / "parts", precision=precision)
    assert contents(tmp_path / "parts") == contents(tmp_path / "whole")
