"""How the experts of a layer are stored: all alike, since one node reads them.

Takes the formats that a recipe gives each of their matrices; gives the one of the layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

from llorch_export.formats.module import WITH_ZERO_POINTS, ModuleFormat
from llorch_serve.errors import UsageError

_FINEST: Final = 16


@dataclass(frozen=True, slots=True)
class ExpertBlocks:
    """The one format of a layer's experts, in blocks."""

    format: ModuleFormat
    block_size: int

    @property
    def has_zero_points(self) -> bool:
        """Whether each block has a zero point of its own."""
        return self.format.quantizer in WITH_ZERO_POINTS


def expert_blocks(forms: Sequence[ModuleFormat], hidden: int, inner: int) -> ExpertBlocks:
    """Return the format of experts between sizes ``hidden`` and ``inner``, which blocks must divide.

    forms: of all their matrices, in blocks; the finest blocks of them are taken.
    Raises UsageError if the matrices differ otherwise, or if no block size divides both sizes.
    """
    kinds = {(form.precision, form.quantizer, form.scale_type) for form in forms}
    if len(kinds) > 1:
        shown = " and ".join(sorted(" ".join(filter(None, kind)) for kind in kinds))
        raise UsageError(
            f"a layer's experts would be stored as {shown}; one node reads them all, so let the rules name "
            '"*.experts.*" as a whole'
        )
    sizes = [form.block_size for form in forms]
    size = min(size for size in sizes if size is not None)
    while size > _FINEST and (hidden % size or inner % size):
        size //= 2
    if hidden % size or inner % size:
        raise UsageError(
            f"experts from {hidden} to {inner} channels cannot be stored in blocks, which must divide both "
            f"and have at least {_FINEST}; choose fp32, fp16 or bf16 for *.experts.*"
        )
    return ExpertBlocks(replace(forms[0], block_size=size), size)
