"""Matrices that a tool has packed, as codes, scales and zero points: what precision ``source`` carries over.

Readers of packed formats make :class:`Codes`; :mod:`llorch_export.quantize.carried` puts them into the
runtime's own layout.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from llorch_serve.artifact.manifest import ScaleType
from llorch_serve.errors import ArtifactError

ZeroKind: TypeAlias = Literal["points", "subtracted", "added"]
"""What is made of the numbers beside codes. Weights are ``scale * (code - number)``,
``scale * code - number``, or ``scale * (code - 2 ** (bits - 1)) + number``.
"""


@dataclass(frozen=True, slots=True)
class CodeRows:
    """Some rows of a packed matrix: weights are ``scales * (codes - zero_points)``, or what
    :attr:`Codes.zero_kind` says.

    codes: uint8 [rows, columns], or the numbers of levels where there are any. scales: float32 [rows,
        groups]. zero_points: [rows, groups], uint8, or float32 where they are no whole numbers; None: all are
        ``2 ** (bits - 1)``.
    """

    codes: npt.NDArray[np.uint8]
    scales: npt.NDArray[np.float32]
    zero_points: npt.NDArray[np.uint8] | npt.NDArray[np.float32] | None


@dataclass(frozen=True, slots=True)
class Levels:
    """The few values that a format has, where they are no whole numbers in order.

    values: float32, 16 or 256 of them; times a scale each is a weight.
    codes: uint8, the code of 8 bits around 128 that comes nearest to each; None: 8 bits do not come near.
    """

    values: npt.NDArray[np.float32]
    codes: npt.NDArray[np.uint8] | None


def finite_values(dtype: np.dtype[np.generic]) -> npt.NDArray[np.float32]:
    """Return the value of each of the 256 bytes of a type, and 0 for what is no number."""
    values = np.arange(256, dtype=np.uint8).view(dtype).astype(np.float32)
    return np.where(np.isfinite(values), values, np.float32(0))


ReadBytes = Callable[[int, int], npt.NDArray[np.uint8]]


@dataclass(frozen=True, slots=True)
class ScaleTable:
    """Scales that are stored as bytes: a scale is ``values()[byte]``, or with ``factors`` that times the
    factor of its block, plus ``offset``.

    values: gives float32 [256]. read: gives the bytes of rows ``start`` to ``stop`` (excluded), uint8 [rows,
        groups], without the codes. factors: of ``block`` scales each, in the order of rows and groups.
    """

    values: Callable[[], npt.NDArray[np.float32]]
    read: ReadBytes
    factors: npt.NDArray[np.float32] | None = None
    block: int = 1
    offset: float = 0.0


@dataclass(frozen=True, slots=True)
class Codes:
    """A packed matrix [out, in] as whole numbers of ``bits`` bits with a scale for every ``group`` columns.

    group: columns that share a scale, ``columns`` at most; the last group may be shorter.
    symmetric: rows come without zero points.
    scale_type: the narrowest type that holds every scale as it is.
    zero_type: of zero points that are no whole numbers, the narrowest type that holds every one of them;
        None: they are whole numbers of ``bits`` bits.
    zero_kind: what is made of them; ``points`` where they are whole.
    levels: where codes are numbers of levels; ``bits`` is then the width of what stands for them.
    scale_table: where scales are bytes in the file.
    across: outputs that share scales and zero points, which lie as many rows apart as all rows over it: then
        each column has its own (``group`` is 1), and rows repeat; 0: groups lie within rows.
    input_scales: what inputs are multiplied by, float32 [columns], in the matrix's own order; None: nothing.
        The matrix is that which takes the inputs as they are.
    rounding: the most by which a value differs from the matrix's, as a share of the largest that its scale
        allows: more than 0 where the matrix holds values that are no whole numbers.
    input_order: column ``j`` of the codes is column ``input_order[j]`` of the matrix, intp [columns]; None:
        they are in order.
    read: reads rows ``start`` to ``stop`` (excluded). Raises ArtifactError if they cannot be read, or hold a
        scale that is not finite, a code or a zero point out of range.
    """

    bits: int
    columns: int
    group: int
    symmetric: bool
    scale_type: ScaleType
    read: Callable[[int, int], CodeRows]
    input_order: npt.NDArray[np.intp] | None = None
    rounding: float = 0.0
    zero_type: ScaleType | None = None
    levels: Levels | None = None
    scale_table: ScaleTable | None = None
    across: int = 0
    zero_kind: ZeroKind = "points"
    input_scales: npt.NDArray[np.float32] | None = None

    @property
    def takes_inputs_as_they_are(self) -> bool:
        """Whether rows of the codes are rows of the matrix."""
        return self.input_order is None and self.input_scales is None

    @property
    def groups(self) -> int:
        """How many scales a row has."""
        return -(-self.columns // self.group)

    def values(self, start: int, stop: int) -> npt.NDArray[np.float32]:
        """Return rows ``start`` to ``stop`` (excluded) of the matrix: float32 [stop - start, columns], each
        product rounded once.
        """
        values = self._products(self.read(start, stop))
        if self.input_order is not None:
            found = np.empty_like(values)
            found[:, self.input_order] = values
            values = found
        if self.input_scales is not None:
            with np.errstate(over="ignore"):  # found where the weights are written
                values *= self.input_scales
        return values

    def _products(self, rows: CodeRows) -> npt.NDArray[np.float32]:
        """Return codes times scales [rows, columns], in the order of the codes."""
        middle = 2 ** (self.bits - 1)
        if self.levels is not None:
            values = self.levels.values[rows.codes]
        elif rows.zero_points is None or self.zero_kind == "added":
            values = rows.codes.astype(np.float32) - np.float32(middle)
        elif self.zero_kind == "subtracted":
            values = rows.codes.astype(np.float32)
        else:
            values = rows.codes.astype(np.float32) - self._spread(rows.zero_points.astype(np.float32))
        with np.errstate(over="ignore", invalid="ignore"):  # found where the weights are written
            values *= self._spread(rows.scales)
            if self.zero_kind != "points":
                assert rows.zero_points is not None
                numbers = self._spread(rows.zero_points.astype(np.float32))
                values = values + numbers if self.zero_kind == "added" else values - numbers
        return values

    def finite(self, name: str) -> Codes:
        """Return the same matrix, of which rows are not read if some of their values are not finite, since
        the runtime would make these of them. name: the tensor's, for the error.
        """
        read = self.read

        def checked(start: int, stop: int) -> CodeRows:
            rows = read(start, stop)
            largest = np.float32(2**self.bits if self.levels is None else np.abs(self.levels.values).max())
            beside = np.float32(0)
            if rows.zero_points is not None and rows.zero_points.dtype == np.float32:
                most = np.abs(rows.zero_points).max()
                largest, beside = (largest + most, beside) if self.zero_kind == "points" else (largest, most)
            with np.errstate(over="ignore", invalid="ignore"):
                large = not np.isfinite(np.abs(rows.scales) * largest + beside).all()
            if large and not np.isfinite(self._products(rows)).all():
                raise ArtifactError(
                    f"{name}: codes times scales give NaN or infinity; the weights are damaged, fetch them "
                    "again"
                )
            return rows

        return replace(self, read=checked)

    def _spread(self, of_groups: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
        """Return [rows, columns] of [rows, groups]."""
        return np.repeat(of_groups, self.group, axis=1)[:, : self.columns]

    def part(self, start: int, step: int = 1) -> Codes:
        """Return the matrix of every ``step``-th row from row ``start`` on."""
        if start == 0 and step == 1:
            return self
        read = self.read

        def some(first: int, last: int) -> CodeRows:
            rows = read(start + first * step, start + (last - 1) * step + 1)
            zero_points = None if rows.zero_points is None else rows.zero_points[::step]
            return CodeRows(rows.codes[::step], rows.scales[::step], zero_points)

        def some_bytes(table: ScaleTable) -> ReadBytes:
            return lambda first, last: table.read(start + first * step, start + (last - 1) * step + 1)[::step]

        return replace(self, read=some, scale_table=self._table_of_any_rows(some_bytes), across=0)

    def in_order(self, places: npt.NDArray[np.intp]) -> Codes:
        """Return the matrix whose row ``i`` is this one's row ``places[i]``."""
        read = self.read

        def moved(start: int, stop: int) -> CodeRows:
            # Rows move only within their head, so those that are wanted lie close together.
            first = int(places[start:stop].min())
            rows, wanted = read(first, int(places[start:stop].max()) + 1), places[start:stop] - first
            zero_points = None if rows.zero_points is None else rows.zero_points[wanted]
            return CodeRows(rows.codes[wanted], rows.scales[wanted], zero_points)

        def moved_bytes(table: ScaleTable) -> ReadBytes:
            def read(start: int, stop: int) -> npt.NDArray[np.uint8]:
                first, last = int(places[start:stop].min()), int(places[start:stop].max())
                return table.read(first, last + 1)[places[start:stop] - first]

            return read

        return replace(self, read=moved, scale_table=self._table_of_any_rows(moved_bytes), across=0)

    def _table_of_any_rows(self, moved: Callable[[ScaleTable], ReadBytes]) -> ScaleTable | None:
        """Return the table of scales with another reader, if it does not depend on where a row lies."""
        table = self.scale_table
        return None if table is None or table.factors is not None else replace(table, read=moved(table))
