"""GPTQ's packing: ``qweight``, ``qzeros``, ``scales`` and ``g_idx`` of a module.

``qweight`` [in * bits / 32, out] holds codes along the inputs, ``qzeros`` [groups, out * bits / 32] zero
points along the outputs, ``scales`` [groups, out]; ``g_idx`` [in] says to which group an input belongs. Where
inputs were quantised by the size of their activations (``desc_act``), groups are scattered; codes come out in
an order of inputs in which each group lies together.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from llorch_export.checkpoint.codes import CodeRows, Codes
from llorch_export.checkpoint.packed.base import (
    PackedMatrix,
    PackedModule,
    from_codes,
    in_words,
    require_finite_scales,
    scale_type,
)
from llorch_export.checkpoint.packed.stored import StoredArray
from llorch_export.checkpoint.packed.words import unpacked, words_of
from llorch_export.config.packed.gptq import GptqPacking
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
        packing, (rows, columns) = self.packing, module.shape
        group = columns if packing.group == -1 else min(packing.group, columns)
        groups = -(-columns // group)
        weights, scales = module.part("qweight"), module.part("scales")
        weights.require((words_of(columns, packing.bits), rows), _WORDS)
        scales.require((groups, rows), ("F32", "F16", "BF16"))
        zeros = module.parts.get("qzeros") if packing.symmetric else module.part("qzeros")
        if zeros is not None:
            zeros.require((groups, words_of(rows, packing.bits)), _WORDS)
        grouping = _grouping(module, columns, group, groups)
        matrix = _Matrix(packing, weights, scales, zeros, grouping)
        codes = Codes(
            bits=packing.bits,
            columns=columns,
            group=grouping.size,
            symmetric=packing.symmetric,
            scale_type=scale_type(scales),
            read=matrix.read,
            input_order=grouping.order,
        )
        ordered = () if grouping.order is None else ("inputs in the order of their size",)
        return from_codes(in_words("GPTQ", packing.bits, group, columns, *ordered), codes)


@dataclass(frozen=True, slots=True)
class _Grouping:
    """How inputs share scales, once they are in an order in which groups lie together.

    size: inputs that lie together and share a scale. stored: the stored group of each such run.
    order: as of :class:`Codes`.
    """

    size: int
    stored: npt.NDArray[np.intp]
    order: npt.NDArray[np.intp] | None


def _grouping(module: PackedModule, columns: int, group: int, groups: int) -> _Grouping:
    place = module.parts.get("g_idx")
    in_order = np.arange(columns, dtype=np.intp) // group
    if place is None:
        return _Grouping(group, np.arange(groups), None)
    place.require((columns,), ("I32", "I64"))
    index = place.read().astype(np.intp)
    if index.min() < 0 or index.max() >= groups:
        raise ArtifactError(
            f"{place.path}: tensor {place.name} names groups {index.min()} to {index.max()}, and there are "
            f"{groups} of {group} inputs; the file is damaged or its config belongs to another model, fetch "
            "both again"
        )
    if np.array_equal(index, in_order):
        return _Grouping(group, np.arange(groups), None)
    order = np.argsort(index, kind="stable")
    # Files may have groups of any number of inputs; runs of the same length within all of them share a scale.
    counts = [int(count) for count in np.bincount(index) if count]
    size = math.gcd(*counts[:-1]) or counts[-1]
    unchanged = np.array_equal(order, np.arange(columns))
    return _Grouping(size, index[order[::size]], None if unchanged else order)


@dataclass(frozen=True, slots=True)
class _Matrix:
    packing: GptqPacking
    weights: StoredArray
    scales: StoredArray
    zeros: StoredArray | None
    grouping: _Grouping

    def read(self, start: int, stop: int) -> CodeRows:
        """Read the codes of outputs ``start`` to ``stop``; see :attr:`Codes.read`."""
        columns = len(self.grouping.order) if self.grouping.order is not None else None
        words = self.weights.columns(start, stop).T
        count = columns or self.weights.shape[0] * 32 // self.packing.bits
        codes = unpacked(words, self.packing.bits, count)
        if self.grouping.order is not None:
            codes = codes[:, self.grouping.order]
        scales = self.scales.columns(start, stop).T.astype(np.float32)
        require_finite_scales(scales, self.scales)
        zeros = self._zero_points(start, stop)
        if self.packing.symmetric:
            self._require_middle(zeros)
            zeros = None
        stored = self.grouping.stored
        return CodeRows(codes, scales[:, stored], None if zeros is None else zeros[:, stored])

    def _zero_points(self, start: int, stop: int) -> npt.NDArray[np.uint8] | None:
        """Return [rows, groups], or None if they are not stored."""
        bits = self.packing.bits
        if self.zeros is None:
            return None
        first = start // _ALIGNED * _ALIGNED
        words = self.zeros.columns(first * bits // 32, words_of(stop, bits)).view("<u4")
        if self.packing.zero_offset:
            words = words + np.uint32(sum(1 << shift for shift in range(0, 32, bits)))
        return unpacked(words, bits, stop - first)[:, start - first :].T

    def _require_middle(self, zeros: npt.NDArray[np.uint8] | None) -> None:
        """Raise ArtifactError if a zero point is not what symmetric codes have."""
        middle = 2 ** (self.packing.bits - 1)
        # The tools do not agree on what 3 bits lack of 4 in the first version of the format.
        ambiguous = self.packing.bits == 3 and self.packing.zero_offset
        if zeros is None or ambiguous or (zeros == middle).all():
            return
        assert self.zeros is not None
        raise ArtifactError(
            f"{self.zeros.path}: tensor {self.zeros.name} holds zero points {zeros.min()} to {zeros.max()}, "
            f"expected {middle} alone, since quantization_config says sym: true; if they are right set sym "
            'to false, and if all are one too large set checkpoint_format to "gptq_v2"'
        )
