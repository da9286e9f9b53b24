"""Scales and zero points that blocks of a matrix share, whatever the block: a tensor, an output, a group."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from llorch_export.checkpoint.packed.base import PackedModule, require_finite_scales
from llorch_export.checkpoint.packed.stored import StoredArray
from llorch_serve.errors import ArtifactError

Floats = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Grid:
    """Cuts a matrix [out, in] into blocks of ``rows`` outputs and ``columns`` inputs; the last may be
    smaller.
    """

    shape: tuple[int, int]
    rows: int
    columns: int

    @staticmethod
    def of(shape: tuple[int, int], block: tuple[int, int]) -> Grid:
        """Return the grid of blocks, in which -1 stands for all outputs or inputs."""
        rows, columns = (
            size if part == -1 else min(part, size) for size, part in zip(shape, block, strict=True)
        )
        return Grid(shape, rows, columns)

    @staticmethod
    def of_groups(module: PackedModule, place: StoredArray, *, by_input: bool = False) -> Grid:
        """Return as many equal groups of inputs as ``place`` holds numbers for. by_input: these lie [groups,
        out], else [out, groups]. Raises ArtifactError if groups do not come out even.
        """
        (rows, columns), shape = module.shape, place.shape[::-1] if by_input else place.shape
        if len(shape) != 2 or shape[0] != rows or not shape[1] or columns % shape[1]:
            expected = f"[groups, {rows}]" if by_input else f"[{rows}, groups]"
            raise ArtifactError(
                f"{place.path}: tensor {place.name} is {list(place.shape)}, expected {expected} with equal "
                f"groups of the {columns} inputs of {module.name}; the file is damaged or its config belongs "
                "to another model, fetch both again"
            )
        return Grid(module.shape, 1, columns // shape[1])

    @property
    def size(self) -> tuple[int, int]:
        """How many blocks lie along the outputs and along the inputs."""
        return -(-self.shape[0] // self.rows), -(-self.shape[1] // self.columns)

    def require(self, module: PackedModule, place: StoredArray) -> None:
        """Raise ArtifactError unless ``place`` holds a number for each block."""
        expected = self.size
        if place.shape == expected or (expected == (1, 1) and place.shape in ((1,), ())):
            return
        if expected[1] == 1 and place.shape == expected[:1]:
            return
        raise ArtifactError(
            f"{place.path}: tensor {place.name} is {list(place.shape)}, expected {list(expected)} for "
            f"{module.name} of {list(self.shape)} as its config says; the file is damaged or its config "
            "belongs to another model, fetch both again"
        )

    def read(self, place: StoredArray, start: int, stop: int) -> npt.NDArray[np.generic]:
        """Return what outputs ``start`` to ``stop`` have: [stop - start, blocks along the inputs]."""
        blocks, across = self.size
        if blocks == 1:
            found = place.read().reshape(1, across)
            return np.broadcast_to(found, (stop - start, across))
        first = start // self.rows
        found = place.rows(first, (stop - 1) // self.rows + 1).reshape(-1, across)
        return found[np.arange(start, stop) // self.rows - first]

    def scales(self, place: StoredArray, start: int, stop: int) -> Floats:
        """Return scales as :meth:`read` does. Raises ArtifactError if one is not finite."""
        found = self.read(place, start, stop).astype(np.float32)
        require_finite_scales(found, place)
        return found

    def spread(self, values: Floats) -> Floats:
        """Return [rows, inputs] of [rows, blocks along the inputs]."""
        return np.repeat(values, self.columns, axis=1)[:, : self.shape[1]]
