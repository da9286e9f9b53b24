"""Settings of optimum-quanto: ``quanto_qmap.json``, which it writes beside the config."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, NoReturn

from llorch_export.config.fields import Fields, shown
from llorch_export.config.packed.base import WAY_OUT, Packing, refuse_unasked
from llorch_serve.errors import ArtifactError

TYPES: Final = ("qint2", "qint4", "qint8", "qfloat8", "qfloat8_e4m3fn", "qfloat8_e5m2")
_NONE: Final = "none"
_MAX_MODULES: Final = 2**17


@dataclass(frozen=True, slots=True)
class QuantoPacking(Packing):
    """optimum-quanto. types: of weights, one of ``TYPES``, by the name of the module."""

    types: Mapping[str, str]


def quanto_packing(fields: Fields) -> QuantoPacking:
    """Read the map of modules. Raises ArtifactError for what is not understood."""
    if (names := fields.unasked()) and len(names) > _MAX_MODULES:
        raise ArtifactError(
            f"{fields.origin} names {len(names)} modules, expected at most {_MAX_MODULES}; {WAY_OUT}"
        )
    types, rounds = {}, False
    for name in names:
        value, origin = fields.get(name), f"{fields.origin}: {shown(name)}"
        if not isinstance(value, Mapping):
            raise ArtifactError(f"{origin} is no object of settings; {WAY_OUT}")
        own = Fields(value, origin=origin)
        kind = own.get("weights")
        if kind not in (None, _NONE, *TYPES):
            raise own.wrong("weights", f"one of {', '.join((_NONE, *TYPES))}; {WAY_OUT}")
        activations = own.get("activations")
        if activations not in (None, _NONE, *TYPES):
            raise own.wrong("activations", f"one of {', '.join((_NONE, *TYPES))}; {WAY_OUT}")
        rounds |= activations not in (None, _NONE)
        refuse_unasked(own)
        if isinstance(kind, str) and kind != _NONE:
            types[name] = kind
    notice = "quanto rounds the inputs and outputs of layers too; here they are what --accuracy-level says"
    return QuantoPacking(
        notices=(notice,) if rounds else (), unused=(".input_scale", ".output_scale"), types=types
    )


def refuse_quanto_config(fields: Fields) -> NoReturn:
    """Refuse what transformers writes into ``config.json``, since it does not store such weights. Raises
    ArtifactError.
    """
    raise ArtifactError(
        f"{fields.origin} says quanto, by which transformers packs weights when a model is loaded, and "
        "stores none; save the model with QuantizedModelForCausalLM of optimum.quanto, which writes "
        f"quanto_qmap.json, or {WAY_OUT}"
    )
