"""What every reader of a packed format takes and gives.

A reader is shown the parts of one module at a time, and nothing is read of them that is large. It gives a
:class:`PackedMatrix`, or says that the module is not packed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Final, Protocol

import numpy as np
import numpy.typing as npt

from llorch_export.checkpoint.codes import Codes
from llorch_export.checkpoint.packed.stored import StoredArray
from llorch_export.checkpoint.stored_names import untrained_name
from llorch_serve.artifact.manifest import ScaleType
from llorch_serve.errors import ArtifactError

SCALE_TYPES: Final[Mapping[str, ScaleType]] = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
"""By safetensors' name of the type."""
FLOATS: Final = tuple(SCALE_TYPES)
LARGEST_FACTOR: Final = 2.0**64
"""Of inputs, which may themselves be as large in float32."""


@dataclass(frozen=True, slots=True)
class PackedModule:
    """A module that a file may have packed.

    name: ``model.layers.0.self_attn.q_proj``. shape: of its weight, [out, in], as the config calls for it.
    parts: at least one; what the files hold of it, by what follows the module's name: ``qweight``,
        ``weight.absmax``.
    stack: the weight is so many matrices, whose rows are counted through; None: it is one.
    """

    name: str
    shape: tuple[int, int]
    parts: Mapping[str, StoredArray]
    stack: int | None = None

    @property
    def own_name(self) -> str:
        """What the module was called when it was packed, by which settings mean it; files keep that name."""
        part, stored = next(iter(self.parts.items()))
        return untrained_name(stored.name.removesuffix(f".{part}"))

    def part(self, name: str) -> StoredArray:
        """Return a part that must be there. Raises ArtifactError if it is not."""
        found = self.parts.get(name)
        if found is None:
            some = next(iter(self.parts.values()))
            raise ArtifactError(
                f"{some.path}: module {self.name} has {', '.join(sorted(self.parts))} but no {name}; the "
                "file is incomplete, fetch it again"
            )
        return found


@dataclass(frozen=True, slots=True)
class PackedMatrix:
    """A weight [out, in] that has been read.

    form: how it is packed, in words: ``GPTQ, 4 bits, groups of 128``.
    load_rows: as of :class:`~llorch_export.checkpoint.base.LazyTensor`; exact values, rounded to float32
        once.
    codes: None where the format's values are not whole numbers times a scale.
    """

    form: str
    load_rows: Callable[[int, int], npt.NDArray[np.float32]]
    codes: Codes | None = None


class PackedReader(Protocol):
    """Reads the modules of one checkpoint."""

    @property
    def suffixes(self) -> tuple[str, ...]:
        """What may follow the name of a module that is packed: ``.qweight``."""

    def read(self, module: PackedModule) -> PackedMatrix | None:
        """Return the weight, or None if the module is not packed; all of its parts count as read otherwise.

        module: has at least one part. Raises ArtifactError if parts are missing or do not fit each other.
        """


def from_codes(form: str, codes: Codes) -> PackedMatrix:
    """Return the matrix that ``codes`` stand for."""
    return PackedMatrix(form, codes.values, codes)


def with_scaled_inputs(module: PackedModule, matrix: PackedMatrix, place: StoredArray) -> PackedMatrix:
    """Return the matrix whose inputs are multiplied by numbers of their own, [inputs] or [1, inputs]."""
    columns = module.shape[1]
    place.require((1, columns) if len(place.shape) == 2 else (columns,), FLOATS)
    factors: npt.NDArray[np.float32] = place.read().reshape(columns).astype(np.float32)
    require_finite_scales(factors, place)
    largest = np.abs(factors).max()
    if largest > LARGEST_FACTOR:
        raise ArtifactError(
            f"{place.path}: tensor {place.name} holds factors of inputs up to {largest:g}, expected at most "
            f"{LARGEST_FACTOR:g}, beyond which inputs times them are no numbers; the weights are damaged, "
            "fetch them again"
        )

    def load_rows(start: int, stop: int) -> npt.NDArray[np.float32]:
        with np.errstate(over="ignore", invalid="ignore"):
            found: npt.NDArray[np.float32] = matrix.load_rows(start, stop) * factors
        require_finite_scales(found, place)
        return found

    codes = None if matrix.codes is None else replace(matrix.codes, input_scales=factors)
    return PackedMatrix(f"{matrix.form}, inputs scaled", load_rows, codes)


def scale_type(scales: StoredArray) -> ScaleType:
    """Return the type that scales are stored in. Raises ArtifactError if they are no floating point
    numbers.
    """
    found: ScaleType | None = SCALE_TYPES.get(scales.kind)
    if found is None:
        raise ArtifactError(
            f"{scales.path}: tensor {scales.name} is {scales.kind}, expected scales in one of "
            f"{', '.join(SCALE_TYPES)}; fetch the model again"
        )
    return found


def require_finite_scales(scales: npt.NDArray[np.float32], place: StoredArray) -> None:
    """Raise ArtifactError if some of ``scales``, which came out of ``place``, are NaN or infinite."""
    if not np.isfinite(scales).all():
        raise ArtifactError(
            f"{place.path}: tensor {place.name} holds scales that are NaN or infinite; the weights are "
            "damaged, fetch them again"
        )


def require_middle(
    zeros: npt.NDArray[np.uint8], bits: int, place: StoredArray, said: str, way_out: str
) -> None:
    """Raise ArtifactError if a zero point is not what symmetric codes have.

    said: the setting that calls them symmetric. way_out: what to do if the file is right.
    """
    middle = 2 ** (bits - 1)
    if (zeros == middle).all():
        return
    raise ArtifactError(
        f"{place.path}: tensor {place.name} holds zero points {zeros.min()} to {zeros.max()}, expected "
        f"{middle} alone, since quantization_config says {said}; if the file is right {way_out}, else fetch "
        "it again"
    )


def in_words(name: str, bits: int, group: int, columns: int, *more: str) -> str:
    """Say how a matrix is packed: ``GPTQ, 4 bits, groups of 128``."""
    grouping = "one scale an output" if group == columns else f"groups of {group}"
    return ", ".join((name, f"{bits} bits", grouping, *more))
