"""Weights in floating point of eight or four bits with scales, as compressed-tensors stores them.

Eight bits have no whole numbers behind them. Four bits (E2M1: 0, 0.5, 1, 1.5, 2, 3, 4, 6 and their
negatives) are whole numbers of halves, so they come out as codes of eight bits with half of the scale.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from llorch_export.checkpoint.codes import CodeRows, Codes, Levels, ScaleTable, finite_values
from llorch_export.checkpoint.packed.base import (
    FLOATS,
    PackedMatrix,
    PackedModule,
    from_codes,
    require_finite_scales,
)
from llorch_export.checkpoint.packed.scales import Grid
from llorch_export.checkpoint.packed.stored import StoredArray
from llorch_export.config.packed.compressed import CompressedScheme
from llorch_serve.artifact.manifest import ScaleType
from llorch_serve.errors import ArtifactError

Floats = npt.NDArray[np.float32]

POWERS: Final = ("U8", "F8_E8M0")
"""Types that exponents of two are stored in."""
_NIBBLES: Final = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], np.int16)
"""Twice the value of each of the sixteen codes of E2M1."""
_LEVELS: Final = Levels(_NIBBLES.astype(np.float32), (_NIBBLES + 128).astype(np.uint8))
_EXPONENT_BIAS: Final = 127
_NO_EXPONENT: Final = 255  # of E8M0: not a number


def float8_matrix(module: PackedModule, scheme: CompressedScheme) -> PackedMatrix:
    """Return the weights of ``weight`` (E4M3) times ``weight_scale``. Raises ArtifactError."""
    weights, scales = module.part("weight"), module.part("weight_scale")
    weights.require(module.shape, ("F8_E4M3",))
    grid = Grid.of(module.shape, scheme.block)
    grid.require(module, scales)
    read = powers(grid, scales) if scales.kind in POWERS else stored_scales(grid, scales)
    return float8(weights, grid, read)


def float8(weights: StoredArray, grid: Grid, scales: Callable[[int, int], Floats]) -> PackedMatrix:
    """Return floating point of 8 bits [out, in] times ``scales``, which reads those of some outputs: [rows,
    blocks].
    """

    def require_numbers(values: Floats) -> None:
        if not np.isfinite(values).all():
            raise ArtifactError(
                f"{weights.path}: tensor {weights.name} holds NaN or infinity; the weights are damaged, "
                "fetch them again"
            )

    def load_rows(start: int, stop: int) -> Floats:
        values: Floats = weights.rows(start, stop).astype(np.float32)
        require_numbers(values)
        values *= grid.spread(scales(start, stop))
        return values

    def read(start: int, stop: int) -> CodeRows:
        found = weights.rows(start, stop)
        require_numbers(found.astype(np.float32))
        return CodeRows(found.view(np.uint8), scales(start, stop), None)

    codes = Codes(
        bits=8,
        columns=grid.shape[1],
        group=grid.columns,
        symmetric=True,
        scale_type="float32",
        read=read,
        levels=Levels(finite_values(weights.dtype), None),
    )
    return PackedMatrix(f"floating point of 8 bits, {_said(grid)}", load_rows, codes)


def float4_matrix(module: PackedModule, scheme: CompressedScheme) -> PackedMatrix:
    """Return the weights of ``weight_packed`` (two of E2M1 in a byte) times ``weight_scale``, which
    ``weight_global_scale`` divides if it is there. Raises ArtifactError.
    """
    rows, columns = module.shape
    weights, scales = module.part("weight_packed"), module.part("weight_scale")
    weights.require((rows, -(-columns // 2)), ("U8",))
    grid = Grid.of(module.shape, scheme.block)
    grid.require(module, scales)
    if scheme.format == "nvfp4-pack-quantized":
        return nvfp4(weights, grid, scales, module.part("weight_global_scale"), divides=True)
    scales.require(scales.shape, POWERS)
    return mxfp4(weights, grid, scales)


def mxfp4(weights: StoredArray, grid: Grid, scales: StoredArray) -> PackedMatrix:
    """Return two of E2M1 in a byte, [out, in / 2], times powers of two that are stored by their exponents."""
    return _float4(weights, grid, scales, powers(grid, scales), _all_powers, "MXFP4", "bfloat16")


def nvfp4(
    weights: StoredArray, grid: Grid, scales: StoredArray, whole: StoredArray, *, divides: bool
) -> PackedMatrix:
    """Return two of E2M1 in a byte, [out, in / 2], times scales of E4M3, which ``whole``, a number for the
    whole tensor, divides or multiplies. Raises ArtifactError.
    """
    scales.require(scales.shape, ("F8_E4M3",))
    whole.require((1,) if whole.shape else (), ("F32",))

    def applied(found: Floats) -> Floats:
        number = whole.read().astype(np.float32).reshape(())
        if divides and not (np.isfinite(number) and number > 0):
            raise ArtifactError(
                f"{whole.path}: tensor {whole.name} is {number}, expected a positive number; the weights "
                "are damaged, fetch them again"
            )
        with np.errstate(over="ignore", invalid="ignore"):
            return found / number if divides else found * number

    def read(start: int, stop: int) -> Floats:
        found = applied(grid.scales(scales, start, stop))
        require_finite_scales(found, whole)
        return found

    def every_scale() -> Floats:
        found = applied(finite_values(scales.dtype))
        return np.where(np.isfinite(found), found, np.float32(0))

    return _float4(weights, grid, scales, read, every_scale, "NVFP4", "float32")


def _float4(
    weights: StoredArray,
    grid: Grid,
    stored: StoredArray,
    scales: Callable[[int, int], Floats],
    every_scale: Callable[[], Floats],
    name: str,
    kind: ScaleType,
) -> PackedMatrix:
    """Return two of E2M1 in a byte, [out, in / 2], times ``scales``, which reads those of some outputs.

    stored: their bytes. every_scale: gives those of the 256 bytes. name: of the format. kind: the narrowest
        type that holds all scales.
    """
    matrix = _Float4(weights, scales, grid.shape[1])
    codes = Codes(
        bits=8,
        columns=grid.shape[1],
        group=grid.columns,
        symmetric=True,
        scale_type=kind,
        read=matrix.read,
        levels=_LEVELS,
        scale_table=ScaleTable(
            lambda: every_scale() * np.float32(0.5),
            lambda start, stop: np.ascontiguousarray(grid.read(stored, start, stop)).view(np.uint8),
        ),
    )
    return from_codes(f"{name}, 4 bits of floating point, {_said(grid)}", codes)


@dataclass(frozen=True, slots=True)
class _Float4:
    weights: StoredArray
    scales: Callable[[int, int], Floats]
    columns: int

    def read(self, start: int, stop: int) -> CodeRows:
        """Read rows as :attr:`Codes.read` does; the lower half of a byte comes first."""
        data = self.weights.rows(start, stop).view(np.uint8)
        nibbles = np.stack([data & 15, data >> 4], axis=-1).reshape(stop - start, -1)[:, : self.columns]
        return CodeRows(nibbles, self.scales(start, stop) * np.float32(0.5), None)


def _said(grid: Grid) -> str:
    if grid.rows > 1:
        return "one scale" if grid.size == (1, 1) else f"blocks of {grid.rows} by {grid.columns}"
    return "one scale an output" if grid.size[1] == 1 else f"groups of {grid.columns}"


def stored_scales(grid: Grid, place: StoredArray) -> Callable[[int, int], Floats]:
    """Return a reader of scales that are stored as they are."""
    place.require(place.shape, FLOATS)
    return lambda start, stop: grid.scales(place, start, stop)


def powers(grid: Grid, place: StoredArray) -> Callable[[int, int], Floats]:
    """Return a reader of powers of two, stored by their exponents."""

    def read(start: int, stop: int) -> Floats:
        exponents = grid.read(place, start, stop).view(np.uint8)
        if (exponents == _NO_EXPONENT).any():
            raise ArtifactError(
                f"{place.path}: tensor {place.name} holds scales that are no numbers; the weights are "
                "damaged, fetch them again"
            )
        return np.ldexp(np.float32(1), exponents.astype(np.int32) - _EXPONENT_BIAS).astype(np.float32)

    return read


def _all_powers() -> Floats:
    """Return the power of two of each exponent, and 0 for what is no number."""
    found = np.ldexp(np.float32(1), np.arange(_NO_EXPONENT) - _EXPONENT_BIAS).astype(np.float32)
    return np.append(found, np.float32(0))
