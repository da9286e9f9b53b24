"""The choices of one export, resolved and frozen."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

import msgspec

from llorch_export.formats import uses_static, whole
from llorch_export.transform.calibration import require_use
from llorch_serve.errors import UsageError
from llorch_serve.manifest import (
    Activations,
    Interop,
    Precision,
    Quantizer,
    Recipe,
    ScaleType,
    TransformName,
)

BITS: Final[dict[Precision, int]] = {"int8": 8, "int4": 4}
BLOCK_SIZES: Final = (16, 32, 64, 128, 256)

DEFAULT_PRECISION: Final[Precision] = "int8"

SEED: Final = 0
"""Of the rotation's signs. Another one gives another rounding error of the same size."""

TRANSFORMS: Final[tuple[TransformName, ...]] = ("equalise", "smooth", "hadamard", "rotate")
"""In the order they are made. They commute, so the order that they are named in does not matter."""

DEFAULT_BLOCK_SIZE: Final[dict[Precision, int]] = {"int8": 32, "int4": 64}
"""Block 32 costs no speed against 64 at 8 bits and gives the lower divergence (docs/precision.md)."""

DEFAULT_FINE_BLOCK_SIZE: Final = 32
"""Of int4. Errors of the query, key, value and down projections weigh most: finer blocks there and coarser ones
elsewhere give the lower divergence at the same size (docs/precision.md)."""

DEFAULT_HEAD: Final[dict[Precision, Precision]] = {
    "fp32": "fp32",
    "int8": "int8",
    "int4": "int8",
    "source": "source",
}
"""A 4-bit head makes small models repeat themselves, so int4 keeps an 8-bit one unless asked."""

DEFAULT_QUANTIZER: Final[Quantizer] = "affine"
"""Zero points cost an eighth of a bit at block 32 and no speed, and take a fifth off the divergence (docs/precision.md)."""

DEFAULT_SCALE_TYPE: Final[dict[Precision, ScaleType]] = {"int8": "float32", "int4": "bfloat16"}
"""Halving the scales saves half a bit a weight at block 32; 4-bit codes do not show their rounding, 8-bit ones do."""

KL_LIMIT: Final[dict[Precision, float]] = {"fp32": 1e-6, "int8": 0.01, "int4": 0.6, "source": 0.007}
"""Mean divergence from the fp32 reference, in nats, beyond which ``llorch verify`` fails."""


WHOLE_KL_LIMIT: Final = 0.06
"""The same where activations are rounded by whole rows, in which one outlier widens every other value's step."""


@dataclass(frozen=True, slots=True)
class Rule:
    """Modules that a mixed recipe stores otherwise; the last rule that matches a module settles it.

    modules: patterns of checkpoint names: ``*``, ``?``, ``[..]``, and alternatives in braces.
    layers: only in these, as ``first 4``, ``last 1/8``, ``every 3``; empty: in all.
    precision and the rest: None takes what the recipe says for that precision, or the precision's default.
    label: names the rule in errors.
    """

    modules: tuple[str, ...]
    layers: tuple[str, ...] = ()
    precision: Precision | None = None
    block_size: int | None = None
    quantizer: Quantizer | None = None
    scale_type: ScaleType | None = None
    label: str = "a rule"
    activations: Activations | None = None


@dataclass(frozen=True, slots=True)
class ExportOptions:
    """What to export, to where, and how.

    lora: folder of a PEFT adapter to merge into the weights.
    precision: of the decoder's linear layers; ``source`` keeps the blocks of a GGUF file, head included; None is int8.
    head_precision: of the output head and the embedding table; None takes the default for ``precision``.
    block_size: weights that share a scale; None takes the default for ``precision``.
    fine_block_size: the same for query, key, value and down projections; None takes ``block_size``, or 32 where an int4 export
        leaves both open.
    accuracy_level: MatMulNBits' own: 4 multiplies in int8, 0 leaves the choice to the runtime.
    quantizer: of 4-bit weights; None takes the default, ``affine``.
    scale_type: how scales are stored; None takes the default for ``precision``.
    max_context: longest sequence; None takes the model's own.
    force: replace an artifact that stands at ``output``.
    if_changed: do nothing when ``output`` already holds this export.
    rules: modules that are stored otherwise, in order; a model's config says what they mean (``recipes/resolve.py``).
    calibration: a text to measure on what the recipe measures.
    transforms: exact changes of the weights before they are quantised, in any order.
    interop: another runtime that shall load the artifact too.
    activations: how what enters int8 layers is rounded; None takes ``block``.
    """

    source: str
    output: Path
    precision: Precision | None = None
    head_precision: Precision | None = None
    block_size: int | None = None
    fine_block_size: int | None = None
    accuracy_level: Literal[0, 4] | None = None
    quantizer: Quantizer | None = None
    scale_type: ScaleType | None = None
    max_context: int | None = None
    force: bool = False
    if_changed: bool = False
    lora: Path | None = None
    rules: tuple[Rule, ...] = ()
    calibration: Path | None = None
    transforms: tuple[TransformName, ...] = ()
    interop: Interop | None = None
    activations: Activations | None = None

    def recipe(self) -> Recipe:
        """Return the recipe these options stand for; rules and the hash of a calibration text are added by the pipeline.

        Raises UsageError if a value is out of range or would have no effect.
        """
        recipe = self._precision_recipe()
        if self.transforms:
            recipe = msgspec.structs.replace(
                recipe,
                transforms=tuple(name for name in TRANSFORMS if name in self.transforms),
                transform_seed=SEED if "rotate" in self.transforms else None,
            )
        if not self.rules:  # else it depends on what they mean
            require_use(recipe, self.calibration, may_measure=uses_static(recipe))
        return recipe

    def _precision_recipe(self) -> Recipe:
        precision = self.precision or DEFAULT_PRECISION
        head = self.head_precision or DEFAULT_HEAD[precision]
        activations = self._activations(precision)
        if "source" in (precision, head):
            return self._source_recipe(precision, head)
        fine_block_size = self._fine_block_size(precision)
        quantised = [p for p in (precision, head) if p in BITS]
        ruled = [rule.precision for rule in self.rules if rule.precision is not None]
        kl_limit = max(KL_LIMIT[p] for p in (precision, head, *ruled))
        if activations is not None or any(whole(rule.activations) for rule in self.rules):
            kl_limit = max(kl_limit, WHOLE_KL_LIMIT)
        if not quantised and not any(p in BITS for p in ruled):
            for flag, value in (
                ("--block-size", self.block_size),
                ("--accuracy-level", self.accuracy_level),
                ("--scale-type", self.scale_type),
                ("--quantizer", self.quantizer),
            ):
                if value is not None:
                    raise UsageError(
                        f"{flag} {value} has no effect at precision fp32; leave it out or choose int8 or int4"
                    )
            return Recipe(
                precision="fp32",
                head_precision="fp32",
                block_size=None,
                accuracy_level=None,
                kl_limit=KL_LIMIT["fp32"],
            )
        if activations == "row" and head not in BITS and not self.rules:
            return self._blockless_recipe(activations)
        accuracy_level = 4 if self.accuracy_level is None else self.accuracy_level
        if not quantised:
            self._check_only_rules_quantise(precision)
            return Recipe(
                precision=precision,
                head_precision=head,
                block_size=None,
                accuracy_level=accuracy_level,
                kl_limit=kl_limit,
            )
        block_size = DEFAULT_BLOCK_SIZE[quantised[0]] if self.block_size is None else self.block_size
        for flag, size in (
            ("--block-size", block_size),
            ("--fine-block-size", block_size if fine_block_size is None else fine_block_size),
        ):
            if size not in BLOCK_SIZES:
                raise UsageError(
                    f"{flag} is {size}; the runtime's kernels are right for {', '.join(map(str, BLOCK_SIZES))}"
                )
        if "int4" not in (*quantised, *ruled) and self.quantizer is not None:
            raise UsageError(
                f"--quantizer {self.quantizer} has no effect without 4-bit weights; leave it out or choose int4"
            )
        return Recipe(
            precision=precision,
            head_precision=head,
            block_size=block_size,
            fine_block_size=None if fine_block_size == block_size else fine_block_size,
            accuracy_level=accuracy_level,
            kl_limit=kl_limit,
            quantizer=(self.quantizer or DEFAULT_QUANTIZER) if "int4" in (*quantised, *ruled) else None,
            scale_type=self.scale_type or DEFAULT_SCALE_TYPE[quantised[0]],
            activations=activations,
        )

    def _activations(self, precision: Precision) -> Activations | None:
        """Return the form for the recipe; None for blocks, which is what recipes said before there was a choice."""
        if self.activations in (None, "block"):
            return None
        if precision != "int8":
            raise UsageError(
                f"--activations {self.activations} multiplies bytes with bytes, which takes --precision int8 and not "
                f"{precision}; leave it out or choose int8"
            )
        if self.fine_block_size is not None:
            raise UsageError(
                f"--fine-block-size {self.fine_block_size} has no effect with --activations {self.activations}, where a "
                "weight's blocks are its whole rows; leave it out"
            )
        return self.activations

    def _blockless_recipe(self, activations: Activations) -> Recipe:
        for flag, value in (
            ("--block-size", self.block_size),
            ("--accuracy-level", self.accuracy_level),
            ("--scale-type", self.scale_type),
            ("--quantizer", self.quantizer),
        ):
            if value is not None:
                raise UsageError(
                    f"{flag} {value} has no effect with --activations {activations} and --head-precision fp32, which "
                    "leave no weight in blocks; leave it out or choose another head"
                )
        return Recipe(
            precision="int8",
            head_precision="fp32",
            block_size=None,
            accuracy_level=None,
            kl_limit=WHOLE_KL_LIMIT,
            activations=activations,
        )

    def _check_only_rules_quantise(self, precision: Precision) -> None:
        """Raise UsageError for settings that belong to the defaults of a recipe, where those have no blocks."""
        for flag, value in (
            ("--block-size", self.block_size),
            ("--scale-type", self.scale_type),
            ("--quantizer", self.quantizer),
        ):
            if value is not None:
                raise UsageError(
                    f"{flag} {value} has no effect at precision {precision}, where only rules quantise; set it in them"
                )

    def _fine_block_size(self, precision: Precision) -> int | None:
        if precision == "fp32" and self.fine_block_size is not None:
            raise UsageError(
                f"--fine-block-size {self.fine_block_size} has no effect at precision fp32; leave it out or choose int8 or int4"
            )
        if precision == "int4" and self.block_size is None and self.fine_block_size is None:
            return DEFAULT_FINE_BLOCK_SIZE
        return self.fine_block_size

    def _source_recipe(self, precision: Precision, head: Precision) -> Recipe:
        if self.rules:
            raise UsageError(
                f"{self.rules[0].label} has no effect at precision source, where blocks are the GGUF file's; leave it out"
            )
        if precision != head:
            raise UsageError(
                f"--precision {precision} with --head-precision {head}; source is for both or neither, "
                "since a GGUF file settles the type of every tensor"
            )
        if self.lora is not None:
            raise UsageError(
                f"--lora {self.lora} changes weights whose blocks --precision source would keep; choose fp32, int8 or int4"
            )
        if self.transforms:
            raise UsageError(
                f"--transform {','.join(self.transforms)} changes weights whose blocks --precision source would keep; "
                "choose fp32, int8 or int4"
            )
        for flag, value in (
            ("--block-size", self.block_size),
            ("--fine-block-size", self.fine_block_size),
            ("--scale-type", self.scale_type),
            ("--quantizer", self.quantizer),
        ):
            if value is not None:
                raise UsageError(
                    f"{flag} {value} has no effect at precision source, where blocks are the GGUF file's; leave it out"
                )
        return Recipe(
            precision="source",
            head_precision="source",
            block_size=None,
            accuracy_level=4 if self.accuracy_level is None else self.accuracy_level,
            kl_limit=KL_LIMIT["source"],
        )
