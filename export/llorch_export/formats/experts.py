"""How the experts of a layer are stored: all alike, since one node reads them.

Takes the formats that a recipe gives each of their matrices; gives the one of the layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from llorch_export.formats.module import ModuleFormat
from llorch_serve.errors import UsageError

_FINEST: Final = 16


def layer_format(forms: Sequence[ModuleFormat], hidden: int, inner: int) -> ModuleFormat:
    """Return the format of experts between sizes ``hidden`` and ``inner``, which blocks must divide.

    forms: of all their matrices. The finest blocks of them are taken, and finer ones where these do not
        divide.
    Raises UsageError if the matrices differ otherwise, or if no block size divides both sizes.
    """
    kinds = {(form.precision, form.quantizer, form.scale_type) for form in forms}
    if len(kinds) > 1:
        shown = sorted(" ".join(filter(None, kind)) for kind in kinds)
        raise UsageError(
            f"a layer's experts would be stored as {' and '.join(shown)}; one node reads them all, so let "
            'rules name "*.experts.*" as a whole'
        )
    sizes = [form.block_size for form in forms if form.block_size is not None]
    if not sizes:
        return forms[0]
    size = min(sizes)
    while size > _FINEST and (hidden % size or inner % size):
        size //= 2
    if hidden % size or inner % size:
        raise UsageError(
            f"experts from {hidden} to {inner} channels cannot be stored in blocks, which must divide both "
            f'and have at least {_FINEST} elements; choose fp32, fp16 or bf16 for "*.experts.*"'
        )
    return replace(forms[0], block_size=size)
