"""optimum-quanto's packing: ``weight._data`` and ``weight._scale``, or, of 2 and 4 bits,
``weight._data._data`` with ``weight._shift`` besides.

Eight bits are signed bytes or floating point [out, in] with a scale for each output. Others are codes from
zero on, in as many rows as there are scales: a row is a group of an output's inputs. A byte holds codes of
rows that lie a part of all rows apart, the first in its lower bits. Weights are ``scale * code - shift``, or
``scale * (code - shift)`` where shifts are whole numbers.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from llorch_export.checkpoint.codes import CodeRows, Codes
from llorch_export.checkpoint.packed.base import (
    FLOATS,
    PackedMatrix,
    PackedModule,
    from_codes,
    in_words,
    require_finite_scales,
    scale_type,
)
from llorch_export.checkpoint.packed.floats import float8, stored_scales
from llorch_export.checkpoint.packed.scales import Grid
from llorch_export.checkpoint.packed.stored import StoredArray
from llorch_export.checkpoint.packed.words import around_zero, strided_codes
from llorch_export.config.packed.base import ONE_GROUP
from llorch_export.config.packed.quanto import QuantoPacking
from llorch_serve.errors import ArtifactError

Floats = npt.NDArray[np.float32]

_DATA, _SCALE, _SHIFT = "weight._data", "weight._scale", "weight._shift"
_NIBBLES: Final = "weight._data._data"
_BITS: Final = {"qint2": 2, "qint4": 4}
_FLOAT_KINDS: Final = {"qfloat8": "F8_E4M3", "qfloat8_e4m3fn": "F8_E4M3", "qfloat8_e5m2": "F8_E5M2"}


@dataclass(frozen=True, slots=True)
class QuantoReader:
    """Reads modules of one checkpoint."""

    packing: QuantoPacking
    suffixes: tuple[str, ...] = tuple(f".{part}" for part in (_DATA, _NIBBLES, _SCALE, _SHIFT))

    def read(self, module: PackedModule) -> PackedMatrix:
        """See :class:`llorch_export.checkpoint.packed.base.PackedReader`."""
        kind = self.packing.types.get(module.own_name)
        if kind is None:
            raise ArtifactError(
                f"{next(iter(module.parts.values())).path}: module {module.own_name} has "
                f"{', '.join(sorted(module.parts))}, and quanto_qmap.json does not say of which type; it "
                "belongs to another model, fetch both again"
            )
        if kind in _BITS:
            return _codes(module, _BITS[kind])
        data, scales = module.part(_DATA), module.part(_SCALE)
        grid = Grid.of(module.shape, (1, ONE_GROUP))
        grid.require(module, scales)
        if kind == "qint8":
            return _bytes(module, grid, data, scales)
        data.require(module.shape, (_FLOAT_KINDS[kind],))
        return float8(data, grid, stored_scales(grid, scales))


def _bytes(module: PackedModule, grid: Grid, data: StoredArray, scales: StoredArray) -> PackedMatrix:
    data.require(module.shape, ("I8",))
    columns = module.shape[1]

    def read(start: int, stop: int) -> CodeRows:
        codes = around_zero(data.rows(start, stop), 8, data)
        return CodeRows(codes, grid.scales(scales, start, stop), None)

    codes = Codes(8, columns, columns, symmetric=True, scale_type=scale_type(scales), read=read)
    return from_codes(in_words("quanto", 8, columns, columns), codes)


def _codes(module: PackedModule, bits: int) -> PackedMatrix:
    (rows, columns), scales, shifts = module.shape, module.part(_SCALE), module.part(_SHIFT)
    count = math.prod(scales.shape)
    groups = count // rows
    if count != groups * rows or not groups or columns % groups:
        raise ArtifactError(
            f"{scales.path}: tensor {scales.name} is {list(scales.shape)}, expected [groups, 1] with equal "
            f"groups of the {columns} inputs of each of {rows} outputs; the file is damaged or belongs to "
            "another model, fetch it again"
        )
    scales.require(scales.shape, FLOATS)
    whole = shifts.kind in ("U8", "I8")
    shifts.require(scales.shape, (shifts.kind,) if whole else FLOATS)
    data, step = module.part(_NIBBLES), -(-count // (8 // bits))
    data.require((step, columns // groups), ("U8",))
    matrix = _Matrix(bits, groups, data, *(dataclasses.replace(p, shape=(count,)) for p in (scales, shifts)))
    codes = Codes(
        bits=bits,
        columns=columns,
        group=columns // groups,
        symmetric=False,
        scale_type=scale_type(scales),
        read=matrix.read if whole else matrix.read_shifted,
        zero_type=None if whole else scale_type(shifts),
        zero_kind="points" if whole else "subtracted",
    )
    tool = "quanto" if whole else "quanto with offsets"
    return from_codes(in_words(tool, bits, columns // groups, columns), codes)


@dataclass(frozen=True, slots=True)
class _Matrix:
    """groups: of an output. scales, shifts: [outputs * groups]."""

    bits: int
    groups: int
    data: StoredArray
    scales: StoredArray
    shifts: StoredArray

    def read(self, start: int, stop: int) -> CodeRows:
        """Read codes as :attr:`Codes.read` does."""
        zeros = self._of_groups(self.shifts, start, stop)
        low, high = int(zeros.min()), int(zeros.max())
        if low < 0 or high >= 2**self.bits:
            raise ArtifactError(
                f"{self.shifts.path}: tensor {self.shifts.name} holds {low} to {high}, expected numbers from "
                f"0 to {2**self.bits - 1}; the weights are damaged, fetch them again"
            )
        return CodeRows(
            self._rows(start, stop), self._floats(self.scales, start, stop), zeros.astype(np.uint8)
        )

    def read_shifted(self, start: int, stop: int) -> CodeRows:
        """Read codes whose shifts are no whole numbers as :attr:`Codes.read` does."""
        scales, shifts = (self._floats(place, start, stop) for place in (self.scales, self.shifts))
        return CodeRows(self._rows(start, stop), scales, shifts)

    def _rows(self, start: int, stop: int) -> npt.NDArray[np.uint8]:
        """Return the codes of outputs: [outputs, inputs]."""
        shifts, rows = range(0, 8, self.bits), (start * self.groups, stop * self.groups)
        return strided_codes(self.data, self.bits, shifts, rows).reshape(stop - start, -1)

    def _floats(self, place: StoredArray, start: int, stop: int) -> Floats:
        found = self._of_groups(place, start, stop).astype(np.float32)
        require_finite_scales(found, place)
        return found

    def _of_groups(self, place: StoredArray, start: int, stop: int) -> npt.NDArray[np.generic]:
        """Return numbers of some outputs' groups: [outputs, groups]."""
        return place.rows(start * self.groups, stop * self.groups).reshape(stop - start, self.groups)
