"""Weights stored in eight-bit floating point, plain or with scales, as exact float32.

Input is the ``quantization_config`` of a ``config.json`` and the places of a weight and its scale; output are
rows ``weight * scale``, each product rounded to float32 once. Activations, which some of these models round
too when they run on a GPU, stay in full precision.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Final

import ml_dtypes
import numpy as np
import numpy.typing as npt

from llorch_export.checkpoint.codes import CodeRows, Codes, Levels, finite_values
from llorch_export.checkpoint.packed.stored import StoredArray
from llorch_export.checkpoint.stream import (
    BlockCodec,
    TensorRange,
    read_rows,
    require_finite,
)
from llorch_export.config.fp8 import Fp8Format
from llorch_serve.errors import ArtifactError

WEIGHT: Final = ".weight"
SCALES: Final = (".weight_scale_inv", ".weight_scale")
"""Both multiply: the first is named after the scale that quantisation had divided by."""
ACTIVATION_SCALES: Final = (".activation_scale", ".input_scale")

_MAX_BLOCK: Final = 2**16
_WAY_OUT: Final = "export from the original weights, or from a GGUF file"


def _codec(kind: type) -> BlockCodec:
    def decode(data: npt.NDArray[np.uint8]) -> npt.NDArray[np.float32]:
        return _values(kind)[data]

    return BlockCodec(1, 1, decode)


@functools.cache
def _values(kind: type) -> npt.NDArray[np.float32]:
    """Return the value of each of the 256 bytes; every one of them is a float32, or NaN or infinite."""
    values: npt.NDArray[np.float32] = np.arange(256, dtype=np.uint8).view(kind).astype(np.float32)
    return values


FP8_CODECS: Final = {
    "F8_E4M3": _codec(ml_dtypes.float8_e4m3fn),
    "F8_E5M2": _codec(ml_dtypes.float8_e5m2),
}


def scaled_rows(
    weight: TensorRange, scale: TensorRange, packing: Fp8Format
) -> Callable[[int, int], npt.NDArray[np.float32]]:
    """Return a reader of rows of ``weight * scale``, for :attr:`LazyTensor.load_rows`.

    Raises ArtifactError if the shape of ``scale`` does not fit; the reader does if a product is not finite.
    """
    factors, columns = _factors(weight, scale, packing), weight.shape[1]
    wide = _block(weight, packing)[1]

    def load_rows(start: int, stop: int) -> npt.NDArray[np.float32]:
        values = read_rows(weight, start, stop)
        with np.errstate(over="ignore"):  # reported below, as an error instead of a warning
            values *= np.repeat(factors(start, stop), wide, axis=1)[:, :columns]
        require_finite(values, weight)
        return values

    return load_rows


def scaled_codes(weight: TensorRange, kind: str, scale: TensorRange, packing: Fp8Format) -> Codes:
    """Return the matrix ``weight * scale`` as the bytes that it is stored as. kind: safetensors' name of the
    type.

    Raises ArtifactError as :func:`scaled_rows` does.
    """
    factors, place = _factors(weight, scale, packing), StoredArray.at(weight, kind)

    def read(start: int, stop: int) -> CodeRows:
        found = place.rows(start, stop)
        require_finite(found.astype(np.float32), weight)
        scales = factors(start, stop)
        require_finite(scales, scale)
        return CodeRows(found.view(np.uint8), scales, None)

    return Codes(
        bits=8,
        columns=weight.shape[1],
        group=min(_block(weight, packing)[1], weight.shape[1]),
        symmetric=True,
        scale_type="float32",
        read=read,
        levels=Levels(finite_values(place.dtype), None),
    )


def _block(weight: TensorRange, packing: Fp8Format) -> tuple[int, int]:
    """Return how many rows and columns share a scale."""
    rows, columns = weight.shape
    return packing.block or (rows, columns)


def _factors(
    weight: TensorRange, scale: TensorRange, packing: Fp8Format
) -> Callable[[int, int], npt.NDArray[np.float32]]:
    """Return a reader of what some rows are multiplied by, [rows, blocks of columns]."""
    block = _block(weight, packing)
    grid = tuple(-(-size // step) for size, step in zip(weight.shape, block, strict=True))
    fits = math.prod(scale.shape) == 1 if packing.block is None else scale.shape == grid
    if not fits:
        raise ArtifactError(
            f"{scale.path}: tensor {scale.name} has shape {list(scale.shape)}, expected "
            f"{'one number' if packing.block is None else list(grid)} for {weight.name} of "
            f"{list(weight.shape)}; {_WAY_OUT}"
        )
    scales = dataclasses.replace(scale, shape=grid)  # a lone number may have any number of dimensions

    def read(start: int, stop: int) -> npt.NDArray[np.float32]:
        first = start // block[0]
        found = read_rows(scales, first, (stop - 1) // block[0] + 1)
        return found[np.arange(start, stop) // block[0] - first]

    return read
