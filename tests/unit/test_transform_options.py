"""Transforms as options: their names, their order, what they need, and what they leave in manifest and
graph.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from llorch_export.inspect.contents import contents as artifact_contents
from llorch_export.options import ExportOptions
from llorch_export.preview import preview
from llorch_export.recipes.base import base_recipe
from llorch_export.terminal.export_flags import TransformFlags
from llorch_export.terminal.inspect import describe
from llorch_serve.artifact.manifest import Recipe
from llorch_serve.errors import ArtifactError, UsageError
from support.builders.checkpoints import write_gguf, write_hf_folder
from support.builders.tiny_exports import contents, export_tiny

TEXT = "The quick brown fox jumps over the lazy dog."


def recipe(**options: Any) -> Recipe:
    return base_recipe(ExportOptions(source="", output=Path(), **options))


def test_the_order_of_the_names_does_not_matter() -> None:
    found = recipe(transforms=("rotate", "hadamard"))
    assert found == recipe(transforms=("hadamard", "rotate"))
    assert (found.transforms, found.transform_seed) == (("hadamard", "rotate"), 0)


def test_without_a_rotation_there_is_no_seed() -> None:
    assert recipe(transforms=("hadamard",)).transform_seed is None
    assert recipe().transforms == ()


@pytest.mark.parametrize("name", ["equalise", "smooth"])
def test_what_is_measured_needs_a_text(name: str) -> None:
    with pytest.raises(
        UsageError, match=f"--transform {name} need figures measured on a text; add --calibration"
    ):
        recipe(transforms=(name,))
    assert recipe(transforms=(name,), calibration=Path("text")).transforms == (name,)


def test_a_text_is_refused_where_transforms_measure_nothing() -> None:
    with pytest.raises(UsageError, match="--calibration text has no effect"):
        recipe(kv_dtype="float32", transforms=("rotate",), calibration=Path("text"))


def test_source_blocks_are_not_transformed() -> None:
    with pytest.raises(
        UsageError, match="--transform rotate changes weights whose blocks --precision source"
    ):
        recipe(precision="source", transforms=("rotate",))


@pytest.mark.parametrize(
    ("value", "said"),
    [("rotat", "has 'rotat' in it"), ("rotate,rotate", "has 'rotate' twice"), ("", "has '' in it")],
)
def test_names_are_checked(value: str, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        TransformFlags(transform=value).transforms()
    assert TransformFlags(transform="rotate, smooth").transforms() == ("rotate", "smooth")
    assert TransformFlags(transform=None).transforms() == ()


def test_manifest_and_inspect_say_what_was_done(tmp_path: Path) -> None:
    source = write_hf_folder(tmp_path / "model")
    (tmp_path / "text.txt").write_text(TEXT)
    options: dict[str, Any] = {"transforms": ("rotate", "smooth"), "calibration": tmp_path / "text.txt"}
    artifact = export_tiny(source, tmp_path / "out", **options)
    found = artifact.manifest.recipe
    assert (found.transforms, found.transform_seed) == (("smooth", "rotate"), 0)
    assert found.calibration is not None
    assert found.calibration.tokens > 5
    shown = describe(artifact_contents(artifact))
    assert "transforms smooth rotate, transform_seed 0, calibration (sha256 " in shown
    export_tiny(source, tmp_path / "again", **options)
    assert contents(tmp_path / "again") == contents(tmp_path / "out"), "the same export gives the same bytes"
    (tmp_path / "text.txt").write_text(TEXT + " ")
    other = export_tiny(source, tmp_path / "other", **options)
    assert other.manifest.fingerprint != artifact.manifest.fingerprint


def test_a_rotation_unties_the_tables_and_a_preview_knows(tmp_path: Path) -> None:
    source = write_gguf(tmp_path / "m.gguf", {"tie_word_embeddings": True})
    options: dict[str, Any] = {"precision": "fp32", "transforms": ("rotate",)}
    found = preview(ExportOptions(source=str(source), output=Path(), **options))
    plain = preview(ExportOptions(source=str(source), output=Path(), precision="fp32"))
    assert found["data_bytes"] == plain["data_bytes"] + 512 * 64 * 4  # type: ignore[operator]
    assert found["parameters"] == plain["parameters"]
    artifact = export_tiny(source, tmp_path / "out", **options)
    assert (artifact.folder / "model.onnx.data").stat().st_size == found["data_bytes"]
    assert artifact.manifest.model.tie_word_embeddings, "the config is the checkpoint's"


def test_a_size_without_a_basis_is_refused_before_a_weight_is_read(tmp_path: Path) -> None:
    source = write_hf_folder(tmp_path / "model", {"hidden_size": 2050, "head_dim": 16}, edit=dict.clear)
    with pytest.raises(ArtifactError, match="size 2050 needs a dense matrix"):
        preview(ExportOptions(source=str(source), output=Path(), transforms=("rotate",)))
