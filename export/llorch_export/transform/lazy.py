"""New lazy tensors out of old ones: the pieces that all passes are made of.

A pass takes the tensors of a checkpoint by name and returns a mapping of the same kind, with some replaced by
tensors that compute while they are read. Sums are taken in float64 and rounded once. A replaced tensor never
carries stored blocks, since they are those of the old weights.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from llorch_export.checkpoint.base import CHUNK_ELEMENTS, LazyTensor
from llorch_export.transform.basis import Basis

Tensors = Mapping[str, LazyTensor]
Float64 = npt.NDArray[np.float64]
Vector = Callable[[], Float64]
"""Computes a vector when it is first needed."""


def computed(tensor: LazyTensor, load: Callable[[int, int], Float64]) -> LazyTensor:
    """Return a tensor of the same name and shape whose rows ``load`` computes."""

    def load_rows(start: int, stop: int) -> npt.NDArray[np.float32]:
        with np.errstate(over="ignore"):  # found and reported when the weights are written
            return load(start, stop).astype(np.float32)

    return LazyTensor(tensor.name, tensor.shape, "F32", load_rows)


def scaled_rows(tensor: LazyTensor, scale: Vector) -> LazyTensor:
    """Return ``diag(scale) W``, or ``scale * b`` of a bias; ``scale`` [rows]."""

    def load(start: int, stop: int) -> Float64:
        rows = tensor.load_rows(start, stop).astype(np.float64)
        return (rows.T * scale()[start:stop]).T

    return computed(tensor, load)


def scaled_columns(tensor: LazyTensor, scale: Vector) -> LazyTensor:
    """Return ``W diag(scale)``; ``scale`` [columns]."""
    return computed(tensor, lambda start, stop: tensor.load_rows(start, stop) * scale())


def rotated_columns(tensor: LazyTensor, basis: Basis) -> LazyTensor:
    """Return ``W (I x Q)``: each group of ``basis.size`` columns turned."""

    def load(start: int, stop: int) -> Float64:
        rows = tensor.load_rows(start, stop)
        return basis.rotated(rows.reshape(len(rows), -1, basis.size)).reshape(rows.shape)

    return computed(tensor, load)


def rotated_rows(tensor: LazyTensor, basis: Basis) -> LazyTensor:
    """Return ``(I x Q^T) W``, or ``b (I x Q)`` of a bias: each group of ``basis.size`` rows turned.

    A group is read as a whole; where it is the whole matrix, memory holds the result in float32 once.
    """
    size = basis.size

    def load(start: int, stop: int) -> Float64:
        first, last = start // size * size, -(-stop // size) * size
        rows = tensor.load_rows(first, last)
        columns = np.moveaxis(rows.reshape(-1, size, *tensor.shape[1:]), 1, -1)
        turned = np.moveaxis(basis.rotated(columns), -1, 1)
        return turned.reshape(rows.shape)[start - first : stop - first]

    if len(tensor.shape) == 1 or size < tensor.shape[0]:
        return computed(tensor, load)

    def load_whole() -> npt.NDArray[np.float32]:
        matrix = np.empty(tensor.shape, np.float32)
        done = 0
        for chunk in tensor.row_chunks():
            matrix[done : done + len(chunk)] = chunk
            done += len(chunk)
        step = max(1, CHUNK_ELEMENTS // size)
        for start in range(0, tensor.shape[1], step):
            matrix[:, start : start + step] = basis.rotated(matrix[:, start : start + step].T).T
        return matrix

    return LazyTensor(
        tensor.name,
        tensor.shape,
        "F32",
        lambda start, stop: load_whole()[start:stop],
        load_whole=load_whole,
    )


def constant(vector: Float64) -> Vector:
    """Return a vector that is already there as one to be asked for."""
    return lambda: vector


def ones(tensor: LazyTensor) -> LazyTensor:
    """Return ones in the tensor's shape."""
    return computed(tensor, lambda start, stop: np.ones((stop - start, *tensor.shape[1:])))


def identity(name: str, size: int) -> LazyTensor:
    """Return the identity of ``size`` rows as a tensor."""

    def load_rows(start: int, stop: int) -> npt.NDArray[np.float32]:
        return np.eye(stop - start, size, start, dtype=np.float32)

    return LazyTensor(name, (size, size), "F32", load_rows)


def balance(scale: Float64) -> Float64:
    """Return scales over their geometric mean, within 2^-10 and 2^10; 1 for channels that were never used
    (zero).

    The bound keeps a channel that the text hardly used from being blown up. Scales are rounded to sixteenths
    of an octave, so that the last bits of what was measured, which another processor computes otherwise, do
    not count.
    """
    used = scale > 0
    if not used.any():
        return np.ones_like(scale)
    octaves = np.log2(np.where(used, scale, 1.0))
    octaves = np.clip(octaves - octaves[used].mean(), -10, 10)
    return np.where(used, np.exp2(np.round(octaves * 16) / 16), 1.0)


@dataclass(frozen=True, slots=True)
class LayerNames:
    """The checkpoint's names in one layer."""

    layer: int

    def weight(self, module: str) -> str:
        """Return the name of a module's weight, ``self_attn.q_proj``."""
        return f"model.layers.{self.layer}.{module}.weight"

    def bias(self, module: str) -> str:
        """Return the name of a module's bias."""
        return f"model.layers.{self.layer}.{module}.bias"

    def both(self, module: str, tensors: Tensors) -> tuple[str, ...]:
        """Return the names of a module's weight and, if it has one, its bias."""
        return tuple(name for name in (self.weight(module), self.bias(module)) if name in tensors)
