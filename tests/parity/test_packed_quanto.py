"""optimum-quanto's weights: exact values by the type that its map gives each module."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llorch_export.config.packed.reading import read_packing
from llorch_export.options import ExportOptions
from llorch_export.pipeline import export
from llorch_export.source.open import open_checkpoint
from llorch_serve.errors import ArtifactError
from support.builders.packed_checkpoints import Packed
from support.builders.packed_folders import Maker
from support.builders.packed_quanto import floats, narrow, whole_bytes, write_quanto
from support.builders.tiny_exports import silent
from support.harness.packed import load_error, require_carried, require_values

SHAPE: dict[str, Any] = {
    "hidden_size": 96,
    "intermediate_size": 160,
    "head_dim": 24,
}
ROWS: dict[str, tuple[Maker, str]] = {
    "4 bits": (narrow(4, 32), "qint4"),
    "4 bits, one group": (narrow(4, 0), "qint4"),
    "4 bits, whole shifts": (narrow(4, 32, whole=True), "qint4"),
    "2 bits": (narrow(2, 32), "qint2"),
    "2 bits, one group, whole shifts": (narrow(2, 0, whole=True), "qint2"),
    "8 bits": (whole_bytes, "qint8"),
    "fp8": (floats, "qfloat8"),
}
MODULE = "model.layers.0.mlp.up_proj"


def _write(path: Path, row: str = "4 bits, whole shifts", **more: Any) -> Packed:
    return write_quanto(path / "m", SHAPE, *ROWS[row], **more)


@pytest.mark.parametrize("row", ROWS)
def test_values_are_exact(tmp_path: Path, row: str) -> None:
    require_values(_write(tmp_path, row))


@pytest.mark.parametrize("row", ["4 bits, whole shifts", "2 bits, one group, whole shifts", "8 bits"])
def test_codes_reach_the_graph_as_they_are(tmp_path: Path, row: str) -> None:
    require_carried(_write(tmp_path, row), tmp_path / "a")


def test_shifts_in_floating_point_stay_beside_the_codes(tmp_path: Path) -> None:
    packed = _write(tmp_path, "4 bits")
    options = ExportOptions(str(packed.folder), tmp_path / "a", precision="source")
    (notice,) = (line for line in export(options, silent).notices if "quanto with" in line)
    said = "of quanto with offsets, 4 bits, groups of 32 (4 bits, block 32, exactly, zero points beside"
    assert said in notice


@pytest.mark.parametrize("activations", ["none", "qint8"])
def test_rounding_of_activations_is_said(tmp_path: Path, activations: str) -> None:
    packed = _write(tmp_path, activations=activations)
    found = open_checkpoint(str(packed.folder)).notices
    assert any("quanto rounds the inputs" in line for line in found) is (activations != "none")


def _map(packed: Packed, module: str, value: object) -> None:
    path = packed.folder / "quanto_qmap.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), module: value}))


def test_maps_that_are_not_understood_are_refused(tmp_path: Path) -> None:
    packed = _write(tmp_path)

    def refusal(value: object) -> str:
        _map(packed, MODULE, value)
        return load_error(packed, f"{MODULE}.weight")

    assert f"{MODULE} is no object of settings" in refusal(4)
    assert "weights is 'qint3', expected one of none, qint2" in refusal({"weights": "qint3"})
    assert "weights is ['qint4'], expected one of" in refusal({"weights": ["qint4"]})
    assert "activations is [], expected one of none" in refusal({"weights": "qint4", "activations": []})
    assert "keys that are not understood: axis" in refusal({"weights": "qint4", "axis": 1})
    assert "quanto_qmap.json does not say of which type" in refusal({"weights": "none"})
    assert "but no weight._data;" in refusal({"weights": "qint8"})


def test_parts_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    packed = _write(tmp_path)
    kept = dict(packed.stored)

    def refusal(part: str, value: Any) -> str:
        packed.stored = kept | {f"{MODULE}.{part}": value}
        return load_error(packed, f"{MODULE}.weight")

    assert "is [479, 1], expected [groups, 1]" in refusal("weight._scale", np.ones((479, 1), np.float32))
    assert "is [0, 1], expected [groups, 1]" in refusal("weight._scale", np.ones((0, 1), np.float32))
    assert "expected U8 [480, 1]" in refusal("weight._shift", np.ones((479, 1), np.uint8))
    assert "holds 0 to 99, expected numbers from 0 to 15" in refusal(
        "weight._shift", np.array([[0], [99]] * 240, np.uint8)
    )
    assert "expected U8 [240, 32]" in refusal("weight._data._data", np.zeros((240, 31), np.uint8))
    assert "NaN or infinite" in refusal("weight._scale", np.full((480, 1), np.nan, np.float32))
    assert "NaN or infinite" in refusal("weight._shift", np.full((480, 1), np.inf, np.float32))


def test_what_transformers_packs_while_it_loads_is_refused_with_what_to_do() -> None:
    settings = {"quant_method": "quanto", "weights": "int8", "activations": None}
    with pytest.raises(ArtifactError, match=r"says quanto.*save the model with QuantizedModelForCausalLM"):
        read_packing(settings, origin="config.json")
