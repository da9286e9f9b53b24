"""How a checkpoint says that its weights are scaled eight-bit floats: ``quantization_config``, checked."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from llorch_export.config.fields import Fields, listed, shown
from llorch_serve.errors import ArtifactError

_MAX_BLOCK: Final = 2**16
_WAY_OUT: Final = "export from the original weights, or from a GGUF file"
QUANTO_FILE: Final = "quanto_qmap.json"
PACKING_FILES: Final = ("hf_quant_config.json", "quantize_config.json", "quant_config.json", QUANTO_FILE)
"""Where tools say how they packed weights, if not in config.json."""


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
        raise packed_weights(config, where)
    if fields.get("activation_scheme") not in (None, "dynamic", "static"):
        raise fields.wrong("activation_scheme", "'dynamic' or 'static'")
    if fields.get("fmt") not in (None, "e4m3", "float8_e4m3fn"):
        raise fields.wrong("fmt", "'e4m3' or 'float8_e4m3fn' (the storage type of the weights)")
    # ue8m0: scales are powers of two. Which type they are stored in is seen from the tensors.
    if fields.get("scale_fmt") not in (None, "float", "ue8m0"):
        raise fields.wrong("scale_fmt", "'float' or 'ue8m0'")
    # What is packed is seen from the storage types, and activations are not rounded.
    for inert in ("dequantize", "modules_to_not_convert", "ignored_layers", "act_per_tensor"):
        fields.get(inert)
    block = None
    if "weight_block_size" in fields:
        rows, columns = fields.array("weight_block_size", int, length=2)
        if not (0 < rows <= _MAX_BLOCK and 0 < columns <= _MAX_BLOCK):
            raise fields.wrong("weight_block_size", f"two integers from 1 to {_MAX_BLOCK}")
        block = (rows, columns)
    if fields.boolean("weight_per_tensor", block is None) and block is not None:
        raise fields.wrong("weight_per_tensor", "false, because weight_block_size is stated")
    if unknown := fields.unasked():
        raise ArtifactError(f"{where} has keys that are not understood: {listed(unknown)}; {_WAY_OUT}")
    return Fp8Format(block)


def packed_weights(config: Mapping[str, object], where: str) -> ArtifactError:
    """Return the refusal of weights that another tool has packed, naming the format; ``where`` says where it
    is stated.
    """
    nested = config.get("quantization")  # ModelOpt's own file
    settings = {**config, **nested} if isinstance(nested, Mapping) else config
    producer = settings.get("producer")
    maker = producer.get("name") if isinstance(producer, Mapping) else None
    names = [settings.get("quant_method") or maker, settings.get("quant_algo"), settings.get("format")]
    if not any(names) and type(settings.get("group_size")) is int:
        names = ["MLX groups"]
    format_name = " ".join(shown(name, 40) for name in names if isinstance(name, str)) or "an unnamed format"
    bits = settings.get("bits")
    width = f" with {bits} bits" if type(bits) is int else ""
    return ArtifactError(
        f"{where} says that the weights are packed as {format_name}{width}, which cannot be read; expected "
        f"plain weights or fp8 with scales; {_WAY_OUT}"
    )
