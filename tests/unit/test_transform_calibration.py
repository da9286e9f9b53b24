"""A calibration text is read within bounds, named in the recipe, and refused where nothing is measured on
it.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from llorch_export.calibration import measurements as calibration
from llorch_export.calibration.measurements import read_calibration
from llorch_export.options import ExportOptions
from llorch_export.recipes.base import base_recipe
from llorch_export.source.open import open_checkpoint
from llorch_serve.errors import ArtifactError, UsageError
from support.builders.checkpoints import write_hf_folder


def read(tmp_path: Path, content: bytes) -> calibration.CalibrationIds:
    (tmp_path / "text.txt").write_bytes(content)
    return read_calibration(tmp_path / "text.txt", open_checkpoint(str(write_hf_folder(tmp_path / "model"))))


def test_a_text_becomes_ids_with_its_hash(tmp_path: Path) -> None:
    content = "The quick brown fox. 東京".encode()
    found = read(tmp_path, content)
    assert found.text.sha256 == hashlib.sha256(content).hexdigest()
    assert found.text.tokens == len(found.ids) > 5
    assert found.ids[0] == 0, "the tokenizer puts BOS in front"


def test_no_more_than_the_limit_is_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibration, "MAX_TOKENS", 7)
    assert read(tmp_path, b"The quick brown fox jumps over the lazy dog").text.tokens == 7


@pytest.mark.parametrize(
    ("content", "said"),
    [(b"", "gives 1 tokens"), (b"\xff\xfe\x00", "not UTF-8"), (b"a" * (2**24 + 1), "more than 16 MiB")],
)
def test_what_is_no_text_is_refused(tmp_path: Path, content: bytes, said: str) -> None:
    with pytest.raises(ArtifactError, match=said):
        read(tmp_path, content)


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(str(write_hf_folder(tmp_path / "model")))
    with pytest.raises(ArtifactError, match=r"nowhere\.txt cannot be read: No such file"):
        read_calibration(tmp_path / "nowhere.txt", checkpoint)


def test_a_text_without_a_use_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="--calibration text has no effect"):
        base_recipe(ExportOptions(source="", output=tmp_path, calibration=Path("text"), kv_dtype="float32"))
