"""torchao's tensor subclasses as transformers stores them: their parts, and JSON in the file's header.

A weight's parts are called ``_weight_qdata``, ``_weight_scale`` and so on after its module. The header says
by the weight's name of which class it is, and which block of weights shares a scale.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final, cast

import numpy as np
import numpy.typing as npt

from llorch_export.checkpoint.codes import CodeRows, Codes
from llorch_export.checkpoint.packed.base import (
    FLOATS,
    PackedMatrix,
    PackedModule,
    from_codes,
    in_words,
    require_finite_scales,
    scale_type,
    with_scaled_inputs,
)
from llorch_export.checkpoint.packed.floats import float8, stored_scales
from llorch_export.checkpoint.packed.scales import Grid
from llorch_export.checkpoint.packed.stored import StoredArray
from llorch_export.checkpoint.packed.words import around_zero
from llorch_export.config.fields import Fields, shown
from llorch_export.config.packed.torchao import TorchAoPacking
from llorch_serve.errors import ArtifactError

_PREFIX: Final = "_weight_"
_MAX_NOTE: Final = 2**16
_UNUSED: Final = ("act_quant_scale", "act_quant_zero_point")
"""Parts that round activations, which are not rounded by them here."""


@dataclass(frozen=True, slots=True)
class TorchAoReader:
    """Reads modules of one checkpoint."""

    packing: TorchAoPacking
    suffixes: tuple[str, ...] = tuple(
        f".{_PREFIX}{part}"
        for part in ("qdata", "scale", "zero_point", "act_pre_scale", "scale_and_zero", *_UNUSED)
    )

    def read(self, module: PackedModule) -> PackedMatrix | None:
        """See :class:`llorch_export.checkpoint.packed.base.PackedReader`."""
        place = module.part(f"{_PREFIX}qdata")
        name = f"{place.name.removesuffix(f'.{_PREFIX}qdata')}.weight"
        note = _note(place, name)
        kind = note.get("_type")
        read = _CLASSES.get(kind) if isinstance(kind, str) else None
        if read is None:
            raise ArtifactError(
                f"{place.path}: {name} is packed as torchao's {shown(str(kind))}, which only its own kernels "
                f"read; expected one of {', '.join(_CLASSES)}. Load the model with torchao, quantise it to "
                "one of these and save it again"
            )
        data = note.get("_data")
        if not isinstance(data, Mapping):
            raise ArtifactError(
                f"{place.path}: the description of {name} has no _data; the file is damaged, fetch it again"
            )
        matrix = read(module, Fields(data, origin=f"{place.path}: description of {name}"))
        before = module.parts.get(f"{_PREFIX}act_pre_scale")
        return matrix if before is None else with_scaled_inputs(module, matrix, before)


def _note(place: StoredArray, name: str) -> Mapping[str, object]:
    """Return what the header says of a weight. Raises ArtifactError if it says nothing or no JSON."""
    text = place.notes.get(name)
    if text is None or len(text) > _MAX_NOTE:
        raise ArtifactError(
            f"{place.path}: its header does not describe {name}, as files of torchao do; save the model "
            "again with transformers 5 and torchao"
        )
    try:
        found = json.loads(text)
        if isinstance(found, dict):
            return found
    except (ValueError, RecursionError):
        pass
    raise ArtifactError(f"{place.path}: the description of {name} is no JSON object; fetch the file again")


def _grid(module: PackedModule, fields: Fields) -> Grid:
    """Return the blocks that share a scale. Raises ArtifactError if they have no such sizes."""
    rows, columns = fields.array("block_size", int, length=2)
    if rows < 1 or columns < 1:
        raise fields.wrong("block_size", "two positive integers")
    return Grid.of(module.shape, (rows, columns))


def _eight_bits(module: PackedModule, fields: Fields) -> PackedMatrix:
    """Int8Tensor."""
    return _whole_numbers(module, _grid(module, fields), 8)


def _narrow(module: PackedModule, fields: Fields) -> PackedMatrix:
    """IntxUnpackedToInt8Tensor: a byte for each code, whatever its width."""
    target = fields.mapping("target_dtype").get("_data")
    widths = {f"int{bits}": bits for bits in range(2, 9)}
    if not isinstance(target, str) or target not in widths:
        raise fields.wrong("target_dtype", f"one of {', '.join(widths)}")
    return _whole_numbers(module, _grid(module, fields), widths[target])


def _whole_numbers(module: PackedModule, grid: Grid, bits: int) -> PackedMatrix:
    weights, scales = module.part(f"{_PREFIX}qdata"), module.part(f"{_PREFIX}scale")
    weights.require(module.shape, ("I8",))
    grid.require(module, scales)
    zeros = module.parts.get(f"{_PREFIX}zero_point")
    if zeros is not None:
        grid.require(module, zeros)
        zeros.require(zeros.shape, ("I8", "I32", "I64"))
        if not zeros.read().any():  # one for each scale, and as small
            zeros = None

    def read(start: int, stop: int) -> CodeRows:
        codes = around_zero(weights.rows(start, stop), bits, weights)
        found = None if zeros is None else around_zero(grid.read(zeros, start, stop), bits, zeros)
        return CodeRows(codes, grid.scales(scales, start, stop), found)

    columns = module.shape[1]
    codes = Codes(
        bits=bits,
        columns=columns,
        group=grid.columns,
        symmetric=zeros is None,
        scale_type=scale_type(scales),
        read=read,
    )
    return from_codes(in_words("torchao", bits, grid.columns, columns), codes)


def _floating(module: PackedModule, fields: Fields) -> PackedMatrix:
    """Float8Tensor."""
    grid = _grid(module, fields)
    weights, scales = module.part(f"{_PREFIX}qdata"), module.part(f"{_PREFIX}scale")
    weights.require(module.shape, ("F8_E4M3", "F8_E5M2"))
    grid.require(module, scales)
    scales.require(scales.shape, FLOATS)
    return float8(weights, grid, stored_scales(grid, scales))


def _four_bits(module: PackedModule, fields: Fields) -> PackedMatrix:
    """Int4Tensor: two numbers from -8 to 7 in a byte, the first in the lower half; scales and offsets in
    floating point, [groups, out].
    """
    grid, (rows, columns) = _grid(module, fields), module.shape
    weights, scales = module.part(f"{_PREFIX}qdata"), module.part(f"{_PREFIX}scale")
    offsets = module.part(f"{_PREFIX}zero_point")
    if grid.rows != 1 or columns % 2:
        raise fields.wrong("block_size", "one output and some inputs, of which there is an even number")
    weights.require((rows, columns // 2), ("I8", "U8"))
    for place in (scales, offsets):
        place.require((grid.size[1], rows), FLOATS)

    def numbers(place: StoredArray, start: int, stop: int) -> npt.NDArray[np.float32]:
        found: npt.NDArray[np.float32] = place.columns(start, stop).T.astype(np.float32)
        require_finite_scales(found, place)
        return found

    def read(start: int, stop: int) -> CodeRows:
        data = weights.rows(start, stop).view(np.uint8)
        halves = np.stack([data & 15, data >> 4], axis=-1).reshape(stop - start, columns)
        return CodeRows(halves ^ np.uint8(8), numbers(scales, start, stop), numbers(offsets, start, stop))

    codes = Codes(
        bits=4,
        columns=columns,
        group=grid.columns,
        symmetric=False,
        scale_type=scale_type(scales),
        read=read,
        zero_type=scale_type(offsets),
        zero_kind="added",
    )
    return from_codes(in_words("torchao with offsets", 4, grid.columns, columns), codes)


_CLASSES: Final = cast(
    "Mapping[str, Callable[[PackedModule, Fields], PackedMatrix]]",
    {
        "Int8Tensor": _eight_bits,
        "IntxUnpackedToInt8Tensor": _narrow,
        "Float8Tensor": _floating,
        "Int4Tensor": _four_bits,
    },
)
"""By the name of the class."""
