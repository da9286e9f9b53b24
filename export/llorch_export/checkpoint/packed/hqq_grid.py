"""The grid that HQQ cuts a matrix's flat weights into, and pieces of it.

Input are the small tensors beside the weights, a setting each.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from llorch_export.checkpoint.packed.base import PackedModule
from llorch_serve.errors import ArtifactError

CODES_A_WORD: Final = {8: 1, 4: 2, 3: 10, 2: 4, 1: 8}
"""By width; words have 32 bits for 3, else 8."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Rows ``top`` to ``bottom`` of the grid and columns ``left`` to ``right``: all of them, or one row's."""

    top: int
    bottom: int
    left: int
    right: int


@dataclass(frozen=True, slots=True)
class HqqGrid:
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
        return -(-self.rows // CODES_A_WORD[self.bits])

    def pieces(self, first: int, last: int) -> Iterator[Piece]:
        """Cut the flat weights from ``first`` to ``last`` (excluded) where rows of the grid begin and end."""
        wide = self.columns
        while first < last:
            row, left = divmod(first, wide)
            if left or last - first < wide:
                end = min(last, (row + 1) * wide)
                yield Piece(row, row + 1, left, end - row * wide)
                first = end
            else:
                yield Piece(row, last // wide, 0, wide)
                first = last // wide * wide


def hqq_grid(module: PackedModule) -> HqqGrid:
    """Read the settings of a module. Raises ArtifactError for those that no weight can have."""
    bits, axis = _setting(module, "nbits"), _setting(module, "axis")
    count = math.prod(module.shape)
    # A weight without groups has a group for each output, or for each input.
    whole = module.shape[1 if axis == 1 else 0]
    group = _setting(module, "group_size") if "group_size" in module.parts else whole
    if bits not in CODES_A_WORD or axis not in (0, 1) or group < 1 or count % group:
        raise ArtifactError(
            f"{module.part('W_q').path}: module {module.name} has nbits {bits}, axis {axis} and group_size "
            f"{group}, expected nbits of {', '.join(map(str, CODES_A_WORD))}, axis 0 or 1 and groups that "
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
    return HqqGrid(bits, others, group, True) if axis == 1 else HqqGrid(bits, group, others, False)


def _setting(module: PackedModule, name: str) -> int:
    place = module.part(name)
    place.require((1,) if place.shape else (), ("I32", "I64", "U8"))
    return int(place.read().reshape(())[()])
