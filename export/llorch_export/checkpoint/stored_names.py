"""What the tensors of a safetensors folder are called, in the terms of the model's own modules.

Input are names as files have them; output are those that :mod:`llorch_export.checkpoint.names` expects.
Wrappers of training (torch.compile, FSDP, PEFT, TRL) leave their own parts in names, and files of a model
without its head lack the first part. A name is only changed where the result is a tensor that the config
calls for; all others stay, and are then refused by the name that they have.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass
from typing import Final

from llorch_export.checkpoint.fp8 import ACTIVATION_SCALES, SCALES, WEIGHT
from llorch_export.checkpoint.names import EMBEDDING, HEAD

SCALE_PARTS: Final = (*SCALES, *ACTIVATION_SCALES)
"""What may stand in place of the ending of an fp8 weight."""

_BASE: Final = "model."
# torch.compile, FSDP and activation checkpointing wrap any module, so these stand anywhere in a name.
_INNER: Final = re.compile(r"(?<![^.])(?:_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)\.")
# What training makes models an attribute of: DistributedDataParallel, TRL's value head, PEFT.
_TRAINING: Final = re.compile(r"(?:(?:module|pretrained_model|base_model\.model)\.)+")
# What models are an attribute of: DistributedDataParallel, TRL's value head, PEFT, models of image and text.
_OUTER: Final = re.compile(
    r"(?:(?:module|pretrained_model|base_model\.model|model\.language_model|language_model)\.)+"
)
_VALUE_HEAD: Final = re.compile(r"(?:.+\.)?v_head\..+")


@dataclass(frozen=True, slots=True)
class StoredName:
    """A tensor's name.

    wrapper: the parts that were left out of it and that transformers does not leave out; "" if none.
    """

    name: str
    wrapper: str = ""


def untrained_name(stored: str) -> str:
    """Return a stored name without what training has wrapped around the model and its modules."""
    inner = _INNER.sub("", stored)
    outer = _TRAINING.match(inner)
    return inner if outer is None else inner[outer.end() :]


def is_value_head(name: str) -> bool:
    """Tell whether a tensor belongs to a head that training put beside the model's own."""
    return _VALUE_HEAD.fullmatch(name) is not None


def module_name(stored: str, expected: Collection[str], parts: Collection[str] = SCALE_PARTS) -> StoredName:
    """Return what a tensor of a file is called in the model, or its own name if that is no tensor of it.

    expected: the tensors that the config calls for. parts: what may stand in place of a weight's own ending.
    """
    if _is_known(stored, expected, parts):
        return StoredName(stored)
    if (found := _by_base(stored, expected, parts)) is not None:  # as transformers does it
        return StoredName(found)
    inner = _INNER.sub("", stored)
    outer = _OUTER.match(inner)
    bare = inner if outer is None else inner[outer.end() :]
    for name in (inner, bare):
        known = name if _is_known(name, expected, parts) else _by_base(name, expected, parts)
        if known is not None:
            left_out = {m.group() for m in _INNER.finditer(stored)} | ({outer.group()} if outer else set())
            return StoredName(known, "".join(sorted(left_out)))
    return StoredName(stored)


def _by_base(name: str, expected: Collection[str], parts: Collection[str]) -> str | None:
    """Return the name with ``model.`` taken away or put in front, whichever the config calls for."""
    for changed in (name.removeprefix(_BASE), f"{_BASE}{name}"):
        if changed != name and _is_known(changed, expected, parts):
            return changed
    return None


def _is_known(name: str, expected: Collection[str], parts: Collection[str]) -> bool:
    if name in expected or name in (EMBEDDING, HEAD):
        return True
    modules = (name.removesuffix(suffix) for suffix in parts if name.endswith(suffix))
    return any(f"{module}{WEIGHT}" in expected or module in expected for module in modules)
