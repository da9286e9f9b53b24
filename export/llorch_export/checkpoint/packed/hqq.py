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

from llorch_export.checkpoint.base import CHUNK_ELEMENTS
from llorch_export.checkpoint.codes import CodeRows, Codes
from llorch_export.checkpoint.packed.base import (
    FLOATS,
    PackedMatrix,
    PackedModule,
    in_words,
    require_finite_scales,
    scale_type,
)
from llorch_export.checkpoint.packed.hqq_grid import CODES_A_WORD, HqqGrid, Piece, hqq_grid
from llorch_export.checkpoint.packed.stored import StoredArray
from llorch_export.checkpoint.packed.words import strided_codes
from llorch_export.config.packed.hqq import HqqPacking
from llorch_serve.errors import ArtifactError

Floats = npt.NDArray[np.float32]

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
        grid = hqq_grid(module)
        scales, zeros = module.part("scale"), module.part("zero")
        for place in (scales, zeros):
            place.require((grid.rows, 1) if grid.by_row else (1, grid.columns), FLOATS)
        matrix = _Matrix(module.shape, grid, _words(module, grid), scales, zeros)
        form = (
            in_words("HQQ", grid.bits, grid.group, module.shape[1])
            if grid.by_row
            else f"HQQ, {grid.bits} bits, groups of {grid.group} along outputs"
        )
        return PackedMatrix(form, matrix.values, matrix.codes() if grid.by_row else matrix.codes_across())


def _words(module: PackedModule, grid: HqqGrid) -> StoredArray:
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
    grid: HqqGrid
    words: StoredArray
    scales: StoredArray
    zeros: StoredArray

    def values(self, start: int, stop: int) -> Floats:
        """Read outputs ``start`` to ``stop``; see :attr:`PackedMatrix.load_rows`."""
        columns = self.shape[1]
        pieces = [self._piece(piece) for piece in self.grid.pieces(start * columns, stop * columns)]
        return np.concatenate(pieces).reshape(stop - start, columns)

    def _piece(self, piece: Piece) -> Floats:
        found = self._rows(piece).astype(np.float32)
        zeros, scales = (self._numbers(place, piece) for place in (self.zeros, self.scales))
        with np.errstate(over="ignore", invalid="ignore"):
            found -= zeros
            found *= scales
        require_finite_scales(found, self.scales)
        return found.reshape(-1)

    def codes(self) -> Codes | None:
        """Return the codes, if groups lie within outputs."""
        columns, group = self.shape[1], self.grid.group
        if columns % group:
            return None
        low, high, whole = self._zero_points()
        if not math.isfinite(low) or not math.isfinite(high):
            return None
        bits, moved = self.grid.bits, 0
        if whole and not (bits > 1 and low >= 0 and high < 2**bits):  # zero points that are no codes
            moved = int(max(0, -low))
            bits, whole = 8, max(high, 2**bits - 1) + moved <= 255
        if not whole:  # zero points stay numbers beside the codes
            bits, moved = self.grid.bits, 0
            if bits == 1:
                return None

        def read(start: int, stop: int) -> CodeRows:
            top, bottom = (row * (columns // group) for row in (start, stop))
            piece = Piece(top, bottom, 0, group)
            found = self._rows(piece).reshape(stop - start, columns) + np.uint8(moved)
            scales, points = (self._numbers(place, piece) for place in (self.scales, self.zeros))
            require_finite_scales(scales, self.scales)
            shape = (stop - start, columns // group)
            points = points.reshape(shape)
            zero_points = (points + moved).astype(np.uint8) if whole else points
            return CodeRows(found, scales.reshape(shape), zero_points)

        return Codes(
            bits=bits,
            columns=columns,
            group=group,
            symmetric=False,
            scale_type=scale_type(self.scales),
            read=read,
            zero_type=None if whole else scale_type(self.zeros),
        )

    def codes_across(self) -> Codes | None:
        """Return the codes whose groups lie along outputs, if those of a group lie the same number of outputs
        apart.
        """
        (rows, columns), group = self.shape, self.grid.group
        if rows % group:
            return None
        period = rows // group

        def numbers(place: StoredArray, start: int, stop: int) -> Floats:
            stored, first = dataclasses.replace(place, shape=(period, columns)), start % period
            if first + stop - start <= period:
                found: Floats = stored.rows(first, first + stop - start).astype(np.float32)
            else:
                found = stored.read().astype(np.float32)[np.arange(start, stop) % period]
            require_finite_scales(found, place)
            return found

        def read(start: int, stop: int) -> CodeRows:
            pieces = self.grid.pieces(start * columns, stop * columns)
            codes = np.concatenate([self._rows(piece).reshape(-1) for piece in pieces])
            scales, zeros = (numbers(place, start, stop) for place in (self.scales, self.zeros))
            return CodeRows(codes.reshape(stop - start, columns), scales, zeros)

        return Codes(
            bits=self.grid.bits,
            columns=columns,
            group=1,
            symmetric=False,
            scale_type=scale_type(self.scales),
            read=read,
            zero_type=scale_type(self.zeros),
            across=group,
        )

    def _zero_points(self) -> tuple[float, float, bool]:
        """Return the smallest and the largest zero point, and whether all are whole numbers."""
        low, high, whole = math.inf, -math.inf, True
        for start in range(0, self.grid.rows, CHUNK_ELEMENTS):
            zeros = self.zeros.rows(start, min(start + CHUNK_ELEMENTS, self.grid.rows)).astype(np.float32)
            if not np.isfinite(zeros).all():
                return -math.inf, math.inf, False
            low, high = min(low, float(zeros.min())), max(high, float(zeros.max()))
            whole = whole and bool((zeros == np.rint(zeros)).all())
        return low, high, whole

    def _rows(self, piece: Piece) -> npt.NDArray[np.uint8]:
        """Return the codes of a piece of the grid."""
        shifts = range((CODES_A_WORD[self.grid.bits] - 1) * self.grid.bits, -1, -self.grid.bits)
        rows, columns = (piece.top, piece.bottom), (piece.left, piece.right)
        return strided_codes(self.words, self.grid.bits, shifts, rows, columns)

    def _numbers(self, place: StoredArray, piece: Piece) -> Floats:
        """Return the scales or zero points of a piece, [rows, 1] or [1, columns]."""
        if self.grid.by_row:
            found = place.rows(piece.top, piece.bottom)
        else:
            found = place.columns(piece.left, piece.right)
        numbers: Floats = found.astype(np.float32)
        return numbers
