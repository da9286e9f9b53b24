"""bitsandbytes' state of a 4-bit weight: JSON in a tensor of bytes, and scales that are codes themselves."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from llorch_export.checkpoint.packed.base import PackedModule
from llorch_export.checkpoint.packed.stored import StoredArray
from llorch_export.checkpoint.packed.tables import TABLES
from llorch_export.config.fields import Fields
from llorch_serve.errors import ArtifactError

Floats = npt.NDArray[np.float32]

_MAX_BYTES: Final = 4096
_MAX_BLOCK: Final = 2**16
_TOLERANCE: Final = 1e-6


@dataclass(frozen=True, slots=True)
class Nested:
    """Scales in codes of 8 bits: ``block`` of them share a factor, and ``offset`` is added to all."""

    block: int
    offset: float


@dataclass(frozen=True, slots=True)
class QuantState:
    """How one weight is packed: ``block`` flat weights share a scale. nested: of scales in 8 bits."""

    table: str
    block: int
    nested: Nested | None


def quant_state(module: PackedModule, table: str) -> QuantState:
    """Read the state of a weight that is packed by ``table``. Raises ArtifactError if it is damaged, or says
    anything else than the config does.
    """
    place = module.part(f"weight.quant_state.bitsandbytes__{table}")
    if len(place.shape) != 1 or place.shape[0] > _MAX_BYTES:
        raise ArtifactError(
            f"{place.path}: tensor {place.name} is {list(place.shape)}, expected at most {_MAX_BYTES} bytes "
            "of JSON; the file is damaged, fetch it again"
        )
    place.require(place.shape, ("U8",))
    try:
        data = json.loads(place.read().tobytes())
        if not isinstance(data, dict):
            raise ValueError(f"it is {type(data).__name__}, not an object")
    except (ValueError, RecursionError) as error:
        raise ArtifactError(
            f"{place.path}: tensor {place.name} is not valid JSON: {error}; the file is damaged, fetch it "
            "again"
        ) from error
    fields = Fields(data, origin=f"{place.path}: tensor {place.name}")
    if fields.get("quant_type") != table:
        raise fields.wrong("quant_type", f"{table!r}, as the name of the tensor says")
    shape = tuple(fields.array("shape", int))
    if shape != module.shape:
        raise fields.wrong("shape", f"{list(module.shape)}, as its config says")
    fields.get("dtype")  # what kernels compute in; values here are exact
    state = QuantState(table, fields.integer("blocksize", high=_MAX_BLOCK), _nested(fields))
    if unknown := fields.unasked():
        raise ArtifactError(
            f"{fields.origin} has keys that are not understood: {', '.join(unknown[:8])}; export from the "
            "original weights"
        )
    _require_table(module.part("weight.quant_map"), table)
    return state


def _nested(fields: Fields) -> Nested | None:
    if "nested_blocksize" not in fields:
        return None
    if fields.get("nested_dtype") != "float32":
        raise fields.wrong("nested_dtype", "'float32'")
    offset = fields.number("nested_offset", at_least=-3e38, high=3e38)
    return Nested(fields.integer("nested_blocksize", high=_MAX_BLOCK), offset)


def _require_table(place: StoredArray, table: str) -> None:
    """Raise ArtifactError if the stored table is not the one of its name, which bitsandbytes computes by."""
    place.require((16,), ("F32",))
    stored = place.read().astype(np.float32)
    if not np.allclose(stored, np.array(TABLES[table], np.float32), rtol=0, atol=_TOLERANCE):
        raise ArtifactError(
            f"{place.path}: tensor {place.name} is not the table of {table}; the file is damaged, fetch it "
            "again"
        )


@dataclass(frozen=True, slots=True)
class NestedScales:
    """Makes scales of their codes: ``table`` [256] times ``factors`` [blocks of codes], plus the offset."""

    nested: Nested
    table: Floats
    factors: Floats

    @staticmethod
    def of(module: PackedModule, nested: Nested, scales: int) -> NestedScales:
        """Read table and factors of so many scales. Raises ArtifactError if their shapes do not fit."""
        table, factors = module.part("weight.nested_quant_map"), module.part("weight.nested_absmax")
        table.require((256,), ("F32",))
        factors.require((-(-scales // nested.block),), ("F32",))
        return NestedScales(nested, table.read().astype(np.float32), factors.read().astype(np.float32))

    def scales(self, codes: npt.NDArray[np.generic], first: int) -> Floats:
        """Return the scales of ``codes``, the first of which is the weight's scale number ``first``."""
        blocks = np.arange(first, first + len(codes)) // self.nested.block
        with np.errstate(all="ignore"):  # what is not finite is reported by who asked
            found: Floats = self.table[codes.view(np.uint8)] * self.factors[blocks]
            found += np.float32(self.nested.offset)
        return found
