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
from llorch_export.checkpoint.codes import Codes
from llorch_export.checkpoint.fp8 import scaled_codes, scaled_rows
from llorch_export.checkpoint.norm_offset import with_offset
from llorch_export.checkpoint.packed.base import SCALE_TYPES, PackedMatrix
from llorch_export.checkpoint.row_order import in_order, row_order
from llorch_export.checkpoint.stored_tensors import StoredTensor
from llorch_export.checkpoint.stream import read_rows
from llorch_export.config.fp8 import Fp8Format
from llorch_export.config.packed.base import Packing
from llorch_serve.artifact.manifest import LlamaConfig
from llorch_serve.errors import ArtifactError

LoadRows = Callable[[int, int], npt.NDArray[np.float32]]


def packed_tensor(
    name: str, shape: tuple[int, ...], matrix: PackedMatrix, place: names.StoredRows
) -> LazyTensor:
    """Return a tensor out of a matrix that a tool has packed."""
    load = _reader_at(place, matrix.load_rows)

    def load_rows(first: int, last: int) -> npt.NDArray[np.float32]:
        with np.errstate(over="ignore", invalid="ignore"):  # reported below, as an error instead of a warning
            values = load(first, last)
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
        codes=None if matrix.codes is None else matrix.codes.part(place.start, place.step).finite(name),
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
    narrow = packing is not None and len(shape) == 2
    whole = functools.partial(_turned, tensor, place) if place.turned else None
    return LazyTensor(
        name=name,
        shape=shape,
        dtype=tensor.dtype,
        load_rows=_reader(tensor, place, scaled) if whole is None else lambda a, b: whole()[a:b],
        load_whole=whole,
        packed=None if tensor.scale is None else "floating point of 8 bits, with scales",
        codes=_scaled_codes(name, tensor, place, scaled),
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


def _reader(tensor: StoredTensor, place: names.StoredRows, packing: Fp8Format | None) -> LoadRows:
    if tensor.scale is None or packing is None:
        if place.stack is None:
            return functools.partial(read_rows, tensor.source.rows(place.start, place.stop))
        return _reader_at(place, functools.partial(read_rows, tensor.source.as_matrix()))
    # Scales stand for blocks of the whole tensor, so its own row numbers are kept.
    whole = scaled_rows(tensor.source, tensor.scale, packing)
    return lambda start, stop: whole(place.start + start, place.start + stop)


def _scaled_codes(
    name: str, tensor: StoredTensor, place: names.StoredRows, packing: Fp8Format | None
) -> Codes | None:
    if tensor.scale is None or packing is None:
        return None
    whole = scaled_codes(tensor.source, tensor.dtype, tensor.scale, packing)
    return whole.part(place.start, place.step).finite(name)


def _reader_at(place: names.StoredRows, load: LoadRows) -> LoadRows:
    """Return a reader of the rows that ``place`` names, out of one of all rows."""
    start, step = place.start, place.step
    if step == 1:
        return lambda first, last: load(start + first, start + last)
    return lambda first, last: load(start + first * step, start + (last - 1) * step + 1)[::step]


def _turned(tensor: StoredTensor, place: names.StoredRows) -> npt.NDArray[np.float32]:
    """Read a matrix of a stack whose matrices are stored as [columns, rows]: the whole of it, since each of
    its rows lies all over it.
    """
    assert place.stop is not None, "a part of a stack has an end"
    _, columns, rows = tensor.source.shape
    matrix, first = divmod(place.start, rows)
    stored = read_rows(tensor.source.as_matrix(), matrix * columns, (matrix + 1) * columns)
    last = place.stop - matrix * rows
    return np.ascontiguousarray(stored[:, first : last : place.step].T)
