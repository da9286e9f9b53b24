"""ModelOpt's packing: ``weight`` with ``weight_scale`` and, for NVFP4, ``weight_scale_2``.

The type and shape of ``weight`` say how it is packed: E4M3 [out, in], signed bytes [out, in], two of E2M1 in
a byte [out, in / 2], or two whole numbers of 4 bits in a byte [out / 2, in]. ``pre_quant_scale`` multiplies
the inputs.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import numpy as np

from llorch_export.checkpoint.codes import CodeRows, Codes
from llorch_export.checkpoint.packed.base import (
    FLOATS,
    PackedMatrix,
    PackedModule,
    from_codes,
    in_words,
    scale_type,
    with_scaled_inputs,
)
from llorch_export.checkpoint.packed.floats import POWERS, float8, mxfp4, nvfp4, powers, stored_scales
from llorch_export.checkpoint.packed.scales import Grid
from llorch_export.checkpoint.packed.stored import StoredArray
from llorch_export.config.packed.base import ONE_GROUP
from llorch_export.config.packed.modelopt import ModelOptPacking
from llorch_serve.errors import ArtifactError

_SECOND: Final = "weight_scale_2"
_BLOCK: Final = 128
_BLOCKS: Final = ((ONE_GROUP, ONE_GROUP), (1, ONE_GROUP), (_BLOCK, _BLOCK))
"""Outputs and inputs that share a scale of E4M3; no setting says which."""
_UNUSED: Final = (".input_scale", ".output_scale")
"""Scales of activations, which are not rounded by them here."""


@dataclass(frozen=True, slots=True)
class ModelOptReader:
    """Reads modules of one checkpoint."""

    packing: ModelOptPacking
    suffixes: tuple[str, ...] = (
        ".weight",
        ".weight_scale",
        f".{_SECOND}",
        ".pre_quant_scale",
        *_UNUSED,
    )

    def read(self, module: PackedModule) -> PackedMatrix | None:
        """See :class:`llorch_export.checkpoint.packed.base.PackedReader`."""
        weight = module.part("weight")
        if set(module.parts) == {"weight"} and weight.kind in FLOATS:
            return None
        matrix = _matrix(module, weight)
        before = module.parts.get("pre_quant_scale")
        return matrix if before is None else with_scaled_inputs(module, matrix, before)


def _matrix(module: PackedModule, weight: StoredArray) -> PackedMatrix:
    (rows, columns), scales = module.shape, module.part("weight_scale")
    if weight.shape == (rows, -(-columns // 2)) and weight.kind not in ("F8_E4M3", "I8"):
        weight.require(weight.shape, ("U8",))
        return _float4(module, weight, scales)
    if weight.kind == "F8_E4M3":
        weight.require(module.shape, ("F8_E4M3",))
        _refuse_second(module)
        return _float8(module, weight, scales)
    if weight.kind == "I8":
        weight.require(module.shape, ("I8",))
        _refuse_second(module)
        return _bytes(module, weight, scales)
    if weight.shape == (rows // 2, columns) and rows % 2 == 0:
        weight.require(weight.shape, ("U8",))
        _refuse_second(module)
        return _whole_nibbles(module, weight, scales)
    raise ArtifactError(
        f"{weight.path}: tensor {weight.name} is {weight.kind} {list(weight.shape)}, expected F8_E4M3 or I8 "
        f"{[rows, columns]}, or U8 {[rows, -(-columns // 2)]} or {[rows // 2, columns]}; the file is damaged "
        "or its config belongs to another model, fetch both again"
    )


def _refuse_second(module: PackedModule) -> None:
    """Raise ArtifactError if there is a scale that NVFP4 alone has."""
    if _SECOND in module.parts:
        place = module.part(_SECOND)
        raise ArtifactError(
            f"{place.path}: {module.own_name} has {_SECOND}, expected it beside NVFP4 alone: other weights "
            "that have it were rounded twice, which cannot be read; export from the original weights"
        )


def _float8(module: PackedModule, weight: StoredArray, scales: StoredArray) -> PackedMatrix:
    if scales.kind in POWERS:
        grid = Grid.of_groups(module, scales)
        return float8(weight, grid, powers(grid, scales))
    # Sizes of one stand for dimensions that are not shared by blocks.
    stored = tuple(size for size in scales.shape if size != 1)
    grids = [Grid.of(module.shape, block) for block in _BLOCKS]
    fitting = [one for one in grids if tuple(size for size in one.size if size != 1) == stored]
    if not fitting:
        raise ArtifactError(
            f"{scales.path}: tensor {scales.name} is {list(scales.shape)}, expected "
            f"{', '.join(str(list(one.size)) for one in grids)} (one scale, one an output, or one a block of "
            f"{_BLOCK} by {_BLOCK}) for {module.name} of {list(module.shape)}; export from the original "
            "weights"
        )
    grid = fitting[0]
    return float8(weight, grid, stored_scales(grid, dataclasses.replace(scales, shape=grid.size)))


def _bytes(module: PackedModule, weight: StoredArray, scales: StoredArray) -> PackedMatrix:
    grid = Grid.of(module.shape, (1, ONE_GROUP))
    grid.require(module, scales)

    def read(start: int, stop: int) -> CodeRows:
        codes = weight.rows(start, stop).view(np.uint8) ^ np.uint8(128)
        return CodeRows(codes, grid.scales(scales, start, stop), None)

    return _codes(module, grid, scales, 8, read)


def _whole_nibbles(module: PackedModule, weight: StoredArray, scales: StoredArray) -> PackedMatrix:
    grid = Grid.of_groups(module, scales)

    def read(start: int, stop: int) -> CodeRows:
        data = weight.rows(start // 2, -(-stop // 2)).view(np.uint8)
        outputs = np.stack([data & 15, data >> 4], axis=1).reshape(-1, module.shape[1])
        codes = outputs[start % 2 : start % 2 + stop - start] ^ np.uint8(8)
        return CodeRows(codes, grid.scales(scales, start, stop), None)

    return _codes(module, grid, scales, 4, read)


def _codes(
    module: PackedModule, grid: Grid, scales: StoredArray, bits: int, read: Callable[[int, int], CodeRows]
) -> PackedMatrix:
    columns = module.shape[1]
    codes = Codes(
        bits=bits,
        columns=columns,
        group=grid.columns,
        symmetric=True,
        scale_type=scale_type(scales),
        read=read,
    )
    return from_codes(in_words("ModelOpt", bits, grid.columns, columns), codes)


def _float4(module: PackedModule, weight: StoredArray, scales: StoredArray) -> PackedMatrix:
    grid = Grid.of_groups(module, scales)
    if _SECOND not in module.parts:
        scales.require(scales.shape, POWERS)
        return mxfp4(weight, grid, scales)
    return nvfp4(weight, grid, scales, module.part(_SECOND), divides=False)
