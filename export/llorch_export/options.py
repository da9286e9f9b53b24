"""The choices of one export, resolved and frozen."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

import msgspec

from llorch_export.calibration.measurements import require_use
from llorch_export.formats.byte_layers import byte_layers, recipe_activations, refuse_target, refuse_type
from llorch_export.formats.module import uses_static
from llorch_export.formats.precisions import (
    BITS,
    HALF_TYPES,
    UNQUANTISED,
    half_precisions,
    refuse_beyond,
    unquantised,
)
from llorch_export.formats.targets import TARGETS, BlockForm
from llorch_export.graph.static_scales import check_static
from llorch_serve.artifact.manifest import (
    Activations,
    ComputeType,
    Interop,
    KvDtype,
    Precision,
    Quantizer,
    Recipe,
    ScaleType,
    Target,
    TransformName,
)
from llorch_serve.errors import UsageError

BLOCK_SIZES: Final = (16, 32, 64, 128, 256)

SEED: Final = 0
"""Of the rotation's signs. Another one gives another rounding error of the same size."""

TRANSFORMS: Final[tuple[TransformName, ...]] = ("equalise", "smooth", "hadamard", "rotate")
"""In the order they are made. They commute, so the order that they are named in does not matter."""

DEFAULT_BLOCK_SIZE: Final[dict[Precision, int]] = {"int8": 32, "int4": 64}
"""Block 32 costs no speed against 64 at 8 bits and gives the lower divergence (docs/precision.md)."""

DEFAULT_FINE_BLOCK_SIZE: Final = 32
"""Of int4. Errors of the query, key, value and down projections weigh most: finer blocks there and coarser
ones elsewhere give the lower divergence at the same size (docs/precision.md).
"""

DEFAULT_HEAD: Final[dict[Precision, Precision]] = {
    "fp32": "fp32",
    "fp16": "fp16",
    "bf16": "bf16",
    "int8": "int8",
    "int4": "int8",
    "source": "source",
}
"""A 4-bit head makes small models repeat themselves, so int4 keeps an 8-bit one unless asked."""

DEFAULT_QUANTIZER: Final[Quantizer] = "affine"
"""Of what is not measured on a text. Zero points cost an eighth of a bit at block 32 and no speed, and take a
fifth off the divergence (docs/precision.md).
"""

DEFAULT_SCALE_TYPE: Final[dict[Precision, ScaleType]] = {"int8": "float32", "int4": "bfloat16"}
"""Halving the scales saves half a bit a weight at block 32; 4-bit codes do not show their rounding, 8-bit
ones do.
"""

KL_LIMIT: Final[dict[Precision, float]] = {
    "fp32": 1e-6,
    "fp16": 1e-4,
    "bf16": 0.01,
    "int8": 0.01,
    "int4": 0.4,
    "source": 0.007,
}
"""Mean divergence from the fp32 reference, in nats, beyond which ``llorch verify`` fails."""

INT4_HEAD_KL_LIMIT: Final = 0.6
"""The same with a 4-bit head, which costs a small model as much as all its layers."""

BYTES_KL_LIMIT: Final = 0.06
"""The same where activations are rounded by whole rows, in which one outlier widens every other value's
step.
"""


@dataclass(frozen=True, slots=True)
class Rule:
    """Modules that a mixed recipe stores otherwise; the last rule that matches a module settles it.

    modules: patterns of checkpoint names: ``*``, ``?``, ``[..]``, and alternatives in braces.
    layers: only in these, as ``first 4``, ``last 1/8``, ``every 3``; empty: in all.
    precision and the rest: None takes what the recipe says for that precision, or the precision's default.
    label: names the rule in errors.
    spikiest: of the modules so far only those whose inputs have the largest peaks on a calibration text, as
        ``6`` or ``1/5``.
    """

    modules: tuple[str, ...]
    layers: tuple[str, ...] = ()
    precision: Precision | None = None
    block_size: int | None = None
    quantizer: Quantizer | None = None
    scale_type: ScaleType | None = None
    label: str = "a rule"
    activations: Activations | None = None
    spikiest: str | None = None

    @property
    def quantizer_open(self) -> bool:
        """Whether the rule makes weights 4-bit ones without saying by which quantizer."""
        return self.precision == "int4" and self.quantizer is None


@dataclass(frozen=True, slots=True)
class ExportOptions:
    """What to export, to where, and how.

    lora: folder of a PEFT adapter to merge into the weights.
    precision: of the decoder's linear layers; ``source`` keeps the blocks of a GGUF file, head included; None
        is int8.
    head_precision: of the output head and the embedding table; None takes the default for ``precision``.
    block_size: weights that share a scale; None takes the default for ``precision``.
    fine_block_size: the same for query, key, value and down projections; None takes ``block_size``, or 32
        where an int4 export leaves both open.
    accuracy_level: MatMulNBits' own: 4 multiplies in int8, 0 leaves the choice to the runtime.
    quantizer: of 4-bit weights; None takes ``gptq`` for models up to half a billion parameters
        (``recipes/default.py``), else ``affine``.
    scale_type: how scales are stored; None takes the default for ``precision``.
    max_context: longest sequence; None takes the model's own.
    force: replace an artifact that stands at ``output``.
    if_changed: do nothing when ``output`` already holds this export.
    rules: modules that are stored otherwise, in order; a model's config says what they mean
        (``recipes/resolve.py``).
    calibration: a text to measure on what the recipe measures; None is the bundled one where ``gptq`` is a
        default.
    transforms: exact changes of the weights before they are quantised, in any order.
    interop: another runtime that shall load the artifact too.
    compute_type: of activations, residual stream, KV cache and all weights that are not in blocks; None takes
        what ``fp16`` and ``bf16`` mean, else the target's default.
    target: the runtime that the graph is for.
    activations: how what enters int8 layers is rounded; None takes ``block``.
    kl_limit: divergence beyond which ``llorch verify`` fails, in nats; None takes the default for what is
        chosen above.
    prompts: the same for a second graph that takes prompts; None: there is none.
    kv_dtype: what the KV cache may hold while answers are generated: ``int8`` adds a graph for that, the
        compute type does not; None adds it where weights are quantised and the target has it.
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
    compute_type: ComputeType | None = None
    target: Target = "cpu"
    kv_dtype: KvDtype | None = None
    kl_limit: float | None = None
    prompts: ExportOptions | None = None
    activations: Activations | None = None

    def recipe(self) -> Recipe:
        """Return the recipe these options stand for; rules and the hash of a calibration text are added by
        the pipeline.

        Raises UsageError if a value is out of range, would have no effect, or is beyond the target.
        """
        if self.interop is not None and self.target != "cpu":
            raise UsageError(
                f"--interop {self.interop} with --target {self.target}: the graph for another runtime is "
                f"made for the CPU; "
                "leave one of them out"
            )
        if self.prompts is not None and self.target != "cpu":
            raise UsageError(
                f"--prefill-recipe with --target {self.target}: a graph for prompts is made for the CPU; "
                f"leave one of them out"
            )
        recipe = self._precision_recipe()
        refuse_beyond(self.target, recipe)
        if self.transforms:
            recipe = msgspec.structs.replace(
                recipe,
                transforms=tuple(name for name in TRANSFORMS if name in self.transforms),
                transform_seed=SEED if "rotate" in self.transforms else None,
            )
        recipe = msgspec.structs.replace(
            recipe,
            int8_cache=self._int8_cache(recipe),
            kl_limit=recipe.kl_limit if self.kl_limit is None else self.kl_limit,
        )
        check_static(recipe, self.calibration)  # of rules it is known when they are resolved
        if not self.rules and not self.quantizer_open:  # else it depends on what they mean, and on the model
            require_use(recipe, self.calibration, may_measure=uses_static(recipe) or self.prompts_may_measure)
        return recipe

    @property
    def prompts_may_measure(self) -> bool:
        """Whether there is a graph for prompts whose recipe can use a calibration text."""
        if self.prompts is None:
            return False
        forms = {self.prompts.activations, *(rule.activations for rule in self.prompts.rules)}
        return "static" in forms or any(rule.spikiest for rule in self.prompts.rules)

    @property
    def quantizer_open(self) -> bool:
        """Whether there are 4-bit weights by no stated quantizer, so that the model's size decides."""
        return (self.quantizer is None and "int4" in (self.precision, self.head_precision)) or any(
            rule.quantizer_open and self.quantizer is None for rule in self.rules
        )

    def _int8_cache(self, recipe: Recipe) -> bool:
        """Tell whether a graph over an int8 cache is added. Raises UsageError if it cannot be, or for another
        odd type.
        """
        possible = TARGETS[self.target].int8_cache and recipe.compute_type == "float32"
        if self.kv_dtype is None:
            return possible and any(p in BITS or p == "source" for p in recipe.precisions)
        choices = [recipe.compute_type, *(["int8"] if possible else [])]
        if self.kv_dtype not in choices:
            raise UsageError(
                f"--kv-dtype is {self.kv_dtype}; --target {self.target} computing in {recipe.compute_type} "
                f"takes "
                f"{' or '.join(choices)}"
            )
        return self.kv_dtype == "int8"

    def _precision_recipe(self) -> Recipe:
        in_bytes = byte_layers(
            [
                ("--activations", self.activations),
                *((f"{rule.label}: activations", rule.activations) for rule in self.rules),
            ]
        )
        refuse_target(in_bytes, self.target)
        precision = self.precision or TARGETS[self.target].precision
        head = self.head_precision or self._default_head(precision)
        activations = recipe_activations(self.activations, precision, self.fine_block_size)
        if "source" in (precision, head):
            return self._source_recipe(precision, head)
        ruled = [rule.precision for rule in self.rules if rule.precision is not None]
        compute_type = self._compute_type(precision, head, ruled)
        refuse_type(in_bytes, compute_type)
        fine_block_size = self._fine_block_size(precision)
        quantised = [p for p in (precision, head) if p in BITS]
        kl_limit = max(KL_LIMIT[p] for p in (precision, head, *ruled, *half_precisions(compute_type)))
        if in_bytes:
            kl_limit = max(kl_limit, BYTES_KL_LIMIT)
        if head == "int4":
            kl_limit = max(kl_limit, INT4_HEAD_KL_LIMIT)
        if not quantised and not any(p in BITS for p in ruled):
            self._refuse_block_settings(f"at precision {precision}; leave it out or choose int8 or int4")
            return Recipe(
                precision=precision,
                head_precision=head,
                block_size=None,
                accuracy_level=None,
                kl_limit=kl_limit,
                compute_type=compute_type,
            )
        if activations in ("row", "quarters") and head not in BITS and not self.rules:
            return self._blockless_recipe(activations)
        accuracy_level = self._accuracy_level()
        if not quantised:
            self._check_only_rules_quantise(precision)
            return Recipe(
                precision=precision,
                head_precision=head,
                block_size=None,
                accuracy_level=accuracy_level,
                kl_limit=kl_limit,
                scale_type=compute_type,
                compute_type=compute_type,
            )
        block_size = DEFAULT_BLOCK_SIZE[quantised[0]] if self.block_size is None else self.block_size
        for flag, size in (
            ("--block-size", block_size),
            ("--fine-block-size", block_size if fine_block_size is None else fine_block_size),
        ):
            if size not in BLOCK_SIZES:
                raise UsageError(
                    f"{flag} is {size}; the runtime's kernels are right for "
                    f"{', '.join(map(str, BLOCK_SIZES))}"
                )
        if "int4" not in (*quantised, *ruled) and self.quantizer is not None:
            raise UsageError(
                f"--quantizer {self.quantizer} has no effect without 4-bit weights; leave it out or choose "
                f"int4"
            )
        return Recipe(
            precision=precision,
            head_precision=head,
            block_size=block_size,
            fine_block_size=None if fine_block_size == block_size else fine_block_size,
            accuracy_level=accuracy_level,
            kl_limit=kl_limit,
            quantizer=(self.quantizer or DEFAULT_QUANTIZER) if "int4" in (*quantised, *ruled) else None,
            scale_type=self._scale_type(compute_type, quantised[0]),
            compute_type=compute_type,
            activations=activations,
        )

    def _blockless_recipe(self, activations: Activations) -> Recipe:
        self._refuse_block_settings(
            f"with --activations {activations} and --head-precision fp32, which leave no weight in blocks; "
            f"leave it out or "
            "choose another head"
        )
        return Recipe(
            precision="int8",
            head_precision="fp32",
            block_size=None,
            accuracy_level=None,
            kl_limit=BYTES_KL_LIMIT,
            activations=activations,
        )

    def _refuse_block_settings(self, why: str) -> None:
        """Raise UsageError for settings of weights in blocks, in a recipe that has none."""
        for flag, value in (
            ("--block-size", self.block_size),
            ("--accuracy-level", self.accuracy_level),
            ("--scale-type", self.scale_type),
            ("--quantizer", self.quantizer),
        ):
            if value is not None:
                raise UsageError(f"{flag} {value} has no effect {why}")

    def _check_only_rules_quantise(self, precision: Precision) -> None:
        """Raise UsageError for settings that belong to the defaults of a recipe, where those have no
        blocks.
        """
        for flag, value in (
            ("--block-size", self.block_size),
            ("--scale-type", self.scale_type),
            ("--quantizer", self.quantizer),
        ):
            if value is not None:
                raise UsageError(
                    f"{flag} {value} has no effect at precision {precision}, where only rules quantise; set "
                    f"it in them"
                )

    def _compute_type(self, precision: Precision, head: Precision, ruled: list[Precision]) -> ComputeType:
        """Return the one type that all flags and rules agree on. Raises UsageError if they do not."""
        asked = [HALF_TYPES.get(p, "float32") for p in (precision, head, *ruled) if p in UNQUANTISED]
        found: set[ComputeType] = {*asked, *([] if self.compute_type is None else [self.compute_type])}
        if len(found) > 1:
            given = "" if self.compute_type is None else f" and --compute-type {self.compute_type}"
            rules = "".join(f" and a rule's {p}" for p in dict.fromkeys(ruled) if p in UNQUANTISED)
            raise UsageError(
                f"--precision {precision} with --head-precision {head}{given}{rules} asks for "
                f"{' and '.join(sorted(found))}, and a graph computes in one type; weights in blocks (int8, "
                f"int4) go with "
                "each of them"
            )
        return found.pop() if found else TARGETS[self.target].compute_types[0]

    def _default_head(self, precision: Precision) -> Precision:
        """Return the head of ``precision``; unquantised where the target has no such codes for it."""
        head, target = DEFAULT_HEAD[precision], TARGETS[self.target]
        if head in BITS and BITS[head] not in target.table_bits:
            return unquantised(self.compute_type or target.compute_types[0])
        return head

    def _accuracy_level(self) -> Literal[0, 4] | None:
        if TARGETS[self.target].blocks is BlockForm.NBITS:
            return 4 if self.accuracy_level is None else self.accuracy_level
        if self.accuracy_level is not None:
            raise UsageError(
                f"--accuracy-level {self.accuracy_level} has no effect at --target {self.target}, whose "
                f"graph leaves the "
                "choice to the runtime; leave it out"
            )
        return None

    def _scale_type(self, compute_type: ComputeType, quantised: Precision) -> ScaleType:
        if compute_type == "float32":
            return self.scale_type or DEFAULT_SCALE_TYPE[quantised]
        if self.scale_type not in (None, compute_type):
            raise UsageError(
                f"--scale-type {self.scale_type} has no effect where the graph computes in {compute_type}, "
                f"which scales are then "
                "rounded to; leave it out"
            )
        return compute_type

    def _fine_block_size(self, precision: Precision) -> int | None:
        if precision in UNQUANTISED and self.fine_block_size is not None:
            raise UsageError(
                f"--fine-block-size {self.fine_block_size} has no effect at precision {precision}; leave it "
                f"out or choose int8 or int4"
            )
        if precision == "int4" and self.block_size is None and self.fine_block_size is None:
            return DEFAULT_FINE_BLOCK_SIZE
        return self.fine_block_size

    def _source_recipe(self, precision: Precision, head: Precision) -> Recipe:
        if self.rules:
            raise UsageError(
                f"{self.rules[0].label} has no effect at precision source, where blocks are the GGUF "
                f"file's; leave it out"
            )
        if precision != head:
            raise UsageError(
                f"--precision {precision} with --head-precision {head}; source is for both or neither, "
                "since a GGUF file settles the type of every tensor"
            )
        if self.lora is not None:
            raise UsageError(
                f"--lora {self.lora} changes weights whose blocks --precision source would keep; choose "
                f"fp32, fp16, bf16, int8 or int4"
            )
        if self.transforms:
            raise UsageError(
                f"--transform {','.join(self.transforms)} changes weights whose blocks --precision source "
                f"would keep; "
                "choose fp32, fp16, bf16, int8 or int4"
            )
        for flag, value in (
            ("--block-size", self.block_size),
            ("--fine-block-size", self.fine_block_size),
            ("--scale-type", self.scale_type),
            ("--quantizer", self.quantizer),
            ("--compute-type", self.compute_type),
        ):
            if value is not None:
                raise UsageError(
                    f"{flag} {value} has no effect at precision source, where blocks are the GGUF file's; "
                    f"leave it out"
                )
        return Recipe(
            precision="source",
            head_precision="source",
            block_size=None,
            accuracy_level=4 if self.accuracy_level is None else self.accuracy_level,
            kl_limit=KL_LIMIT["source"],
        )
