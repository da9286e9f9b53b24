"""HQQ's packing: ``W_q`` with ``scale`` and ``zero``, and a small tensor for each of its settings.

The flat weights are cut into a grid: with axis 1 each row of the grid is a group, with axis 0 each column is
one. A word of ``W_q`` holds codes of rows that lie a part of the grid apart, the first in its upper bits.
Weights are ``scale * (code - zero)``.
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
    PackedMatrix,
    PackedModule,
    in_words,
    require_finite_scales,
    scale_type,
)
from llorch_export.checkpoint.packed.stored import StoredArray
from llorch_export.config.packed.hqq import HqqPacking
from llorch_serve.errors import ArtifactError

Floats = npt.NDArray[np.float32]

_CODES_A_WORD: Final = {8: 1, 4: 2, 3: 10, 2: 4, 1: 8}
"""By width; words have 32 bits for 3, else 8."""
_FLOATS: Final = ("F32", "F16", "BF16")
# How the weight was found, or what the tool's own kernels do with it.
_UNUSED: Final = (
    ".packing",
    ".unpack_view_dtype",
    ".view_as_float",
    ".compute_dtype",
    ".offload_meta",
    ".encoded_state_dict",
    ".stores_quant_config",
    ".channel_wise",
    ".optimize",
    ".round_zero",
)


@dataclass(frozen=True, slots=True)
class HqqReader:
    """Reads modules of one checkpoint."""

    packing: HqqPacking
    suffixes: tuple[str, ...] = (
        *(".W_q", ".scale", ".zero", ".nbits", ".group_size", ".axis", ".shape"),
        *(".quant_scale", ".quant_zero"),
        *_UNUSED,
    )

    def read(self, module: PackedModule) -> PackedMatrix:
        """See :class:`llorch_export.checkpoint.packed.base.PackedReader`."""
        grid = _grid(module)
        scales, zeros = module.part("scale"), module.part("zero")
        for place in (scales, zeros):
            place.require((grid.rows, 1) if grid.by_row else (1, grid.columns), _FLOATS)
        matrix = _Matrix(module.shape, grid, _words(module, grid), scales, zeros)
        form = in_words("HQQ", grid.bits, grid.group, module.shape[1])
        return PackedMatrix(form, matrix.values, matrix.codes() if grid.by_row else None)


@dataclass(frozen=True, slots=True)
class _Grid:
    """The flat weights as ``rows`` of ``columns``; ``by_row``: each row is a group, else each column."""

    bits: int
    rows: int
    columns: int
    by_row: bool

    @property
    def group(self) -> int:
        """How many weights share a scale."""
        return self.columns if self.by_row else self.rows

    @property
    def step(self) -> int:
        """How many rows of words there are: what lies between rows whose codes share words."""
        return -(-self.rows // _CODES_A_WORD[self.bits])


def _grid(module: PackedModule) -> _Grid:
    """Read the settings of a module. Raises ArtifactError for those that no weight can have."""
    bits, axis = _setting(module, "nbits"), _setting(module, "axis")
    count = math.prod(module.shape)
    # A weight without groups has a group for each output, or for each input.
    whole = module.shape[1 if axis == 1 else 0]
    group = _setting(module, "group_size") if "group_size" in module.parts else whole
    if bits not in _CODES_A_WORD or axis not in (0, 1) or group < 1 or count % group:
        raise ArtifactError(
            f"{module.part('W_q').path}: module {module.name} has nbits {bits}, axis {axis} and group_size "
            f"{group}, expected nbits of {', '.join(map(str, _CODES_A_WORD))}, axis 0 or 1 and groups that "
            f"divide {count} weights; the file is damaged, fetch it again"
        )
    for name in ("quant_scale", "quant_zero"):
        if name in module.parts and _setting(module, name):
            raise ArtifactError(
                f"{module.part(name).path}: module {module.name} has {name}, scales that are packed "
                "themselves, which cannot be read; export from the original weights"
            )
    shape = module.part("shape")
    shape.require((2,), ("I64", "I32"))
    if tuple(int(size) for size in shape.read()) != module.shape:
        raise ArtifactError(
            f"{shape.path}: tensor {shape.name} is {shape.read().tolist()}, expected {list(module.shape)}; "
            "the file is damaged or its config belongs to another model, fetch both again"
        )
    others = count // group
    return _Grid(bits, others, group, True) if axis == 1 else _Grid(bits, group, others, False)


def _setting(module: PackedModule, name: str) -> int:
    place = module.part(name)
    place.require((1,) if place.shape else (), ("I32", "I64", "U8"))
    return int(place.read().reshape(())[()])


def _words(module: PackedModule, grid: _Grid) -> StoredArray:
    """Return the words [step, columns], which may be stored as floating point. Raises ArtifactError if there
    are more or fewer.
    """
    place = module.part("W_q")
    kind, size = ("I32", 4) if grid.bits == 3 else ("U8", 1)
    if math.prod(place.shape) * place.dtype.itemsize != grid.step * grid.columns * size:
        raise ArtifactError(
            f"{place.path}: tensor {place.name} is {place.kind} {list(place.shape)}, expected {kind} "
            f"{[grid.step, grid.columns]} for {module.name} of {list(module.shape)}; the file is damaged or "
            "its config belongs to another model, fetch both again"
        )
    return dataclasses.replace(place, shape=(grid.step, grid.columns), kind=kind)


@dataclass(frozen=True, slots=True)
class _Matrix:
    shape: tuple[int, int]
    grid: _Grid
    words: StoredArray
    scales: StoredArray
    zeros: StoredArray

    def values(self, start: int, stop: int) -> Floats:
        """Read outputs ``start`` to ``stop``; see :attr:`PackedMatrix.load_rows`."""
        columns, wide = self.shape[1], self.grid.columns
        first, last = start * columns, stop * columns
        top, bottom = first // wide, -(-last // wide)
        found = self._rows(top, bottom).astype(np.float32)
        zeros, scales = (self._numbers(place, top, bottom) for place in (self.zeros, self.scales))
        with np.errstate(over="ignore", invalid="ignore"):
            found -= zeros
            found *= scales
        require_finite_scales(found, self.scales)
        return found.reshape(-1)[first - top * wide : last - top * wide].reshape(stop - start, columns)

    def codes(self) -> Codes | None:
        """Return the codes, if groups lie within outputs and all zero points are whole numbers of at most 8
        bits.
        """
        columns, group = self.shape[1], self.grid.group
        if columns % group:
            return None
        zeros = self.zeros.read().astype(np.float32)  # as small as scales
        if not np.isfinite(zeros).all() or (zeros != np.rint(zeros)).any():
            return None
        low, high = float(zeros.min()), float(zeros.max())
        fits = low >= 0 and high < 2**self.grid.bits and self.grid.bits > 1
        moved = 0 if fits else int(max(0, -low))
        if max(high, 2**self.grid.bits - 1) + moved > 255:
            return None

        def read(start: int, stop: int) -> CodeRows:
            top, bottom = (row * (columns // group) for row in (start, stop))
            found = self._rows(top, bottom).reshape(stop - start, columns) + np.uint8(moved)
            scales, points = (self._numbers(place, top, bottom) for place in (self.scales, self.zeros))
            require_finite_scales(scales, self.scales)
            shape = (stop - start, columns // group)
            return CodeRows(found, scales.reshape(shape), (points + moved).astype(np.uint8).reshape(shape))

        return Codes(
            bits=self.grid.bits if fits else 8,
            columns=columns,
            group=group,
            symmetric=False,
            scale_type=scale_type(self.scales),
            read=read,
        )

    def _rows(self, top: int, bottom: int) -> npt.NDArray[np.uint8]:
        """Return the codes of rows of the grid."""
        grid = self.grid
        each, parts, row = _CODES_A_WORD[grid.bits], [], top
        while row < bottom:
            place = row // grid.step
            end = min(bottom, (place + 1) * grid.step)
            stored = self.words.rows(row - place * grid.step, end - place * grid.step)
            words: npt.NDArray[np.int64] = stored.astype(np.int64)
            shift = (each - 1 - place) * grid.bits
            parts.append((words >> shift & (2**grid.bits - 1)).astype(np.uint8))
            row = end
        return np.concatenate(parts)

    def _numbers(self, place: StoredArray, top: int, bottom: int) -> Floats:
        """Return the scales or zero points of rows of the grid, [rows, 1] or [1, columns]."""
        found = place.rows(top, bottom) if self.grid.by_row else place.read()
        numbers: Floats = found.astype(np.float32)
        return numbers
