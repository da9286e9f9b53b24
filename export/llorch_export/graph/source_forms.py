"""What becomes of a checkpoint's matrices at precision ``source``, one by one, and in words.

Takes tensors as they are read; :mod:`llorch_export.graph.blocks` stores what is decided here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from llorch_export.checkpoint.base import LazyTensor
from llorch_export.checkpoint.codes import Codes
from llorch_export.formats.module import EMBEDDING, FINE_MODULES, ModuleFormat
from llorch_export.formats.precisions import BITS
from llorch_export.formats.targets import Capabilities
from llorch_export.quantize.carried import carried_form
from llorch_export.quantize.repack import BlockForm, carried_notice

REQUANTISED: Final = ModuleFormat("int8", 64, None, "bfloat16")
"""What becomes of packed matrices that no form of the runtime holds as they are."""

_FINE_WEIGHTS: Final = tuple(f".{module}.weight" for module in FINE_MODULES)
_TABLE: Final = f"{EMBEDDING}.weight"


def carried_matrix(
    tensor: LazyTensor, target: Capabilities, *, looked_up: bool = False
) -> tuple[Codes, BlockForm] | None:
    """Return the codes of a packed matrix and the form that holds them; None if none does, or if it is not
    packed.
    """
    if tensor.codes is None:
        return None
    widths = target.table_bits if looked_up else target.carried_bits
    fine = tensor.name.endswith(_FINE_WEIGHTS)
    form = carried_form(tensor.codes, widths, looked_up=looked_up, fine=fine)
    return None if form is None else (tensor.codes, form)


def stored_alike(tensors: Sequence[LazyTensor], target: Capabilities) -> bool:
    """Tell whether matrices can be stacked into one without changing how any of them is stored."""
    if all(tensor.packed is None and tensor.narrow_type is None for tensor in tensors):
        return True
    keys: set[tuple[object, ...]] = set()
    for tensor in tensors:
        found = carried_matrix(tensor, target)
        if found is None:
            keys.add((tensor.packed is None, tensor.narrow_type))
            continue
        codes, form = found
        order = b"" if codes.input_order is None else codes.input_order.tobytes()
        keys.add((codes.scale_type, form, order))
    return len(keys) == 1


def source_forms(tensors: Mapping[str, LazyTensor], target: Capabilities) -> dict[str, tuple[str, str]]:
    """Return, by module, how each matrix is stored in a checkpoint of packed weights, and what it becomes."""
    return {
        name.removesuffix(".weight"): (tensor.packed or tensor.dtype, _becomes(name, tensor, target))
        for name, tensor in tensors.items()
        if len(tensor.shape) == 2
    }


def source_notice(tensors: Mapping[str, LazyTensor], target: Capabilities) -> str:
    """Say what becomes of a checkpoint's matrices at precision ``source``."""
    matrices = [tensor for tensor in tensors.values() if len(tensor.shape) == 2]
    if all(tensor.packed is None for tensor in matrices):
        return carried_notice(tensor.dtype for tensor in matrices)
    return f"matrices as the graph has them: {_listed(source_forms(tensors, target).values())}"


def _listed(forms: Iterable[tuple[str, str]]) -> str:
    return "; ".join(
        f"{count} of {stored} ({becomes})" for (stored, becomes), count in sorted(Counter(forms).items())
    )


def _becomes(name: str, tensor: LazyTensor, target: Capabilities) -> str:
    if tensor.packed is None:
        narrow = "float32" if tensor.narrow_type is None else tensor.narrow_type
        return f"whole, stored in {narrow}"
    found = carried_matrix(tensor, target, looked_up=name == _TABLE)
    if found is not None:
        codes, form = found
        near = "exactly" if not codes.rounding else f"within {codes.rounding:.2%} of a block's largest value"
        return f"{form.bits} bits, block {form.block_size}, {near}"
    anew = f"{BITS[REQUANTISED.precision]} bits, block {REQUANTISED.block_size}"
    return f"quantised anew to {anew}: the runtime has no form that holds it"
