"""The plan of the external data file: every initialiser's place is known before a weight has been read.

A :class:`WeightJob` reads some source tensors once and gives one or more initialisers, which lie side by side in
the file in the order of the jobs. The writer runs the jobs one by one, so memory holds one job at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from llorch_serve.errors import ArtifactError

DATA_FILE: Final = "model.onnx.data"
_ALIGNMENT: Final = 64  # a cache line; the runtime maps pages itself and needs no more

Arrays = tuple[npt.NDArray[np.generic], ...]


@dataclass(frozen=True, slots=True)
class PlannedTensor:
    """An initialiser's place: ``nbytes`` at ``offset`` of the data file."""

    name: str
    dtype: ir.DataType
    shape: tuple[int, ...]
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class WeightJob:
    """Produces the arrays of ``tensors``, in their order, types and shapes."""

    tensors: tuple[PlannedTensor, ...]
    produce: Callable[[], Arrays]

    def arrays(self) -> Arrays:
        """Read, transform and check. Raises ArtifactError if a value is not finite."""
        arrays = self.produce()
        for tensor, array in zip(self.tensors, arrays, strict=True):
            assert array.shape == tensor.shape, (tensor, array.shape)
            assert array.dtype == tensor.dtype.numpy(), (tensor, array.dtype)
            if array.dtype.kind == "f" and not np.isfinite(array).all():
                bad = int(array.size - np.isfinite(array).sum())
                raise ArtifactError(
                    f"{tensor.name}: {bad} of {array.size} values are NaN or infinite, expected finite weights; "
                    "the checkpoint is damaged, download it again"
                )
        return arrays


class WeightPlan:
    """Collects jobs and hands out graph values for their tensors."""

    def __init__(self) -> None:
        self.jobs: list[WeightJob] = []
        self.values: list[ir.Value] = []
        self.total_bytes = 0

    def add(
        self, specs: Sequence[tuple[str, ir.DataType, tuple[int, ...]]], produce: Callable[[], Arrays]
    ) -> list[ir.Value]:
        """Plan a job that gives one array for each of ``specs`` (name, type, shape)."""
        tensors = []
        for name, dtype, shape in specs:
            offset = -(-self.total_bytes // _ALIGNMENT) * _ALIGNMENT
            nbytes = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
            tensors.append(PlannedTensor(name, dtype, shape, offset, int(nbytes)))
            self.total_bytes = offset + int(nbytes)
        self.jobs.append(WeightJob(tuple(tensors), produce))
        return [self._value(tensor) for tensor in tensors]

    def alias(self, value: ir.Value, name: str, shape: tuple[int, ...]) -> ir.Value:
        """Return a value of another shape over the same bytes, so that tied weights are stored and mapped once."""
        tensor = value.const_value
        assert isinstance(tensor, ir.ExternalTensor)
        assert np.prod(shape) == np.prod(tensor.shape.numpy())
        assert tensor.offset is not None
        assert tensor.length is not None
        return self._value(PlannedTensor(name, tensor.dtype, shape, tensor.offset, tensor.length))

    def _value(self, tensor: PlannedTensor) -> ir.Value:
        shape = ir.Shape(tensor.shape)
        external = ir.ExternalTensor(
            DATA_FILE, tensor.offset, tensor.nbytes, tensor.dtype, shape=shape, name=tensor.name
        )
        value = ir.Value(
            name=tensor.name,
            type=ir.TensorType(tensor.dtype),
            shape=ir.Shape(tensor.shape),
            const_value=external,
        )
        self.values.append(value)
        return value
