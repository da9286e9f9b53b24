"""The plan of the external data file: every initialiser's place is known before a weight has been read.

A :class:`WeightJob` reads some source tensors and gives one or more initialisers, which lie side by side in
the file in the order of the jobs. A job gives its arrays in chunks of rows, and the writer runs the jobs one
by one, so memory holds a chunk at a time, whatever the size of a matrix.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from llorch_serve.errors import ArtifactError

DATA_FILE: Final = "model.onnx.data"
SCALES_FILE: Final = "kv_scales.bin"
_ALIGNMENT: Final = 64  # a cache line; the runtime maps pages itself and needs no more

Arrays = tuple[npt.NDArray[np.generic], ...]
ArraySpec = tuple[str, ir.DataType, tuple[int, ...]]
"""Name, type and shape of an array of the data file."""


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
    """Produces the arrays of ``tensors``: chunks that hold some rows (first axis) of each, from the first row
    on.
    """

    tensors: tuple[PlannedTensor, ...]
    produce: Callable[[], Iterator[Arrays]]

    def chunks(self) -> Iterator[Arrays]:
        """Read, transform and check, a chunk at a time. Raises ArtifactError if a value is not finite."""
        rows = [0] * len(self.tensors)
        for arrays in self.produce():
            for index, (tensor, array) in enumerate(zip(self.tensors, arrays, strict=True)):
                assert array.shape[1:] == tensor.shape[1:], (tensor, array.shape)
                assert array.dtype == tensor.dtype.numpy(), (tensor, array.dtype)
                rows[index] += array.shape[0]
                if tensor.dtype.is_floating_point():
                    _check_finite(tensor.name, array)
            yield arrays
            del arrays, array  # else they would live on while the next chunk is made
        assert rows == [tensor.shape[0] for tensor in self.tensors], (self.tensors, rows)


def _check_finite(name: str, array: npt.NDArray[np.generic]) -> None:
    if not np.isfinite(array).all():
        bad = int(array.size - np.isfinite(array).sum())
        raise ArtifactError(
            f"{name}: {bad} of {array.size} values are NaN or infinite, expected finite weights; "
            "the checkpoint is damaged, download it again"
        )


class WeightPlan:
    """Collects jobs and hands out graph values for their tensors.

    file: the data file that the jobs fill. others: jobs of other files, by name, that give the same arrays
        for the same tensors, by name, type and shape, and are not done twice.
    """

    def __init__(
        self, file: str = DATA_FILE, others: Mapping[str, Sequence[WeightJob]] | None = None
    ) -> None:
        self.file = file
        self._others = {
            _specs(job.tensors): (job.tensors, name) for name, jobs in (others or {}).items() for job in jobs
        }
        self.jobs: list[WeightJob] = []
        self.values: list[ir.Value] = []
        self.total_bytes = 0

    def add(self, specs: Sequence[ArraySpec], produce: Callable[[], Arrays]) -> list[ir.Value]:
        """Plan a job that gives one whole array for each of ``specs`` (name, type, shape)."""

        def once() -> Iterator[Arrays]:
            yield produce()

        return self.stream(specs, once)

    def stream(
        self,
        specs: Sequence[ArraySpec],
        produce: Callable[[], Iterator[Arrays]],
    ) -> list[ir.Value]:
        """Plan a job that gives chunks of rows of ``specs`` (name, type, shape), one array for each."""
        there = self._others.get(tuple(specs))
        if there is not None:
            shared, file = there
            return [self._value(tensor, file=file) for tensor in shared]
        tensors = []
        for name, dtype, shape in specs:
            offset = -(-self.total_bytes // _ALIGNMENT) * _ALIGNMENT
            nbytes = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
            tensors.append(PlannedTensor(name, dtype, shape, offset, int(nbytes)))
            self.total_bytes = offset + int(nbytes)
        self.jobs.append(WeightJob(tuple(tensors), produce))
        return [self._value(tensor) for tensor in tensors]

    def alias(self, value: ir.Value, name: str, shape: tuple[int, ...]) -> ir.Value:
        """Return a value of another shape over the same bytes, so that tied weights are stored and mapped
        once.
        """
        tensor = value.const_value
        assert isinstance(tensor, ir.ExternalTensor)
        assert np.prod(shape) == np.prod(tensor.shape.numpy())
        assert tensor.offset is not None
        assert tensor.length is not None
        planned = PlannedTensor(name, tensor.dtype, shape, tensor.offset, tensor.length)
        return self._value(planned, file=str(tensor.location))

    def split(self, value: ir.Value, parts: int) -> list[ir.Value]:
        """Return equal parts of a matrix's rows, over the same bytes, which take the place of ``value``."""
        tensor = value.const_value
        assert isinstance(tensor, ir.ExternalTensor)
        assert tensor.offset is not None
        assert tensor.length is not None
        rows, columns = tensor.shape.numpy()
        assert rows % parts == 0
        self.values.remove(value)
        size = tensor.length // parts
        return [
            self._value(
                PlannedTensor(
                    f"{tensor.name}.{part}",
                    tensor.dtype,
                    (rows // parts, columns),
                    tensor.offset + part * size,
                    size,
                ),
                file=str(tensor.location),
            )
            for part in range(parts)
        ]

    def reinterpret(self, value: ir.Value, dtype: ir.DataType, shape: tuple[int, ...]) -> ir.Value:
        """Return the same bytes as a value of another type and shape, which takes the place of ``value``."""
        tensor = value.const_value
        assert isinstance(tensor, ir.ExternalTensor)
        assert tensor.offset is not None
        assert tensor.length is not None
        assert tensor.length * 8 == np.prod(shape, dtype=np.int64) * dtype.bitwidth
        self.values.remove(value)
        planned = PlannedTensor(tensor.name, dtype, shape, tensor.offset, tensor.length)
        return self._value(planned, file=str(tensor.location))

    def elsewhere(
        self, name: str, dtype: npt.DTypeLike, shape: tuple[int, ...], *, file: str, offset: int
    ) -> ir.Value:
        """Return a value whose bytes lie in another file of the artifact, which no job here writes."""
        kind = np.dtype(dtype)
        nbytes = int(np.prod(shape, dtype=np.int64)) * kind.itemsize
        return self._value(
            PlannedTensor(name, ir.DataType.from_numpy(kind), shape, offset, nbytes), file=file
        )

    def _value(self, tensor: PlannedTensor, *, file: str | None = None) -> ir.Value:
        shape = ir.Shape(tensor.shape)
        external = ir.ExternalTensor(
            file or self.file, tensor.offset, tensor.nbytes, tensor.dtype, shape=shape, name=tensor.name
        )
        value = ir.Value(
            name=tensor.name,
            type=ir.TensorType(tensor.dtype),
            shape=ir.Shape(tensor.shape),
            const_value=external,
        )
        self.values.append(value)
        return value


@dataclass(frozen=True, slots=True)
class Part:
    """What of a model a graph has, and the files that its weights are in.

    weights: the plan of its data file. layers: None: all. scales: the file with the scales of a KV cache in
    int8, of those layers.
    """

    weights: WeightPlan
    layers: range | None = None
    scales: str = SCALES_FILE


def _specs(tensors: Sequence[PlannedTensor]) -> tuple[ArraySpec, ...]:
    return tuple((tensor.name, tensor.dtype, tensor.shape) for tensor in tensors)
