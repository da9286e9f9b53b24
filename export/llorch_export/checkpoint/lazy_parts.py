"""From places in safetensors files to lazy tensors, each the whole of a stored tensor or a part of a fused
one.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from llorch_export.checkpoint import names
from llorch_export.checkpoint.base import LazyTensor
from llorch_export.checkpoint.fp8 import scaled_rows
from llorch_export.checkpoint.norm_offset import with_offset
from llorch_export.checkpoint.packed.base import SCALE_TYPES, PackedMatrix
from llorch_export.checkpoint.row_order import in_order, row_order
from llorch_export.checkpoint.stored_tensors import StoredTensor
from llorch_export.checkpoint.stream import read_rows
from llorch_export.config.fp8 import Fp8Format
from llorch_export.config.packed.base import Packing
from llorch_serve.artifact.manifest import LlamaConfig
from llorch_serve.errors import ArtifactError


def packed_tensor(
    name: str, shape: tuple[int, ...], matrix: PackedMatrix, place: names.StoredRows
) -> LazyTensor:
    """Return a tensor out of a matrix that a tool has packed."""
    start, load = place.start, matrix.load_rows

    def load_rows(first: int, last: int) -> npt.NDArray[np.float32]:
        with np.errstate(over="ignore", invalid="ignore"):  # reported below, as an error instead of a warning
            values = load(start + first, start + last)
        if not np.isfinite(values).all():
            raise ArtifactError(
                f"{name}: codes times scales give NaN or infinity; the weights are damaged, fetch them again"
            )
        return values

    return LazyTensor(
        name=name,
        shape=shape,
        dtype=matrix.form,
        load_rows=load_rows,
        packed=matrix.form,
        codes=None if matrix.codes is None else matrix.codes.part(start),
    )


def plain_tensor(
    name: str,
    shape: tuple[int, ...],
    tensor: StoredTensor,
    place: names.StoredRows,
    packing: Packing | Fp8Format | None,
) -> LazyTensor:
    """Return a tensor whose values, or fp8 values with scales, are stored one by one."""
    scaled = packing if isinstance(packing, Fp8Format) else None
    narrow = isinstance(packing, Packing) and len(shape) == 2
    return LazyTensor(
        name=name,
        shape=shape,
        dtype=tensor.dtype,
        load_rows=_reader(tensor, place, scaled),
        packed=None if tensor.scale is None else "floating point of 8 bits, with scales",
        narrow_type=SCALE_TYPES.get(tensor.dtype) if narrow and tensor.dtype != "F32" else None,
    )


def arranged(tensor: LazyTensor, config: LlamaConfig) -> LazyTensor:
    """Return a stored tensor as the graph has it: rows in its order, and norms as factors."""
    order = row_order(tensor.name, config)
    codes = tensor.codes
    return replace(
        tensor,
        load_rows=with_offset(tensor.name, config, in_order(tensor.load_rows, order)),
        codes=codes if codes is None or order is None else codes.in_order(np.argsort(order)),
    )


def _reader(
    tensor: StoredTensor, place: names.StoredRows, packing: Fp8Format | None
) -> Callable[[int, int], npt.NDArray[np.float32]]:
    if tensor.scale is None or packing is None:
        source = tensor.source if place.stack is None else tensor.source.as_matrix()
        return functools.partial(read_rows, source.rows(place.start, place.stop))
    # Scales stand for blocks of the whole tensor, so its own row numbers are kept.
    whole = scaled_rows(tensor.source, tensor.scale, packing)
    return lambda start, stop: whole(place.start + start, place.start + stop)
