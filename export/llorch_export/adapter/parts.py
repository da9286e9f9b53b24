"""An adapter's tensors, sorted by the module they belong to and what they are of it.

Input are the names in its file, in any of the spellings that trainers leave: with or without PEFT's prefix,
an adapter's name, or the marks of compiled and wrapped models. Output are a table of parts, and what is left
out.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from llorch_export.adapter.settings import MERGE_FIRST
from llorch_export.checkpoint.stream import TensorRange
from llorch_serve.errors import ArtifactError

_MAX_NAME: Final = 500
_PREFIX: Final = "base_model.model."
_WRAPPERS: Final = ("_orig_mod.", "_fsdp_wrapped_module.", "_checkpoint_wrapped_module.")


class Part(StrEnum):
    """What a tensor is of its module; a member's value is how PEFT calls it."""

    A = "lora_A"
    B = "lora_B"
    B_BIAS = "lora_B.bias"
    EMBEDDING_A = "lora_embedding_A"
    EMBEDDING_B = "lora_embedding_B"
    MAGNITUDE = "lora_magnitude_vector"
    TOKENS = "trainable_tokens_delta"
    WEIGHT = "weight"
    BIAS = "bias"
    SAVED_WEIGHT = "modules_to_save.weight"
    SAVED_BIAS = "modules_to_save.bias"


FACTORS: Final = (Part.A, Part.B, Part.EMBEDDING_A, Part.EMBEDDING_B)

_NAME: Final = r"(?:\.(?P<adapter>(?!weight$|bias$)[\w-]+))?"
_SHAPES: Final = (
    (rf"\.lora_A{_NAME}\.weight", Part.A),
    (rf"\.lora_B{_NAME}\.weight", Part.B),
    (rf"\.lora_B{_NAME}\.bias", Part.B_BIAS),
    (rf"\.lora_embedding_A{_NAME}", Part.EMBEDDING_A),
    (rf"\.lora_embedding_B{_NAME}", Part.EMBEDDING_B),
    (rf"\.lora_magnitude_vector{_NAME}(?:\.weight)?", Part.MAGNITUDE),
    (rf"\.token_adapter\.trainable_tokens_delta{_NAME}", Part.TOKENS),
    # Copies of the base model's weights, which stand beside what replaces them.
    (rf"\.(?:original_module\.(?:weight|bias)|token_adapter\.trainable_tokens_original{_NAME})", None),
    (rf"\.modules_to_save{_NAME}\.weight", Part.SAVED_WEIGHT),
    (rf"\.modules_to_save{_NAME}\.bias", Part.SAVED_BIAS),
    (r"(?:\.(?:token_adapter\.)?base_layer)?\.weight", Part.WEIGHT),
    (r"(?:\.base_layer)?\.bias", Part.BIAS),
)
_KEYS: Final = tuple((re.compile(rf"(?P<module>[\w.]+?){end}"), part) for end, part in _SHAPES)

Parts = Mapping[str, Mapping[Part, TensorRange]]


@dataclass(frozen=True, slots=True)
class SortedParts:
    """modules: what the file holds, by module and part; copies: names of tensors that say nothing new."""

    modules: Parts
    copies: tuple[str, ...]


def sort_parts(tensors: Mapping[str, TensorRange]) -> SortedParts:
    """Sort an adapter's tensors.

    Raises ArtifactError for one that is no part of a LoRA adapter, for a part that is there twice, and for
    several adapters in one file.
    """
    modules: dict[str, dict[Part, TensorRange]] = {}
    copies: list[str] = []
    names: set[str] = set()
    for key, source in tensors.items():
        module, part, adapter = _taken_apart(key, source)
        if adapter is not None:
            names.add(adapter)
        if part is None:
            copies.append(key)
            continue
        parts = modules.setdefault(module, {})
        if part in parts:
            raise ArtifactError(
                f"{source.path} holds {parts[part].name} and {key}, which are the same part of {module}; "
                f"save the adapter again"
            )
        parts[part] = source
    if len(names) > 1:
        raise ArtifactError(
            f"{next(iter(tensors.values())).path} holds {len(names)} adapters, {', '.join(sorted(names)[:8])}"
            f"; save each in a folder of its own"
        )
    for parts in modules.values():
        copies += _one_of_each(parts)
    return SortedParts(modules, tuple(copies))


def _one_of_each(parts: dict[Part, TensorRange]) -> list[str]:
    """Let a saved module be its module's weight; return the names of those that are there under both names.

    PEFT reads the plain name then.
    """
    copies = []
    for saved, plain in ((Part.SAVED_WEIGHT, Part.WEIGHT), (Part.SAVED_BIAS, Part.BIAS)):
        source = parts.pop(saved, None)
        if source is not None and plain in parts:
            copies.append(source.name)
        elif source is not None:
            parts[plain] = source
    return copies


def _taken_apart(key: str, source: TensorRange) -> tuple[str, Part | None, str | None]:
    """Return a tensor's module, what it is of it (None: a copy), and the adapter's name if the key has it."""
    name = key
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "")
    name = name.removeprefix(_PREFIX)
    if len(key) <= _MAX_NAME:
        for pattern, part in _KEYS:
            if match := pattern.fullmatch(name):
                return match["module"], part, match.groupdict().get("adapter")
    raise ArtifactError(
        f"{source.path} holds tensor {key[:_MAX_NAME]}, which is no part of a LoRA adapter; {MERGE_FIRST}"
    )
