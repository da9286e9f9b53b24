"""compressed-tensors' packing of whole numbers: ``weight_packed`` or ``weight``, with scales and zero points.

``weight_packed`` [out, words] holds codes of any width along the inputs, ``weight`` [out, in] whole bytes.
Both are stored around zero, the packed ones moved up by half of their range. Floating point: :mod:`.floats`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from llorch_export.checkpoint.codes import CodeRows, Codes
from llorch_export.checkpoint.packed.base import (
    FLOATS,
    PackedMatrix,
    PackedModule,
    from_codes,
    in_words,
    require_middle,
    scale_type,
)
from llorch_export.checkpoint.packed.floats import float4_matrix, float8_matrix
from llorch_export.checkpoint.packed.grouping import Grouping, grouping
from llorch_export.checkpoint.packed.scales import Grid
from llorch_export.checkpoint.packed.stored import StoredArray
from llorch_export.checkpoint.packed.words import around_zero, unpacked, words_of
from llorch_export.config.packed.compressed import CompressedPacking, CompressedScheme
from llorch_serve.errors import ArtifactError

_EMBEDDING: Final = "model.embed_tokens"
_WEIGHTS: Final = (".weight_packed", ".weight")
_PARTS: Final = (
    ".weight_scale",
    ".weight_zero_point",
    ".weight_shape",
    ".weight_g_idx",
    ".weight_global_scale",
)
# Of activations, which are not rounded by them here.
_UNUSED: Final = (".input_scale", ".input_zero_point", ".input_global_scale", ".input_g_idx")
_UNUSED_OUTPUT: Final = (".output_scale", ".output_zero_point")


@dataclass(frozen=True, slots=True)
class CompressedReader:
    """Reads modules by the settings of one checkpoint."""

    packing: CompressedPacking
    suffixes: tuple[str, ...] = (*_WEIGHTS, *_PARTS, *_UNUSED, *_UNUSED_OUTPUT)

    def read(self, module: PackedModule) -> PackedMatrix | None:
        """See :class:`llorch_export.checkpoint.packed.base.PackedReader`."""
        scheme = self.packing.of(module.own_name, embedding=module.name == _EMBEDDING)
        weight = module.parts.get("weight")
        if "weight_packed" not in module.parts and (
            "weight_scale" not in module.parts and weight is not None and weight.kind in FLOATS
        ):
            return None
        if scheme is None:
            raise ArtifactError(
                f"{next(iter(module.parts.values())).path}: module {module.own_name} has "
                f"{', '.join(sorted(module.parts))}, and quantization_config says that it is not quantised; "
                "the config belongs to another model, fetch both again"
            )
        if scheme.floating:
            return float8_matrix(module, scheme) if scheme.bits == 8 else float4_matrix(module, scheme)
        return _whole_numbers(module, scheme)


def _whole_numbers(module: PackedModule, scheme: CompressedScheme) -> PackedMatrix:
    rows, columns = module.shape
    bits = scheme.bits
    grid = Grid.of(module.shape, scheme.block)
    packed = scheme.format == "pack-quantized"
    weights, scales = module.part("weight_packed" if packed else "weight"), module.part("weight_scale")
    if packed:
        weights.require((rows, words_of(columns, bits)), ("I32",))
        _require_shape(module)
    else:
        weights.require((rows, columns), ("I8",))
    grid.require(module, scales)
    place = module.parts.get("weight_zero_point")
    zeros = place if scheme.symmetric else module.part("weight_zero_point")
    if zeros is not None and zeros.kind == "I32":
        zeros.require((words_of(grid.size[0], bits), grid.size[1]), ("I32",))
    elif zeros is not None:
        grid.require(module, zeros)
        zeros.require(zeros.shape, ("I8",))
    order = grouping(module.parts.get("weight_g_idx"), columns, grid.columns, unset=-1)
    codes = Codes(
        bits=bits,
        columns=columns,
        group=order.size,
        symmetric=scheme.symmetric,
        scale_type=scale_type(scales),
        read=_Matrix(module, scheme, grid, order, weights, scales, zeros).read,
        input_order=order.order,
    )
    kind = "compressed-tensors" if packed else "compressed-tensors in bytes"
    ordered = () if order.order is None else ("inputs in the order of their size",)
    return from_codes(in_words(kind, bits, grid.columns, columns, *ordered), codes)


def _require_shape(module: PackedModule) -> None:
    """Raise ArtifactError if the stored shape is not the one that the config calls for."""
    place = module.parts.get("weight_shape")
    if place is None:
        return
    place.require((2,), ("I64", "I32"))
    stated = tuple(int(size) for size in place.read())
    if stated != module.shape:
        raise ArtifactError(
            f"{place.path}: tensor {place.name} says {list(stated)}, expected {list(module.shape)}; the file "
            "is damaged or its config belongs to another model, fetch both again"
        )


@dataclass(frozen=True, slots=True)
class _Matrix:
    module: PackedModule
    scheme: CompressedScheme
    grid: Grid
    order: Grouping
    weights: StoredArray
    scales: StoredArray
    zeros: StoredArray | None

    def read(self, start: int, stop: int) -> CodeRows:
        """Read the codes of outputs ``start`` to ``stop``; see :attr:`Codes.read`."""
        bits, columns = self.scheme.bits, self.module.shape[1]
        rows = self.weights.rows(start, stop)
        codes = (
            unpacked(rows, bits, columns)
            if rows.dtype.itemsize == 4
            else around_zero(rows, bits, self.weights)
        )
        scales = self.grid.scales(self.scales, start, stop)
        zeros = self._zero_points(start, stop)
        stored = self.order.stored
        return CodeRows(
            self.order.ordered(codes), scales[:, stored], None if zeros is None else zeros[:, stored]
        )

    def _zero_points(self, start: int, stop: int) -> npt.NDArray[np.uint8] | None:
        """Return [rows, groups]."""
        if self.zeros is None:
            return None
        found = self._stored_zero_points(self.zeros, start, stop)
        if not self.scheme.symmetric:
            return found
        require_middle(found, self.scheme.bits, self.zeros, "symmetric: true", "set symmetric to false")
        return None

    def _stored_zero_points(self, place: StoredArray, start: int, stop: int) -> npt.NDArray[np.uint8]:
        if place.kind != "I32":
            return around_zero(self.grid.read(place, start, stop), self.scheme.bits, place)
        # Packed along the outputs; a tensor of small numbers, so all of it is read.
        of_blocks = unpacked(place.read().T, self.scheme.bits, self.grid.size[0]).T
        return of_blocks[np.arange(start, stop) // self.grid.rows]
