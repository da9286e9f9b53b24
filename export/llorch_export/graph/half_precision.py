"""Weights in the type that a graph computes in: the rounding, what it loses, and the refusal of what does not
fit.

Input are chunks of float32 weights on their way to the data file, output the same in half precision. float32
passes through untouched.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import ml_dtypes
import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from llorch_serve.artifact.manifest import ComputeType
from llorch_serve.errors import ArtifactError

COMPUTE_TYPES: Final[dict[ComputeType, ir.DataType]] = {
    "float32": ir.DataType.FLOAT,
    "float16": ir.DataType.FLOAT16,
    "bfloat16": ir.DataType.BFLOAT16,
}

OTHER_TYPES: Final[dict[ComputeType, str]] = {
    "float16": "--precision bf16 or fp32, around int8 and int4 weights --compute-type bfloat16 or float32",
    "bfloat16": "--precision fp32, around int8 and int4 weights --compute-type float32",
}
"""What to export in, by the type whose range does not do."""


@dataclass(slots=True)
class Flushed:
    """Weights of one tensor that are too small for the type and became zero. total: all its weights."""

    count: int = 0
    total: int = 0


class WeightCast:
    """Rounds weights to one type and keeps account of what became zero. Used by one export, from one
    thread.
    """

    def __init__(self, compute_type: ComputeType) -> None:
        self.compute_type = compute_type
        self.dtype = COMPUTE_TYPES[compute_type]
        self.flushed: dict[str, Flushed] = {}

    def cast(self, name: str, weights: npt.NDArray[np.float32]) -> npt.NDArray[np.generic]:
        """Return a chunk of the tensor ``name`` rounded to nearest even. Raises ArtifactError if a value does
        not fit.
        """
        if self.compute_type == "float32":
            return weights
        with np.errstate(over="ignore"):  # counted below
            rounded = weights.astype(self.dtype.numpy())
        self._check_range(name, weights, rounded)
        self._count_flushed(name, weights, rounded)
        return rounded

    def check_range(self, name: str, weights: npt.NDArray[np.float32]) -> None:
        """Raise ArtifactError if a weight that will be stored in blocks is beyond the type it is unpacked
        to.
        """
        if self.compute_type != "float32":
            with np.errstate(over="ignore"):
                self._check_range(name, weights, weights.astype(self.dtype.numpy()))

    def _check_range(
        self, name: str, weights: npt.NDArray[np.float32], rounded: npt.NDArray[np.generic]
    ) -> None:
        beyond = np.isinf(rounded) & np.isfinite(weights)
        if beyond.any():
            largest, limit = (
                float(np.abs(weights[beyond]).max()),
                float(ml_dtypes.finfo(self.dtype.numpy()).max),
            )
            raise ArtifactError(
                f"{name}: {int(beyond.sum())} or more values are beyond {self.compute_type}'s largest, "
                f"{limit:g} "
                f"(found {largest:g}); export in another type: {OTHER_TYPES[self.compute_type]}"
            )

    def _count_flushed(
        self, name: str, weights: npt.NDArray[np.float32], rounded: npt.NDArray[np.generic]
    ) -> None:
        entry = self.flushed.setdefault(name, Flushed())
        entry.total += weights.size
        entry.count += int(np.count_nonzero(weights)) - int(np.count_nonzero(rounded))

    def underflow_notice(self) -> str | None:
        """Say what became zero, in one line; None if nothing did. To be asked after the weights are
        written.
        """
        count = sum(entry.count for entry in self.flushed.values())
        if not count:
            return None
        name, worst = max(self.flushed.items(), key=lambda item: item[1].count)
        return (
            f"{count:,} weights are below {self.compute_type}'s smallest value and became zero, "
            f"{worst.count:,} of them among "
            f"the {worst.total:,} of {name}"
        )
