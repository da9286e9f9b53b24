"""bitsandbytes' packing: ``weight`` with ``absmax``, ``quant_map`` and ``quant_state``, or with ``SCB``.

4 bits: two codes in a byte, the first in the upper half, in the order of the weights; a code stands for a
value of a table of sixteen, and blocks of the flat weights share a factor, ``absmax``. With double
quantisation these factors are codes of 8 bits themselves. 8 bits: signed bytes, of which 127 stands for the
``SCB`` of the output.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from llorch_export.checkpoint.codes import CodeRows, Codes, Levels, ScaleTable
from llorch_export.checkpoint.packed.base import (
    PackedMatrix,
    PackedModule,
    from_codes,
    require_finite_scales,
)
from llorch_export.checkpoint.packed.quant_state import NestedScales, QuantState, quant_state
from llorch_export.checkpoint.packed.stored import StoredArray
from llorch_export.checkpoint.packed.tables import TABLES, nearest_codes
from llorch_export.config.packed.bitsandbytes import BitsAndBytesPacking
from llorch_serve.errors import ArtifactError

Floats = npt.NDArray[np.float32]

_STATES: Final = ("weight.quant_state.bitsandbytes__nf4", "weight.quant_state.bitsandbytes__fp4")
_ROW_ORDER: Final = 0
"""The one value of ``weight_format`` that is not the order of some GPU's kernels."""


@dataclass(frozen=True, slots=True)
class BitsAndBytesReader:
    """Reads modules by the settings of one checkpoint."""

    packing: BitsAndBytesPacking
    suffixes: tuple[str, ...] = (
        ".weight",
        ".weight.absmax",
        ".weight.quant_map",
        ".weight.nested_absmax",
        ".weight.nested_quant_map",
        *(f".{state}" for state in _STATES),
        ".SCB",
        ".weight_format",
    )

    def read(self, module: PackedModule) -> PackedMatrix | None:
        """See :class:`llorch_export.checkpoint.packed.base.PackedReader`."""
        if set(module.parts) == {"weight"} and module.parts["weight"].kind in ("F32", "F16", "BF16"):
            return None
        return _bytes(module) if self.packing.table is None else _nibbles(module, self.packing.table)


def _bytes(module: PackedModule) -> PackedMatrix:
    weights, largest = module.part("weight"), module.part("SCB")
    rows, columns = module.shape
    weights.require(module.shape, ("I8",))
    largest.require((rows,), ("F32",))
    order = module.parts.get("weight_format")
    if order is not None:
        order.require((), ("U8",))
        if int(order.read()) != _ROW_ORDER:
            raise ArtifactError(
                f"{order.path}: tensor {order.name} is {int(order.read())}, expected {_ROW_ORDER} (rows): "
                "the bytes are in the order of some GPU's kernels; load the model with bitsandbytes and save "
                "it again"
            )

    def read(start: int, stop: int) -> CodeRows:
        codes = weights.rows(start, stop).view(np.uint8) ^ np.uint8(128)
        scales = largest.rows(start, stop).astype(np.float32) / np.float32(127)
        require_finite_scales(scales, largest)
        return CodeRows(codes, scales[:, None], None)

    codes = Codes(bits=8, columns=columns, group=columns, symmetric=True, scale_type="float32", read=read)
    return from_codes("bitsandbytes, 8 bits, one scale an output", codes)


def _nibbles(module: PackedModule, table: str) -> PackedMatrix:
    state = quant_state(module, table)
    rows, columns = module.shape
    weights = _as_bytes(module.part("weight"), -(-rows * columns // 2))
    nested = None if state.nested is None else NestedScales.of(module, state.nested, _blocks(module, state))
    matrix = _Matrix(weights, columns, state, _scale_reader(module, state, nested))
    group = math.gcd(columns, state.block)  # blocks go on in the next row where they do not fit
    approximate = nearest_codes(table)
    form = f"bitsandbytes {table.upper()}, 4 bits, blocks of {state.block}"
    codes = Codes(
        bits=8,
        columns=columns,
        group=group,
        symmetric=True,
        scale_type="float32",
        read=lambda start, stop: matrix.codes(start, stop, group),
        rounding=approximate.rounding,
        levels=Levels(approximate.values, approximate.codes),
        scale_table=_scale_table(module, nested, state.block, approximate.step)
        if columns % state.block == 0
        else None,
    )
    return PackedMatrix(f"{form}, their scales in 8 bits" if state.nested else form, matrix.values, codes)


def _as_bytes(place: StoredArray, count: int) -> StoredArray:
    """Return packed weights as bytes [count], whatever type they were stored as. Raises ArtifactError."""
    size = math.prod(place.shape) * place.dtype.itemsize
    if size == count:
        return place.as_bytes()
    raise ArtifactError(
        f"{place.path}: tensor {place.name} has {size} bytes, expected {count} for its module's shape; the "
        "file is damaged or its config belongs to another model, fetch both again"
    )


def _blocks(module: PackedModule, state: QuantState) -> int:
    """Return how many blocks of weights have a factor."""
    return -(-math.prod(module.shape) // state.block)


def _scale_table(
    module: PackedModule, nested: NestedScales | None, block: int, step: float
) -> ScaleTable | None:
    """Return the factors of ``block`` weights each, times ``step``, as the bytes that they are stored as;
    None: they are whole.
    """
    if nested is None:
        return None
    factors = nested.factors * np.float32(step)
    if not (np.isfinite(factors) & (factors != 0)).all():
        return None
    place, groups = module.part("weight.absmax"), module.shape[1] // block

    def read(start: int, stop: int) -> npt.NDArray[np.uint8]:
        return place.rows(start * groups, stop * groups).view(np.uint8).reshape(-1, groups)

    return ScaleTable(lambda: nested.table, read, factors, nested.nested.block, nested.nested.offset * step)


def _scale_reader(
    module: PackedModule, state: QuantState, nested: NestedScales | None
) -> Callable[[int, int], Floats]:
    """Return a reader of the factors of blocks ``first`` to ``last`` (excluded)."""
    place = module.part("weight.absmax")
    place.require((_blocks(module, state),), ("F32",) if nested is None else ("U8",))

    def read(first: int, last: int) -> Floats:
        found = place.rows(first, last)
        scales: Floats = found.astype(np.float32) if nested is None else nested.scales(found, first)
        require_finite_scales(scales, place)
        return scales

    return read


@dataclass(frozen=True, slots=True)
class _Matrix:
    weights: StoredArray
    columns: int
    state: QuantState
    scales: Callable[[int, int], Floats]

    def values(self, start: int, stop: int) -> Floats:
        """Read rows of the table's values times their factors."""
        table = np.array(TABLES[self.state.table], np.float32)
        found = table[self._nibbles(start, stop)]
        found *= self._spread(start * self.columns, stop * self.columns)
        return found.reshape(stop - start, self.columns)

    def codes(self, start: int, stop: int, group: int) -> CodeRows:
        """Read rows as numbers of levels, with scales of the steps that come nearest to the table."""
        nearest = nearest_codes(self.state.table)
        levels = self._nibbles(start, stop).reshape(stop - start, self.columns)
        starts = np.arange(start * self.columns, stop * self.columns, group) // self.state.block
        scales = self.scales(int(starts[0]), int(starts[-1]) + 1)[starts - starts[0]]
        scales *= np.float32(nearest.step)
        return CodeRows(levels, scales.reshape(stop - start, -1), None)

    def _nibbles(self, start: int, stop: int) -> npt.NDArray[np.uint8]:
        """Return the codes of the table of some rows, flat."""
        first, last = start * self.columns, stop * self.columns
        data = self.weights.rows(first // 2, -(-last // 2)).view(np.uint8)
        halves = np.stack([data >> 4, data & 15], axis=-1).reshape(-1)
        return halves[first % 2 : first % 2 + last - first]

    def _spread(self, first: int, last: int) -> Floats:
        """Return the factor of each of the flat weights ``first`` to ``last``."""
        block = self.state.block
        scales = self.scales(first // block, (last - 1) // block + 1)
        return np.repeat(scales, block)[first % block : first % block + last - first]
