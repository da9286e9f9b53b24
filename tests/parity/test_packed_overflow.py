"""Scales and factors that are finite, and whose products the graph could not hold: no artifact is written."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llorch_serve.errors import ArtifactError
from support.builders.packed_checkpoints import Packed
from support.builders.packed_quanto import narrow, write_quanto
from support.builders.packed_torchao import offsets, whole_numbers, write_torchao
from support.builders.tiny_exports import export_tiny
from support.harness.packed import require_carried

SHAPE: dict[str, Any] = {"hidden_size": 128, "intermediate_size": 192, "head_dim": 32}
MODULE = "model.layers.0.mlp.up_proj"
INT4 = {"target_dtype": {"_type": "torch.dtype", "_data": "int4"}}
FACTORS = f"{MODULE}._weight_act_pre_scale"


def _quanto(bits: int, *, whole: bool = False) -> Callable[[Path], Packed]:
    return lambda path: write_quanto(path, SHAPE, narrow(bits, 32, whole=whole), f"qint{bits}")


def _int4(path: Path) -> Packed:
    return write_torchao(path, SHAPE, whole_numbers(4, 32), "IntxUnpackedToInt8Tensor", INT4, 32)


def _offsets(path: Path) -> Packed:
    return write_torchao(path, SHAPE, offsets, "Int4Tensor", {}, 32)


def _refused(packed: Packed, output: Path) -> str:
    packed.rewrite()
    with pytest.raises(ArtifactError) as caught:
        export_tiny(packed.folder, output, precision="source", accuracy_level=0)
    assert not output.exists()
    return str(caught.value)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("write", [_quanto(4), _quanto(2), _quanto(4, whole=True), _quanto(2, whole=True)])
def test_scales_that_overflow_around_the_middle_of_codes_are_refused(
    tmp_path: Path, write: Callable[[Path], Packed]
) -> None:
    packed = write(tmp_path / "m")
    stored = packed.stored
    # Codes of zeros: their values are finite, and the graph takes codes less their middle.
    stored[f"{MODULE}.weight._data._data"] = np.zeros_like(stored[f"{MODULE}.weight._data._data"])
    stored[f"{MODULE}.weight._scale"] = np.full(stored[f"{MODULE}.weight._scale"].shape, 3e38, np.float32)
    stored[f"{MODULE}.weight._shift"] = np.zeros_like(stored[f"{MODULE}.weight._shift"])
    assert f"{MODULE}.weight: codes times scales give NaN or infinity" in _refused(packed, tmp_path / "a")


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("write", [_int4, _offsets])
def test_scales_that_overflow_with_factors_of_inputs_are_refused(
    tmp_path: Path, write: Callable[[Path], Packed]
) -> None:
    packed = write(tmp_path / "m")
    scales = packed.stored[f"{MODULE}._weight_scale"]
    packed.stored[f"{MODULE}._weight_scale"] = np.full(scales.shape, 1e30, np.float32)
    packed.stored[FACTORS] = np.ones(128, np.float32)
    packed.stored[FACTORS][77] = -1e15
    assert f"{MODULE}.weight: codes times scales give NaN or infinity" in _refused(packed, tmp_path / "a")


@pytest.mark.filterwarnings("error")
def test_factors_that_no_input_can_be_multiplied_by_are_refused(tmp_path: Path) -> None:
    packed = _int4(tmp_path / "m")
    packed.stored[FACTORS] = np.full(128, -1e30, np.float32)  # weights times it are finite
    found = _refused(packed, tmp_path / "a")
    assert f"{FACTORS} holds factors of inputs up to 1e+30, expected at most" in found


def test_factors_of_nothing_are_taken(tmp_path: Path) -> None:
    packed = _int4(tmp_path / "m")
    packed.stored[FACTORS] = np.linspace(-1, 1, 128, dtype=np.float32)
    packed.stored[FACTORS][:40] = 0
    packed.values[f"{MODULE}.weight"] = packed.values[f"{MODULE}.weight"] * packed.stored[FACTORS]
    packed.rewrite()
    require_carried(packed, tmp_path / "a")
