"""What becomes of a checkpoint's matrices at precision ``source``, one by one, and in words.

Takes tensors as they are read; :mod:`llorch_export.graph.blocks` stores what is decided here. The runtime
rounds inputs by the blocks of weights, so small blocks give better answers; but each has a scale, and an
artifact is to be about as large as its source.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Final

import numpy as np

from llorch_export.checkpoint.base import LazyTensor
from llorch_export.checkpoint.codes import Codes
from llorch_export.formats.module import EMBEDDING, FINE_MODULES, ModuleFormat, is_expert, is_router
from llorch_export.formats.precisions import BITS
from llorch_export.formats.targets import Capabilities
from llorch_export.quantize.carried import carried_bits, carried_form, stored_bits
from llorch_export.quantize.folded import (
    FoldedForm,
    FoldedValues,
    folded_bits,
    folded_form,
    folded_values,
    loaded_bits,
)
from llorch_export.quantize.layout import SCALE_DTYPES
from llorch_export.quantize.repack import BlockForm, carried_notice
from llorch_serve.artifact.manifest import Recipe, SourceForm

Form = BlockForm | FoldedForm | FoldedValues
"""How the data file has a packed matrix: as the operator takes it, or narrower."""

_TABLE: Final = f"{EMBEDDING}.weight"
_FINE_WEIGHTS: Final = tuple(f".{module}.weight" for module in FINE_MODULES)
_MOST_MORE: Final = 1.03
"""How much larger than their source matrices may be, for the sake of finer blocks: less than a twentieth,
since rotary tables come on top.
"""
_MOST_VALUES: Final = 2**32
"""Bytes of float32 values that weights may become: opening a graph takes several times as much."""
_FINEST: Final = ((32, 32), (32, 64), (32, 256), (64, 64), (64, 256), (128, 128), (256, 256))
"""The smallest blocks of layers whose errors weigh most, and of the others: the best first."""


def requantised(tensor: LazyTensor) -> ModuleFormat:
    """Return what becomes of a packed matrix that no form of the runtime holds as it is."""
    return ModuleFormat("int8", 32 if tensor.name.endswith(_FINE_WEIGHTS) else 64, None, "bfloat16")


class SourceForms:
    """Decides in which form each matrix of a checkpoint is carried over.

    tensors: the checkpoint's, by name. recipe: where it does not round inputs, values that 8 bits hold only
        nearly become values, as long as memory allows, and codes of 2 bits are widened.
    """

    def __init__(self, tensors: Mapping[str, LazyTensor], target: Capabilities, recipe: Recipe) -> None:
        exact = recipe.accuracy_level == 0
        self._target = target
        self._widen_pairs = exact or recipe.two_bit_accuracy_level == 0
        self._finest = _FINEST[0]
        packed = [tensor for tensor in tensors.values() if tensor.codes is not None]
        self._few = 4 * sum(math.prod(tensor.shape) for tensor in packed) <= _MOST_VALUES
        self._exact = exact and self._few
        if packed:
            plain = sum(_nbytes(tensor) for tensor in tensors.values() if tensor.codes is None)
            sizes = [(self._added(packed, finest, plain), finest) for finest in _FINEST]
            affordable = (finest for more, finest in sizes if more <= _MOST_MORE)
            self._finest = next(affordable, min(sizes)[1])

    def carried(self, tensor: LazyTensor) -> tuple[Codes, Form] | None:
        """Return the codes of a packed matrix and the form that holds them; None if none does, or if it is
        not packed.
        """
        return self._carried(tensor, self._finest)

    def alike(self, tensors: Sequence[LazyTensor]) -> bool:
        """Tell whether matrices can be stacked into one without changing how any of them is stored."""
        if all(tensor.packed is None and tensor.narrow_type is None for tensor in tensors):
            return True
        keys: set[tuple[object, ...]] = set()
        for tensor in tensors:
            found = self.carried(tensor)
            if found is None:
                keys.add((tensor.packed is None, tensor.narrow_type))
                continue
            codes, form = found
            inputs = (codes.input_order, codes.input_scales)
            order = tuple(b"" if array is None else array.tobytes() for array in inputs)
            levels = b"" if codes.levels is None else codes.levels.values.tobytes()
            apart = tensor.name if codes.across else ""
            # Blocks have a scale each; what the runtime widens has the scales of the file, one a group.
            group = None if isinstance(form, BlockForm) else codes.group
            numbers = (codes.zero_type, codes.zero_kind)
            scales = (codes.scale_type, numbers, codes.scale_table is None, group)
            keys.add((scales, form, order, levels, apart))
        return len(keys) == 1

    def becomes(self, tensor: LazyTensor) -> str:
        """Say in words what a matrix of packed weights becomes."""
        if tensor.packed is None:
            return f"whole, stored in {tensor.narrow_type or 'float32'}"
        found = self.carried(tensor)
        if found is not None:
            return _in_words(*found)
        form_anew = requantised(tensor)
        anew = f"{BITS[form_anew.precision]} bits, block {form_anew.block_size}"
        keeps = self._few and self._target.folds_constants and tensor.name != _TABLE
        if keeps and tensor.codes is not None and folded_values(tensor.codes) is not None:
            return f"quantised anew to {anew}, which come close; --accuracy-level 0 keeps the values"
        return f"quantised anew to {anew}: the runtime has no form that holds it"

    def _carried(self, tensor: LazyTensor, finest: tuple[int, int]) -> tuple[Codes, Form] | None:
        codes = tensor.codes
        looked_up = tensor.name == _TABLE
        # Rows of a table are looked up, so its columns stay in their order and as large as they are.
        if codes is None or (looked_up and not codes.takes_inputs_as_they_are):
            return None
        widths = widths_for(tensor.name, self._target)
        block = finest[0 if tensor.name.endswith(_FINE_WEIGHTS) else 1]
        form: Form | None = None
        if self._target.folds_constants and not looked_up:
            as_values = self._exact or (codes.across > 0 and self._few)
            form = (folded_values(codes) if as_values else None) or folded_form(
                codes, widths, block, widen_pairs=self._widen_pairs
            )
        form = form or carried_form(codes, widths, block)
        return None if form is None else (codes, form)

    def _added(self, packed: Sequence[LazyTensor], finest: tuple[int, int], plain: float) -> float:
        """Return how large all matrices are over what they take in the file."""
        stored = carried = plain
        for tensor in packed:
            found = self._carried(tensor, finest)
            if found is not None:
                codes, form = found
                stored += tensor.shape[0] * stored_bits(codes) / 8
                bits = carried_bits(codes, form) if isinstance(form, BlockForm) else folded_bits(codes, form)
                carried += tensor.shape[0] * bits / 8
        return carried / stored if stored else 1.0


def _in_words(codes: Codes, form: Form) -> str:
    """Say how the graph has a matrix: ``4 bits, block 32, exactly``."""
    if isinstance(form, FoldedValues):
        return f"values in float32, exactly, of {form.bits} bits in the file"
    near = f"within {codes.rounding:.2%} of a block's largest value" if codes.rounding else "exactly"
    if isinstance(form, BlockForm):
        return f"{form.bits} bits, block {form.block_size}, {near}"
    offsets = ", zero points beside the codes" if form.offsets else ""
    narrow = "" if form.bits == form.form.bits else f", of {form.bits} bits in the file"
    inputs = ", inputs not rounded" if form.pairs else ""
    return f"{form.form.bits} bits, block {form.form.block_size}, {near}{narrow}{inputs}{offsets}"


def widths_for(name: str, target: Capabilities) -> tuple[int, ...]:
    """Return the widths that the codes of a tensor may have: those of a table are looked up by another
    operator.
    """
    return target.table_bits if name == _TABLE else target.carried_bits


def _nbytes(tensor: LazyTensor) -> float:
    """Return about how many bytes a tensor takes, in the file and in an artifact alike."""
    return math.prod(tensor.shape) * np.dtype(SCALE_DTYPES[tensor.narrow_type or "float32"]).itemsize


def _stored_by_layer(tensor: LazyTensor) -> bool:
    """Tell whether one node reads a matrix with all others of its layer, so that they settle its form."""
    module = tensor.name.removesuffix(".weight")
    return is_expert(module) or is_router(module)


def source_forms(tensors: Mapping[str, LazyTensor], forms: SourceForms) -> tuple[SourceForm, ...]:
    """Return how the matrices of a checkpoint of packed weights are stored there, and what they become;
    experts and routers apart, whose form a layer settles for all of them.
    """
    found: dict[tuple[str, str], list[str]] = {}
    for tensor in _stored_alone(tensors):
        form = (tensor.packed or tensor.dtype, forms.becomes(tensor))
        found.setdefault(form, []).append(tensor.name.removesuffix(".weight"))
    return tuple(
        SourceForm(modules=tuple(modules), stored=stored, becomes=becomes)
        for (stored, becomes), modules in found.items()
    )


def widened_bytes(tensors: Mapping[str, LazyTensor], forms: SourceForms) -> int:
    """Return how much more matrices take in memory than in the data file, since the runtime widens them."""
    bits = 0
    for tensor in _stored_alone(tensors):
        found = forms.carried(tensor)
        if found is not None and not isinstance(found[1], BlockForm):
            codes, form = found[0], found[1]
            bits += tensor.shape[0] * max(0, loaded_bits(codes, form) - folded_bits(codes, form))
    return bits // 8


def _stored_alone(tensors: Mapping[str, LazyTensor]) -> list[LazyTensor]:
    """Return the matrices whose form no layer settles for all that it has."""
    return [t for t in tensors.values() if len(t.shape) == 2 and not _stored_by_layer(t)]


def widens_pairs(tensors: Mapping[str, LazyTensor], target: Capabilities, recipe: Recipe) -> bool:
    """Tell whether some matrix has codes of 2 bits that are widened, at precision ``source``."""
    forms = SourceForms(tensors, target, recipe)
    found = (forms.carried(tensor) for tensor in _stored_alone(tensors))
    return any(one is not None and isinstance(one[1], FoldedForm) and one[1].pairs for one in found)


def source_notice(tensors: Mapping[str, LazyTensor], target: Capabilities, recipe: Recipe) -> str:
    """Say what becomes of a checkpoint's matrices at precision ``source``."""
    alone = _stored_alone(tensors)
    matrices = sum(len(tensor.shape) == 2 for tensor in tensors.values())
    rest = "; llorch inspect shows what experts and routers became" if len(alone) < matrices else ""
    if all(tensor.packed is None for tensor in tensors.values() if len(tensor.shape) == 2):
        return carried_notice((tensor.dtype, widths_for(tensor.name, target)) for tensor in alone) + rest
    forms = SourceForms(tensors, target, recipe)
    found = (
        f"{len(form.modules)} of {form.stored} ({form.becomes})" for form in source_forms(tensors, forms)
    )
    wider = widened_bytes(tensors, forms)
    if wider:
        rest += f"; they take {wider / 2**20:,.0f} MiB more once the runtime has loaded them"
    if recipe.two_bit_accuracy_level == 0:
        rest += "; --accuracy-level 4 keeps 2 bits in memory and rounds inputs to 8 bits, as those of others"
    return f"matrices as the graph has them: {'; '.join(found)}{rest}"


def packed_notice(tensors: Mapping[str, LazyTensor], *, adapted: bool) -> str | None:
    """Say that packed weights are not kept as they are, at another precision; None if there are none.

    adapted: an adapter is merged into some, which goes with no precision that keeps them.
    """
    packed = Counter(tensor.packed for tensor in tensors.values() if tensor.packed is not None)
    if not packed:
        return None
    forms = "; ".join(f"{count} of {form}" for form, count in packed.items())
    hint = "" if adapted else "; --precision source keeps their codes"
    return f"the checkpoint's weights are packed ({forms}), and are stored anew from their values{hint}"
