"""Quark's packing: ``weight`` with ``weight_scale`` and, of whole numbers, ``weight_zero_point``.

Whole numbers whose scales belong to groups lie input by input: four bits [in, out / 8] in words, eight bits
[in, out], scales [groups, out]. With a scale for each output, or one for all, they lie as the weight does.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from llorch_export.checkpoint.codes import CodeRows, Codes
from llorch_export.checkpoint.packed.awq import output_codes
from llorch_export.checkpoint.packed.base import (
    FLOATS,
    PackedMatrix,
    PackedModule,
    from_codes,
    in_words,
    require_finite_scales,
    scale_type,
)
from llorch_export.checkpoint.packed.floats import POWERS, float8, mxfp4, powers, stored_scales
from llorch_export.checkpoint.packed.scales import Grid
from llorch_export.checkpoint.packed.stored import StoredArray
from llorch_export.config.packed.base import ONE_GROUP
from llorch_export.config.packed.quark import QuarkPacking, QuarkScheme
from llorch_serve.errors import ArtifactError

_A_WORD: Final = 8
# Scales of activations, which are not rounded by them here.
_UNUSED: Final = (".input_scale", ".input_zero_point", ".output_scale", ".output_zero_point")

Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class QuarkReader:
    """Reads modules by the settings of one checkpoint."""

    packing: QuarkPacking
    suffixes: tuple[str, ...] = (".weight", ".weight_scale", ".weight_zero_point", *_UNUSED)

    def read(self, module: PackedModule) -> PackedMatrix | None:
        """See :class:`llorch_export.checkpoint.packed.base.PackedReader`."""
        weight = module.part("weight")
        if set(module.parts) == {"weight"} and weight.kind in FLOATS:
            return None
        scheme, scales = self.packing.of(module.own_name), module.part("weight_scale")
        if scheme is None:
            raise ArtifactError(
                f"{weight.path}: module {module.own_name} has {', '.join(sorted(module.parts))}, and "
                "quantization_config says that it is not quantised; the config belongs to another model, "
                "fetch both again"
            )
        grid = _grid(module, scales, scheme)
        if scheme.kind == "fp8_e4m3":
            weight.require(module.shape, ("F8_E4M3",))
            return float8(weight, grid, _floating_scales(grid, scales))
        if scheme.kind == "fp4":
            rows, columns = module.shape
            weight.require((rows, -(-columns // 2)), ("U8",))
            scales.require(scales.shape, POWERS)
            return mxfp4(weight, grid, scales)
        bits = 4 if scheme.kind.endswith("4") else 8
        if bits == 4:
            return self._nibbles(module, grid, scheme)
        return _bytes(module, grid, scheme)

    def _nibbles(self, module: PackedModule, grid: Grid, scheme: QuarkScheme) -> PackedMatrix:
        rows, columns = module.shape
        weight, zeros = module.part("weight"), module.parts.get("weight_zero_point")
        if not scheme.grouped or rows % _A_WORD:
            raise ArtifactError(
                f"{weight.path}: module {module.name} has 4 bits, {rows} outputs and "
                f"{'groups' if scheme.grouped else 'no groups'} of inputs, expected groups, and outputs that "
                f"fill words of {_A_WORD}; export from the original weights"
            )
        weight.require((columns, rows // _A_WORD), ("I32",))
        if zeros is not None:
            zeros.require((grid.size[1], rows // _A_WORD), ("I32",))

        def read(place: StoredArray, start: int, stop: int) -> Bytes:
            return output_codes(place, start, stop, interleaved=self.packing.interleaved)

        return _codes(module, grid, 4, read, signed=scheme.kind == "int4")


def _grid(module: PackedModule, scales: StoredArray, scheme: QuarkScheme) -> Grid:
    """Return the blocks that share a scale, as many as there are scales. Raises ArtifactError if they do not
    come out even.
    """
    if not scheme.grouped:
        blocks = (ONE_GROUP if len(scales.shape) == 0 or scales.shape == (1,) else 1, ONE_GROUP)
        grid = Grid.of(module.shape, blocks)
        grid.require(module, scales)
        return grid
    return Grid.of_groups(module, scales, by_input=not scheme.kind.startswith("fp"))


def _floating_scales(grid: Grid, place: StoredArray) -> Callable[[int, int], npt.NDArray[np.float32]]:
    return powers(grid, place) if place.kind in POWERS else stored_scales(grid, place)


def _bytes(module: PackedModule, grid: Grid, scheme: QuarkScheme) -> PackedMatrix:
    rows, columns = module.shape
    weight, zeros = module.part("weight"), module.parts.get("weight_zero_point")
    signed = scheme.kind == "int8"
    kinds = ("I8",) if signed else ("U8",)
    weight.require((columns, rows) if scheme.grouped else (rows, columns), kinds)
    if zeros is not None:
        zeros.require(module.part("weight_scale").shape, kinds)

    def read(place: StoredArray, start: int, stop: int) -> Bytes:
        if scheme.grouped:
            return place.columns(start, stop).T.view(np.uint8)
        if place is weight:
            return place.rows(start, stop).view(np.uint8)
        return grid.read(place, start, stop).view(np.uint8)

    return _codes(module, grid, 8, read, signed=signed, grouped=scheme.grouped)


def _codes(
    module: PackedModule,
    grid: Grid,
    bits: int,
    read: Callable[[StoredArray, int, int], Bytes],
    *,
    signed: bool,
    grouped: bool = True,
) -> PackedMatrix:
    """Return codes that ``read`` takes out of weights and zero points, of some outputs. signed: they lie
    around zero; grouped: scales lie [groups, out].
    """
    weight, scales = module.part("weight"), module.part("weight_scale")
    zeros = module.parts.get("weight_zero_point")
    middle = np.uint8(2 ** (bits - 1))
    if signed and zeros is not None and not zeros.read().any():
        zeros = None  # one for each scale, so a small tensor
    if not signed and zeros is None:
        module.part("weight_zero_point")
    moved = middle if signed else np.uint8(0)

    def rows(start: int, stop: int) -> CodeRows:
        if grouped:
            found = scales.columns(start, stop).T.astype(np.float32)
            require_finite_scales(found, scales)
        else:
            found = grid.scales(scales, start, stop)
        offsets = None if zeros is None else read(zeros, start, stop) ^ moved
        return CodeRows(read(weight, start, stop) ^ moved, found, offsets)

    codes = Codes(
        bits=bits,
        columns=module.shape[1],
        group=grid.columns,
        symmetric=zeros is None,
        scale_type=scale_type(scales),
        read=rows,
    )
    return from_codes(in_words("Quark", bits, grid.columns, module.shape[1]), codes)
