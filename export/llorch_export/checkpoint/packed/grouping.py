"""Inputs that belong to scattered groups, brought into an order in which each group lies together."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from llorch_export.checkpoint.packed.stored import StoredArray
from llorch_serve.errors import ArtifactError


@dataclass(frozen=True, slots=True)
class Grouping:
    """How inputs share scales, once they are in order.

    size: inputs that lie together and share a scale. stored: the stored group of each such run.
    order: as of :class:`~llorch_export.checkpoint.codes.Codes`.
    """

    size: int
    stored: npt.NDArray[np.intp]
    order: npt.NDArray[np.intp] | None

    def ordered(self, codes: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
        """Return codes [rows, inputs] in this order."""
        return codes if self.order is None else codes[:, self.order]


def grouping(place: StoredArray | None, columns: int, group: int, *, unset: int | None = None) -> Grouping:
    """Read to which group each input belongs.

    place: int [columns]; None: groups of ``group`` inputs follow each other, as they do where an entry is
        ``unset``.
    Raises ArtifactError if an entry names no group.
    """
    groups = -(-columns // group)
    plain = Grouping(group, np.arange(groups), None)
    if place is None:
        return plain
    place.require((columns,), ("I32", "I64"))
    index = place.read().astype(np.intp)
    if unset is not None and (index == unset).any():
        return plain
    if index.min() < 0 or index.max() >= groups:
        raise ArtifactError(
            f"{place.path}: tensor {place.name} names groups {index.min()} to {index.max()}, and there are "
            f"{groups} of {group} inputs; the file is damaged or its config belongs to another model, fetch "
            "both again"
        )
    if np.array_equal(index, np.arange(columns) // group):
        return plain
    order = np.argsort(index, kind="stable")
    # Files may have groups of any number of inputs; runs of the same length within all of them share a scale.
    counts = [int(count) for count in np.bincount(index) if count]
    size = math.gcd(*counts[:-1]) or counts[-1]
    unchanged = np.array_equal(order, np.arange(columns))
    return Grouping(size, index[order[::size]], None if unchanged else order)
