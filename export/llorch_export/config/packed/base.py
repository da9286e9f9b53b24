"""What the settings of every packed format have in common.

Input is the object that a tool wrote into ``config.json``, or into a file of its own beside it; output is a
:class:`Packing` of the format, which :mod:`llorch_export.checkpoint.packed` reads tensors by.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from llorch_export.config.fields import MAX_NAME, Fields
from llorch_serve.errors import ArtifactError

WAY_OUT: Final = "export from the original weights, or from a GGUF file"
MAX_PATTERNS: Final = 2**14
"""Names and patterns of modules that a file may list."""
ONE_GROUP: Final = -1
"""As a group size: all inputs of an output share a scale."""


@dataclass(frozen=True, slots=True)
class Packing:
    """How a checkpoint's weights are packed; each format has a class of its own.

    notices: what a person should know of the settings, a line each: what the packing's own code would do and
        this exporter does not.
    unused: endings of the names of tensors that no weight needs, such as scales of the KV cache.
    """

    notices: tuple[str, ...]
    unused: tuple[str, ...] = field(default=(), kw_only=True)


def group_size(fields: Fields, key: str, default: int | None = None) -> int:
    """Return a positive number of inputs that share a scale, or ``ONE_GROUP``. Raises ArtifactError."""
    value = fields.integer(key, default, low=ONE_GROUP, high=2**20)
    if value == 0:
        raise fields.wrong(key, "a positive number of inputs, or -1 for one scale an output")
    return value


def names(fields: Fields, key: str) -> tuple[str, ...]:
    """Return a list of names or patterns of modules, empty if absent. Raises ArtifactError."""
    if key not in fields:
        fields.get(key)
        return ()
    found: Sequence[str] = fields.array(key, str)
    if len(found) > MAX_PATTERNS or any(len(name) > MAX_NAME for name in found):
        raise fields.wrong(key, f"at most {MAX_PATTERNS} names of modules of at most {MAX_NAME} characters")
    return tuple(found)


def refuse_unasked(fields: Fields, inert: Sequence[str] = ()) -> None:
    """Raise ArtifactError if there are settings that nobody asked for; ``inert``: that say how the weights
    were found, and nothing of what they are.
    """
    if unknown := fields.unasked(known=inert):
        raise ArtifactError(
            f"{fields.origin} has keys that are not understood: {', '.join(unknown[:8])}; {WAY_OUT}"
        )
