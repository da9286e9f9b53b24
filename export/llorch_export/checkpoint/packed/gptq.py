"""GPTQ's packing: ``qweight``, ``qzeros``, ``scales`` and ``g_idx`` of a module.

``qweight`` [in * bits / 32, out] holds codes along the inputs, ``qzeros`` [groups, out * bits / 32] zero
points along the outputs, ``scales`` [groups, out]; ``g_idx`` [in] says to which group an input belongs. Where
inputs were quantised by the size of their activations (``desc_act``), groups are scattered; codes come out in
an order of inputs in which each group lies together.
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
    require_finite_scales,
    require_middle,
    scale_type,
)
from llorch_export.checkpoint.packed.grouping import Grouping, grouping
from llorch_export.checkpoint.packed.stored import StoredArray
from llorch_export.checkpoint.packed.words import unpacked, words_of
from llorch_export.config.packed.gptq import GptqPacking, GptqScheme
from llorch_serve.errors import ArtifactError

_WORDS: Final = ("I32", "U32")
_ALIGNED: Final = 32  # codes: of any width they begin and end at a word


@dataclass(frozen=True, slots=True)
class GptqReader:
    """Reads modules by the settings of one checkpoint."""

    packing: GptqPacking
    suffixes: tuple[str, ...] = (".qweight", ".qzeros", ".scales", ".g_idx")

    def read(self, module: PackedModule) -> PackedMatrix:
        """See :class:`llorch_export.checkpoint.packed.base.PackedReader`."""
        scheme, (rows, columns) = self.packing.of(module.own_name), module.shape
        weights, scales = module.part("qweight"), module.part("scales")
        if scheme is None:
            raise ArtifactError(
                f"{weights.path}: module {module.own_name} is packed, and quantization_config says that it "
                "is not; the config belongs to another model, fetch both again"
            )
        group = columns if scheme.group == -1 else min(scheme.group, columns)
        groups = -(-columns // group)
        weights.require((words_of(columns, scheme.bits), rows), _WORDS)
        scales.require((groups, rows), FLOATS)
        zeros = module.parts.get("qzeros") if scheme.symmetric else module.part("qzeros")
        if zeros is not None:
            zeros.require((groups, words_of(rows, scheme.bits)), _WORDS)
        order = grouping(module.parts.get("g_idx"), columns, group)
        matrix = _Matrix(self.packing, scheme, weights, scales, zeros, order, columns)
        codes = Codes(
            bits=scheme.bits,
            columns=columns,
            group=order.size,
            symmetric=scheme.symmetric,
            scale_type=scale_type(scales),
            read=matrix.read,
            input_order=order.order,
        )
        ordered = () if order.order is None else ("inputs in the order of their size",)
        return from_codes(in_words("GPTQ", scheme.bits, group, columns, *ordered), codes)


@dataclass(frozen=True, slots=True)
class _Matrix:
    packing: GptqPacking
    scheme: GptqScheme
    weights: StoredArray
    scales: StoredArray
    zeros: StoredArray | None
    order: Grouping
    columns: int

    def read(self, start: int, stop: int) -> CodeRows:
        """Read the codes of outputs ``start`` to ``stop``; see :attr:`Codes.read`."""
        codes = unpacked(self.weights.columns(start, stop).T, self.scheme.bits, self.columns)
        scales = self.scales.columns(start, stop).T.astype(np.float32)
        require_finite_scales(scales, self.scales)
        zeros = self._zero_points(start, stop)
        stored = self.order.stored
        codes = self.order.ordered(codes)
        return CodeRows(codes, scales[:, stored], None if zeros is None else zeros[:, stored])

    def _zero_points(self, start: int, stop: int) -> npt.NDArray[np.uint8] | None:
        """Return [rows, groups], or None if all are the same."""
        bits = self.scheme.bits
        # The tools do not agree on what 3 bits lack of 4 in the first version of the format.
        known = self.scheme.symmetric and bits == 3 and self.packing.zero_offset == 1
        if self.zeros is None or known:
            return None
        first = start // _ALIGNED * _ALIGNED
        words = self.zeros.columns(first * bits // 32, words_of(stop, bits)).view("<u4")
        if self.packing.zero_offset and self.packing.carries:
            words = words + np.uint32(sum(1 << shift for shift in range(0, 32, bits)))
        zeros = unpacked(words, bits, stop - first)[:, start - first :].T
        if self.packing.zero_offset and not self.packing.carries:
            zeros = (zeros + np.uint8(1)) & np.uint8(2**bits - 1)
        if not self.scheme.symmetric:
            return zeros
        way_out = 'set sym to false, or, if all are one too large, checkpoint_format to "gptq_v2"'
        require_middle(zeros, bits, self.zeros, "sym: true", way_out)
        return None
