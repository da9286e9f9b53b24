"""The choices of one export as its user made them: plain data, unchecked.

Flags and recipe files fill :class:`ExportOptions`. ``recipes/base.py`` checks them and fills in defaults, and
``resolved.py`` settles what depends on the model.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from llorch_export.adapter.choice import AdapterChoice
from llorch_export.config.embedding import EmbedChoice
from llorch_export.graph.stage_choice import StageChoice
from llorch_serve.artifact.manifest import (
    Activations,
    ComputeType,
    Interop,
    KvDtype,
    Precision,
    Quantizer,
    ScaleType,
    Target,
    TransformName,
)


@dataclass(frozen=True, slots=True)
class Rule:
    """Modules that a mixed recipe stores otherwise; the last rule that matches a module settles it.

    modules: patterns of checkpoint names: ``*``, ``?``, ``[..]``, and alternatives in braces.
    layers: only in these, as ``first 4``, ``last 1/8``, ``every 3``; empty: in all.
    precision and the rest: None takes what the recipe says for that precision, or the precision's default.
    label: names the rule in errors.
    outliers: of these modules only the ``6``, or the ``1/5``, whose inputs have the largest outliers on a
        calibration text; None: all of them. Recipe files call it ``spikiest``.
    """

    modules: tuple[str, ...]
    layers: tuple[str, ...] = ()
    precision: Precision | None = None
    block_size: int | None = None
    quantizer: Quantizer | None = None
    scale_type: ScaleType | None = None
    label: str = "a rule"
    activations: Activations | None = None
    outliers: str | None = None


@dataclass(frozen=True, slots=True)
class ExportOptions:
    """What to export, to where, and how.

    lora: adapters in PEFT's format to merge into the weights.
    precision: of the decoder's linear layers; ``source`` keeps the blocks of a GGUF file, or the codes of
        packed weights, head included; None is int8.
    head_precision: of the output head and the embedding table; None takes the default for ``precision``.
    block_size: weights that share a scale; None takes the default for ``precision``.
    fine_block_size: the same for query, key, value and down projections; None takes ``block_size``, or 32
        where an int4 export leaves both open.
    accuracy_level: MatMulNBits' own: 4 multiplies in int8, 0 leaves the choice to the runtime; None takes 4,
        and 0 for packed codes of 2 bits.
    two_bit_accuracy_level: the level of those alone, filled in once it is known that there are some.
    quantizer: of 4-bit weights; None takes ``gptq`` for models up to half a billion parameters
        (``recipes/default.py``), else ``affine``. Of 8-bit weights ``gptq`` alone, or None: round to nearest.
    scale_type: how scales are stored; None takes the default for ``precision``.
    max_context: longest sequence; None takes the model's own.
    force: replace an artifact that stands at ``output``.
    if_changed: do nothing when ``output`` already holds this export.
    rules: modules that are stored otherwise, in order; a model's config says what they mean
        (``recipes/rules.py``).
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
    embed: how texts become vectors, which the graph then gives in place of logits; ``none``: not at all;
        None: as files beside the checkpoint say.
    stages: how many graphs the layers are cut into, which run one after another; None: they are one.
    """

    source: str
    output: Path
    precision: Precision | None = None
    head_precision: Precision | None = None
    block_size: int | None = None
    fine_block_size: int | None = None
    accuracy_level: Literal[0, 4] | None = None
    two_bit_accuracy_level: Literal[0] | None = None
    quantizer: Quantizer | None = None
    scale_type: ScaleType | None = None
    max_context: int | None = None
    force: bool = False
    if_changed: bool = False
    lora: tuple[AdapterChoice, ...] = ()
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
    embed: EmbedChoice | None = None
    stages: StageChoice | None = None
