"""How a checkpoint says that its weights are scaled eight-bit floats: ``quantization_config``, checked."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from llorch_export.config.fields import Fields
from llorch_serve.errors import ArtifactError

_MAX_BLOCK: Final = 2**16
_WAY_OUT: Final = "export from the original weights, or from a GGUF file"


@dataclass(frozen=True, slots=True)
class Fp8Format:
    """How a checkpoint's fp8 weights are scaled.

    block: rows and columns that share a scale; None: one scale for the whole weight.
    """

    block: tuple[int, int] | None


def fp8_format(config: object, *, origin: str) -> Fp8Format | None:
    """Parse the value of ``quantization_config``; None if there is none. ``origin`` names the file in errors.

    Raises ArtifactError for any packing that is not understood.
    """
    if config is None:
        return None
    where = f"{origin}: quantization_config"
    if not isinstance(config, dict):
        raise ArtifactError(f"{where} is {type(config).__name__}, expected an object")
    fields = Fields(config, origin=where)
    method = fields.get("quant_method")
    if method != "fp8":
        raise ArtifactError(
            f"{where}: quant_method is {method!r}, and packed weights of other tools than fp8 cannot be "
            f"read; {_WAY_OUT}"
        )
    if fields.get("activation_scheme") not in (None, "dynamic", "static"):
        raise fields.wrong("activation_scheme", "'dynamic' or 'static'")
    fields.require("fmt", "e4m3", "the storage type of the weights")
    fields.require("scale_fmt", "float", "scales are float32")
    for inert in ("dequantize", "modules_to_not_convert", "ignored_layers"):
        fields.get(inert)  # what is packed is seen from the storage types
    block = None
    if "weight_block_size" in fields:
        rows, columns = fields.array("weight_block_size", int, length=2)
        if not (0 < rows <= _MAX_BLOCK and 0 < columns <= _MAX_BLOCK):
            raise fields.wrong("weight_block_size", f"two integers from 1 to {_MAX_BLOCK}")
        block = (rows, columns)
    if unknown := fields.unasked():
        raise ArtifactError(f"{where} has keys that are not understood: {', '.join(unknown[:8])}; {_WAY_OUT}")
    return Fp8Format(block)
