"""How each matrix is stored: from a :class:`Recipe`, its defaults and its rules, to the format of one
module.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal

from llorch_serve.artifact.manifest import Activations, Precision, Quantizer, Recipe, ScaleType

EMBEDDING: Final = "model.embed_tokens"
HEAD: Final = "lm_head"
_WITH_ZERO_POINTS: Final[tuple[Quantizer, ...]] = ("affine", "gptq", "hqq")

NORM_READERS: Final = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
"""Linear layers whose input is an RMS norm's output, so that its size is known beforehand."""

FINE_MODULES: Final = ("q_proj", "k_proj", "v_proj", "down_proj")
"""Linear layers whose errors weigh most."""

QUARTERS: Final = 4
"""Parts of a row that activations ``quarters`` round by scales of their own."""

PerChannelActivations = Literal["row", "quarters", "static"]
"""The forms of :data:`Activations` that per-channel int8 weights go with, one scale for each output channel.

row: one scale a token. quarters: one for each quarter of a token's channels. static: one for all tokens.
"""


@dataclass(frozen=True, slots=True)
class ModuleFormat:
    """The format of one matrix.

    block_size: None where the precision has no blocks, or the file's own. quantizer: of 4 bits, or ``gptq``
        of 8; None: round to nearest, or no blocks.
    activations: of per-channel int8 matrices, how their input is rounded; None: of all others.
    """

    precision: Precision
    block_size: int | None
    quantizer: Quantizer | None
    scale_type: ScaleType
    activations: PerChannelActivations | None = None

    @property
    def zero_points(self) -> bool:
        """Whether each block has a zero point of its own: 4-bit codes are few enough to gain by it."""
        return self.precision == "int4" and self.quantizer in _WITH_ZERO_POINTS


_EXPERT: Final = ".mlp.experts."
_ROUTERS: Final = (".mlp.gate", ".mlp.shared_expert_gate")
NOT_MEASURED: Final[Quantizer] = "affine"
"""In place of error feedback where a module's inputs are not measured: each expert sees other tokens."""
EXPERT_BLOCK_SIZE: Final = 64
"""Of 8-bit experts where the recipe has no blocks of its own."""


def is_expert(module: str) -> bool:
    """Tell whether a module is a matrix of one of several experts, which only takes what their node takes."""
    return _EXPERT in module


def is_router(module: str) -> bool:
    """Tell whether a module chooses or weighs experts; it has no format, for it stays whole."""
    return module.endswith(_ROUTERS)


def default_format(recipe: Recipe, module: str) -> ModuleFormat:
    """Return the format of a module that no rule names; those whose errors weigh most may have blocks of
    their own size.
    """
    if module in (EMBEDDING, HEAD):
        precision, fine = recipe.head_precision, None
    else:
        precision = recipe.precision
        fine = recipe.fine_block_size if module.endswith(FINE_MODULES) else None
    if precision not in ("int8", "int4"):
        return ModuleFormat(precision, None, None, "float32")
    if is_expert(module):
        quantizer = NOT_MEASURED if recipe.quantizer == "gptq" else recipe.quantizer
        # One node reads them all, and finer blocks for the down projections alone it does not have.
        size = recipe.block_size or EXPERT_BLOCK_SIZE
        return ModuleFormat(precision, size, quantizer if precision == "int4" else None, recipe.scale_type)
    if precision == "int8" and module not in (EMBEDDING, HEAD):
        activations = default_activations(recipe, module)
        if activations is not None:
            return ModuleFormat("int8", None, None, "float32", activations)
    return ModuleFormat(
        precision, fine or recipe.block_size, block_quantizer(recipe, precision), recipe.scale_type
    )


def block_quantizer(recipe: Recipe, precision: Precision) -> Quantizer | None:
    """Return how blocks get scales: those of 8 bits beside others of 4 are rounded to nearest, since what
    those cost hides what error feedback would gain here.
    """
    if precision == "int4":
        return recipe.quantizer
    few = "int4" in (recipe.precision, recipe.head_precision)
    return "gptq" if recipe.quantizer == "gptq" and not few else None


def default_activations(recipe: Recipe, module: str) -> PerChannelActivations | None:
    """Return how the input of an int8 layer is rounded, if not by blocks; a static scale is for what norms
    give.
    """
    form = per_channel(recipe.activations)
    return None if form == "static" and not module.endswith(NORM_READERS) else form


def uses_static(recipe: Recipe) -> bool:
    """Tell whether some layer's input has one scale for all rows; the rules must be resolved."""
    return recipe.activations == "static" or any(rule.activations == "static" for rule in recipe.rules)


def per_channel(activations: Activations | None) -> PerChannelActivations | None:
    """Return the form that per-channel int8 weights go with; None for blocks."""
    return None if activations == "block" else activations


class Formats:
    """Looks up the format of a module of one recipe."""

    def __init__(self, recipe: Recipe) -> None:
        self._recipe = recipe
        self._ruled: Mapping[str, ModuleFormat] = {
            module: ModuleFormat(
                rule.precision,
                rule.block_size,
                rule.quantizer,
                rule.scale_type,
                per_channel(rule.activations),
            )
            for rule in recipe.rules
            for module in rule.modules
        }

    def of(self, module: str) -> ModuleFormat:
        """Return the format of ``module``, by the checkpoint's name; a tied table's is that of the
        embedding.
        """
        return self._ruled.get(module) or default_format(self._recipe, module)
