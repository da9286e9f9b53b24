"""Experts in MXFP4, as gpt-oss is published: ``_blocks`` [experts, out, in / 32, 16] and ``_scales``
[experts, out, in / 32].

A byte holds two codes of E2M1, the lower half first; a scale is the exponent of a power of two (OCP
Microscaling Formats 1.0).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

from llorch_export.checkpoint.packed.base import PackedMatrix, PackedModule
from llorch_export.checkpoint.packed.floats import mxfp4
from llorch_export.checkpoint.packed.scales import Grid
from llorch_export.config.packed.mxfp4 import Mxfp4Packing
from llorch_serve.errors import ArtifactError

_BLOCK: Final = 32
_CODES, _SCALES = "_blocks", "_scales"


@dataclass(frozen=True, slots=True)
class Mxfp4Reader:
    """Reads modules by the settings of one checkpoint."""

    packing: Mxfp4Packing
    suffixes: tuple[str, ...] = (_CODES, _SCALES)

    def read(self, module: PackedModule) -> PackedMatrix | None:
        """See :class:`llorch_export.checkpoint.packed.base.PackedReader`."""
        rows, columns = module.shape
        codes, scales = module.part(_CODES), module.part(_SCALES)
        if columns % _BLOCK or module.stack is None:
            raise ArtifactError(
                f"{codes.path}: module {module.name} of {columns} inputs is packed as MXFP4, expected "
                f"experts whose inputs are a multiple of {_BLOCK}; its config belongs to "
                "another model, fetch both again"
            )
        blocks = (module.stack, rows // module.stack, columns // _BLOCK)
        codes.require((*blocks, _BLOCK // 2), ("U8",))
        scales.require(blocks, ("U8",))
        grid = Grid.of((rows, columns), (1, _BLOCK))
        return mxfp4(
            replace(codes, shape=(rows, columns // 2)),
            grid,
            replace(scales, shape=(rows, columns // _BLOCK)),
        )
