"""AWQ's packing: ``qweight``, ``qzeros`` and ``scales`` of a module, codes of 4 bits in words of 32.

In the form for matrices (gemm) ``qweight`` [in, out / 8] and ``qzeros`` [groups, out / 8] hold eight outputs
a word, the even ones before the odd ones, and ``scales`` is [groups, out]. In the form for vectors (gemv)
``qweight`` is [out, in / 8] and holds inputs in order; ``qzeros`` [out, words] and ``scales`` [out, 8 *
words] are padded.
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
from llorch_export.checkpoint.packed.stored import StoredArray
from llorch_export.checkpoint.packed.words import unpacked
from llorch_export.config.packed.awq import AwqPacking
from llorch_serve.errors import ArtifactError

_BITS: Final = 4
_A_WORD: Final = 8
_KINDS: Final = ("I32", "U32")
_PLACE_OF: Final = np.array([0, 4, 1, 5, 2, 6, 3, 7])
"""Where output ``i`` of a word lies in it: nibble 0 holds output 0, nibble 1 output 2, and so on."""


@dataclass(frozen=True, slots=True)
class AwqReader:
    """Reads modules by the settings of one checkpoint."""

    packing: AwqPacking
    suffixes: tuple[str, ...] = (".qweight", ".qzeros", ".scales")

    def read(self, module: PackedModule) -> PackedMatrix:
        """See :class:`llorch_export.checkpoint.packed.base.PackedReader`."""
        rows, columns = module.shape
        group = columns if self.packing.group == -1 else min(self.packing.group, columns)
        groups = -(-columns // group)
        weights, scales = module.part("qweight"), module.part("scales")
        zeros = module.parts.get("qzeros") if self.packing.symmetric else module.part("qzeros")
        if self.packing.by_output:
            _require_whole(module, columns, "inputs")
            weights.require((rows, columns // _A_WORD), _KINDS)
            words = _padded_words(groups, group)
            scales.require((rows, words * _A_WORD), FLOATS)
            if zeros is not None:
                zeros.require((rows, words), _KINDS)
        else:
            _require_whole(module, rows, "outputs")
            weights.require((columns, rows // _A_WORD), _KINDS)
            scales.require((groups, rows), FLOATS)
            if zeros is not None:
                zeros.require((groups, rows // _A_WORD), _KINDS)
        matrix = _Matrix(self.packing, weights, scales, zeros, columns, groups)
        codes = Codes(
            bits=_BITS,
            columns=columns,
            group=group,
            symmetric=self.packing.symmetric,
            scale_type=scale_type(scales),
            read=matrix.read,
        )
        return from_codes(in_words("AWQ", _BITS, group, columns), codes)


def _require_whole(module: PackedModule, count: int, what: str) -> None:
    if count % _A_WORD:
        raise ArtifactError(
            f"{module.part('qweight').path}: module {module.name} has {count} {what}, and AWQ packs "
            f"{_A_WORD} of them into a word; the config belongs to another model, fetch both again"
        )


def _padded_words(groups: int, group: int) -> int:
    """Return how many words hold the zero points of an output, as AutoAWQ pads them for its kernels."""
    step = 1 if group >= 128 else 2 if group >= 64 else 4
    return -(-groups // (_A_WORD * step)) * step


@dataclass(frozen=True, slots=True)
class _Matrix:
    packing: AwqPacking
    weights: StoredArray
    scales: StoredArray
    zeros: StoredArray | None
    columns: int
    groups: int

    def read(self, start: int, stop: int) -> CodeRows:
        """Read the codes of outputs ``start`` to ``stop``; see :attr:`Codes.read`."""
        if self.packing.by_output:
            codes = unpacked(self.weights.rows(start, stop), _BITS, self.columns)
            scales = self.scales.rows(start, stop)[:, : self.groups]
        else:
            codes = output_codes(self.weights, start, stop)
            scales = self.scales.columns(start, stop).T
        found = scales.astype(np.float32)
        require_finite_scales(found, self.scales)
        zeros = self._zero_points(start, stop)
        if self.packing.symmetric and self.zeros is not None and zeros is not None:
            require_middle(zeros, _BITS, self.zeros, "zero_point: false", "set zero_point to true")
            zeros = None
        return CodeRows(codes, found, zeros)

    def _zero_points(self, start: int, stop: int) -> npt.NDArray[np.uint8] | None:
        """Return [rows, groups], or None if they are not stored."""
        if self.zeros is None:
            return None
        if self.packing.by_output:
            return unpacked(self.zeros.rows(start, stop), _BITS, self.groups)
        return output_codes(self.zeros, start, stop)


def output_codes(
    words: StoredArray, start: int, stop: int, *, interleaved: bool = True
) -> npt.NDArray[np.uint8]:
    """Return the codes [rows, n] of outputs ``start`` to ``stop`` of words [n, out / 8].

    interleaved: in AWQ's order; else the lowest bits of a word are its first output.
    """
    first, last = start // _A_WORD, -(-stop // _A_WORD)
    nibbles = unpacked(words.columns(first, last), _BITS, (last - first) * _A_WORD)
    places = _PLACE_OF if interleaved else np.arange(_A_WORD)
    in_order = nibbles.reshape(len(nibbles), -1, _A_WORD)[:, :, places].reshape(len(nibbles), -1)
    skipped = start - first * _A_WORD
    return in_order[:, skipped : skipped + stop - start].T
