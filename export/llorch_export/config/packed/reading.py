"""From ``quantization_config``, or a file beside ``config.json``, to the settings of a format."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

from llorch_export.config.fields import Fields
from llorch_export.config.fp8 import QUANTO_FILE, Fp8Format, fp8_format, packed_weights
from llorch_export.config.packed.auto_round import auto_round_packing
from llorch_export.config.packed.awq import awq_packing
from llorch_export.config.packed.base import Packing
from llorch_export.config.packed.bitsandbytes import bitsandbytes_packing
from llorch_export.config.packed.compressed import compressed_packing
from llorch_export.config.packed.fbgemm import fbgemm_packing
from llorch_export.config.packed.gptq import gptq_packing
from llorch_export.config.packed.hqq import hqq_packing
from llorch_export.config.packed.modelopt import is_modelopt, modelopt_packing
from llorch_export.config.packed.mxfp4 import mxfp4_packing
from llorch_export.config.packed.quanto import quanto_packing, refuse_quanto_config
from llorch_export.config.packed.quark import quark_packing
from llorch_export.config.packed.torchao import torchao_packing

_METHODS: Final[Mapping[str, Callable[[Fields], Packing]]] = {
    "gptq": gptq_packing,
    "awq": awq_packing,
    "bitsandbytes": bitsandbytes_packing,
    "compressed-tensors": compressed_packing,
    "torchao": torchao_packing,
    "hqq": hqq_packing,
    "modelopt": modelopt_packing,
    "quark": quark_packing,
    "mxfp4": mxfp4_packing,
    "quanto": refuse_quanto_config,
    "fbgemm_fp8": fbgemm_packing,
    "auto-round": auto_round_packing,
    "auto_round": auto_round_packing,
    "intel/auto-round": auto_round_packing,
}
"""By ``quant_method``."""


def read_packing(config: object, *, origin: str) -> Packing | Fp8Format | None:
    """Parse the value of ``quantization_config``; None if there is none. ``origin`` names the file in errors.

    Raises ArtifactError for any packing that is not understood.
    """
    where = f"{origin}: quantization_config"
    if isinstance(config, Mapping):
        method = config.get("quant_method") or _unnamed(config)
        reader = _METHODS.get(method) if isinstance(method, str) else None
        if reader is not None:
            return reader(Fields(config, origin=where))
    return fp8_format(config, origin=origin)


def _unnamed(config: Mapping[object, object]) -> str | None:
    """Return the method of settings that do not name theirs."""
    if is_modelopt(config):
        return "modelopt"
    old = any(config.get(key) is True for key in ("load_in_4bit", "load_in_8bit"))
    return "bitsandbytes" if old else None


def read_packing_file(config: Mapping[str, object], *, name: str, origin: str) -> Packing:
    """Parse a file that a tool wrote beside ``config.json``; ``name`` is the file's.

    Raises ArtifactError for any packing that is not understood.
    """
    if name == QUANTO_FILE:
        return quanto_packing(Fields(config, origin=origin))
    method = config.get("quant_method") or _FILES.get(name)
    reader = _METHODS.get(method) if isinstance(method, str) else None
    if reader is None:
        raise packed_weights(config, origin)
    return reader(Fields(config, origin=origin))


_FILES: Final = {
    "quantize_config.json": "gptq",
    "quant_config.json": "awq",
    "hf_quant_config.json": "modelopt",
}
"""What a file means that does not say by which method weights were packed."""
