"""Settings of packed weights mean modules by the names that they had when a tool packed them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llorch_export.checkpoint.names import loaded_name
from llorch_export.config.families import FAMILIES
from llorch_export.source.open import open_checkpoint
from support.builders.checkpoints import of_family
from support.builders.packed_checkpoints import Group, Packed, write_compressed, write_gptq
from support.builders.packed_folders import write_packed
from support.builders.packed_quark import groups, settings

SHAPE: dict[str, Any] = {"hidden_size": 128, "intermediate_size": 192, "head_dim": 32}
EXAONE = SHAPE | of_family("exaone", head_dim=32)
EXAONE_UP, UP = "transformer.h.0.mlp.c_fc_1", "model.layers.0.mlp.up_proj"


def _renamed(packed: Packed, rename: Callable[[str], str]) -> Packed:
    """Write the folder with other names of modules."""
    parts = ((*name.rpartition("."), value) for name, value in packed.stored.items())
    packed.stored = {f"{rename(module)}.{part}": value for module, _, part, value in parts}
    packed.rewrite()
    return packed


def _of_images_too(module: str) -> str:
    return module.replace("model.", "model.language_model.")


def _compiled(module: str) -> str:
    return f"_orig_mod.{module}"


def _same(module: str) -> str:
    return module


# A shape, how modules are renamed once they are packed, and a module's name before and after that.
Named = tuple[dict[str, Any], Callable[[str], str], str, str]
NAMES: dict[str, Named] = {
    "exaone": (EXAONE, _same, EXAONE_UP, EXAONE_UP),
    "a model of text and images": (SHAPE, _of_images_too, UP, _of_images_too(UP)),
    "a compiled model": (SHAPE, _compiled, UP, UP),
}


def _require_values(packed: Packed) -> None:
    found = open_checkpoint(str(packed.folder))
    for name, value in packed.values.items():
        own = loaded_name(name, FAMILIES[found.config.architecture])
        np.testing.assert_array_equal(found.tensors[own].load(), value, err_msg=name)


@pytest.mark.parametrize("row", NAMES)
def test_rules_of_gptq(tmp_path: Path, row: str) -> None:
    shape, rename, packed_as, said_as = NAMES[row]
    rules = {f"+:{said_as}": {"bits": 8, "group_size": 16}}
    packed = write_gptq(tmp_path / "m", shape, skip=("wte",), own={packed_as: (8, 16)}, dynamic=rules)
    _require_values(_renamed(packed, rename))


@pytest.mark.parametrize("row", NAMES)
def test_targets_of_compressed_tensors(tmp_path: Path, row: str) -> None:
    shape, rename, packed_as, said_as = NAMES[row]
    own = Group("int-quantized", bits=8, strategy="channel", targets=(said_as,), parts=(packed_as,))
    _require_values(_renamed(write_compressed(tmp_path / "m", shape, own, Group(), plain=("wte",)), rename))


@pytest.mark.parametrize("row", NAMES)
def test_patterns_of_quark(tmp_path: Path, row: str) -> None:
    shape, rename, packed_as, said_as = NAMES[row]
    said = settings("uint4", "per_group")
    signed = settings("int4", "per_group")["global_quant_config"]
    packed = write_packed(
        tmp_path / "m",
        shape,
        groups("uint4"),
        said | {"layer_quant_config": {said_as: signed}},
        skip=("lm_head", "wte"),
    )
    stored = packed.stored
    for part in ("weight", "weight_zero_point"):  # each nibble by eight less is the same number, signed
        stored[f"{packed_as}.{part}"] = stored[f"{packed_as}.{part}"] ^ np.int32(0x88888888 - 2**32)
    _require_values(_renamed(packed, rename))
