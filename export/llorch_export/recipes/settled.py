"""Options with their defaults filled in, before it is known whether they go together.

Made from :class:`ExportOptions` without a model. ``conflicts.py`` checks it, and ``base.py`` makes it a
recipe.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from llorch_export.formats.module import PerChannelActivations, per_channel
from llorch_export.formats.precisions import BITS, HALF_TYPES, UNQUANTISED
from llorch_export.formats.targets import TARGETS, Capabilities
from llorch_export.options import ExportOptions
from llorch_export.recipes.storage_defaults import (
    DEFAULT_BLOCK_SIZE,
    DEFAULT_FINE_BLOCK_SIZE,
    default_head,
)
from llorch_serve.artifact.manifest import ComputeType, Precision


class Storage(Enum):
    """Where a recipe's weights are in blocks that share a scale."""

    SOURCE = "all matrices keep the blocks of a GGUF file, or the codes of packed weights"
    UNQUANTISED = "no weight is quantised"
    PER_CHANNEL = "no weight is in blocks: layers have one scale a channel, the head is unquantised"
    RULES = "only modules that rules name have blocks"
    BLOCKS = "layers or head have blocks, or both"


@dataclass(frozen=True, slots=True)
class SettledOptions:
    """What the options stand for; nothing is refused yet.

    target: the row of ``options.target``.
    precision, head: of linear layers, and of head and embedding.
    ruled: the precisions that rules ask for.
    activations: how inputs of per-channel int8 layers are rounded; None: there are none but by rules.
    per_channel: the settings that ask for per-channel int8 layers, as errors name them.
    asked_types: the types to compute in that flags and rules ask for, sorted; more than one is a conflict.
    compute_type: the first of them, or the target's default.
    block_size, fine_block_size: of layers and head in blocks; without meaning where there are none.
    """

    options: ExportOptions
    target: Capabilities
    precision: Precision
    head: Precision
    ruled: tuple[Precision, ...]
    activations: PerChannelActivations | None
    per_channel: tuple[str, ...]
    asked_types: tuple[ComputeType, ...]
    compute_type: ComputeType
    block_size: int
    fine_block_size: int

    @property
    def quantised(self) -> tuple[Precision, ...]:
        """The precisions of layers and head that have codes."""
        return tuple(precision for precision in (self.precision, self.head) if precision in BITS)

    @property
    def has_int4(self) -> bool:
        """Whether some weights have 4 bits."""
        return "int4" in (*self.quantised, *self.ruled)

    @property
    def storage(self) -> Storage:
        """Where weights are in blocks."""
        if "source" in (self.precision, self.head):
            return Storage.SOURCE
        if not self.quantised:
            return Storage.RULES if any(p in BITS for p in self.ruled) else Storage.UNQUANTISED
        if self.activations in ("row", "quarters") and self.head not in BITS and not self.options.rules:
            return Storage.PER_CHANNEL
        return Storage.BLOCKS

    @property
    def embeds(self) -> bool:
        """Whether the graph is asked to give vectors in place of logits."""
        return self.options.embed not in (None, "none")

    @property
    def int8_cache_possible(self) -> bool:
        """Whether there can be a graph over a KV cache in int8."""
        return self.target.int8_cache and self.compute_type == "float32" and not self.embeds


def settle(options: ExportOptions) -> SettledOptions:
    """Fill in the defaults of everything that does not depend on the model."""
    target = TARGETS[options.target]
    precision = options.precision or target.precision
    head = options.head_precision or default_head(precision, options.compute_type, options.target)
    ruled = tuple(rule.precision for rule in options.rules if rule.precision is not None)
    asked_types = _asked_types(options, (precision, head, *ruled))
    default_type = "float32" if "source" in (precision, head) else target.compute_types[0]
    quantised: Precision = next((p for p in (precision, head) if p in BITS), "int8")
    block_size = DEFAULT_BLOCK_SIZE[quantised] if options.block_size is None else options.block_size
    return SettledOptions(
        options=options,
        target=target,
        precision=precision,
        head=head,
        ruled=ruled,
        activations=per_channel(options.activations),
        per_channel=_per_channel_settings(options),
        asked_types=asked_types,
        compute_type=asked_types[0] if asked_types else default_type,
        block_size=block_size,
        fine_block_size=_fine_block_size(options, precision, block_size),
    )


def _asked_types(options: ExportOptions, precisions: tuple[Precision, ...]) -> tuple[ComputeType, ...]:
    """Return the types that unquantised precisions and ``--compute-type`` ask for, sorted."""
    asked: set[ComputeType] = {HALF_TYPES.get(p, "float32") for p in precisions if p in UNQUANTISED}
    if options.compute_type is not None:
        asked.add(options.compute_type)
    return tuple(sorted(asked))


def _fine_block_size(options: ExportOptions, precision: Precision, block_size: int) -> int:
    if options.fine_block_size is not None:
        return options.fine_block_size
    return DEFAULT_FINE_BLOCK_SIZE if precision == "int4" and options.block_size is None else block_size


def _per_channel_settings(options: ExportOptions) -> tuple[str, ...]:
    """Return where per-channel int8 layers are asked for, and what was said there."""
    said = [
        ("--activations", options.activations),
        *((f"{rule.label}: activations", rule.activations) for rule in options.rules),
    ]
    return tuple(f"{where} {value}" for where, value in said if per_channel(value) is not None)
