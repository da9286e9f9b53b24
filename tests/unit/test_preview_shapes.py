"""Shapes that the runtime's kernels cannot run are refused by name, before a weight is read."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from llorch_export.options import ExportOptions
from llorch_export.preview import preview
from llorch_serve.errors import ArtifactError
from support.builders.checkpoints import tiny_config


@pytest.mark.parametrize("head_dim", [2, 12, 20, 28])
def test_head_dim_must_be_a_multiple_of_8(tmp_path: Path, head_dim: int) -> None:
    (tmp_path / "config.json").write_text(json.dumps(tiny_config(head_dim=head_dim)))
    with pytest.raises(ArtifactError, match=rf"head_dim is {head_dim}; .*multiple of 8"):
        preview(ExportOptions(source=str(tmp_path), output=Path("nowhere")))


@pytest.mark.parametrize("head_dim", [8, 16, 24, 40, 48, 128])
def test_other_sizes_are_taken(tmp_path: Path, head_dim: int) -> None:
    (tmp_path / "config.json").write_text(json.dumps(tiny_config(head_dim=head_dim)))
    found = preview(ExportOptions(source=str(tmp_path), output=Path("nowhere")))
    assert (found["kv_dtype"], found["kv_bytes_per_token"]) == ("int8", 2 * 2 * 2 * head_dim)
