"""Stages of a forward pass, how far one may be off, and the comparison of two arrays.

A tolerance belongs to a kind of stage and a recipe. Both sides of a comparison come from :mod:`.verify`; the
result goes to ``llorch verify --layers``.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Final

import numpy as np
import numpy.typing as npt

from llorch_export.recipes.kl_limits import KL_LIMIT
from llorch_serve.artifact.manifest import Recipe

Array = npt.NDArray[np.float32]


class Kind(StrEnum):
    """What a stage computes; the order is the one of the table that people read."""

    EMBEDDING = "embedding"
    NORM = "RMSNorm"
    QKV = "QKV"
    ROPE = "RoPE"
    SCORES = "attention scores"
    ATTENTION = "attention output"
    SWIGLU = "SwiGLU"
    ROUTER = "router"
    EXPERTS = "experts"
    PROJECTION = "projection"
    RESIDUAL = "residual"
    BLOCK = "block"
    FINAL_NORM = "final norm"
    LOGITS = "logits"
    LLAMA_CPP = "llama.cpp logits"
    SOFTMAX = "softmax"
    GREEDY = "greedy tokens"


class Measure(StrEnum):
    """How the distance of a stage is expressed.

    SCALED: largest difference within a position over the position's largest magnitude (at least 1), the worst
    position. ABSOLUTE: largest difference. RELATIVE: norm of the difference over norm of the reference. KL:
    mean divergence in nats. TOKENS: greedy tokens that differ.
    """

    SCALED = "scaled"
    ABSOLUTE = "absolute"
    RELATIVE = "relative"
    KL = "KL"
    TOKENS = "tokens"


EXACT: Final[dict[Kind, float]] = {
    **dict.fromkeys(Kind, 1e-4),
    Kind.NORM: 1e-5,
    Kind.FINAL_NORM: 1e-5,
    Kind.ROPE: 1e-5,
    Kind.LOGITS: 1e-3,
    Kind.LLAMA_CPP: 1e-3,
}
"""Tolerances of fp32, on a model of some 30 layers: RMSNorm and RoPE 1e-5, logits 1e-3 absolute, all others
1e-4.
"""

TRANSFORMED: Final = 1e-4
"""Of RMSNorm and RoPE in fp32 where weights were transformed: they and what they compute are rounded once
more. 1.4e-5 was measured on keys.
"""

ROUNDED: Final = ((1e-4, 0.02), (0.01, 0.2), (float("inf"), 1.0))
"""(up to this divergence limit of the recipe, relative distance that a stage may have): recipes of half
precision, quantised ones.

Of SmolLM2's stages a projection is the worst with fp16, at 0.0044; an attention output is with int8, at
0.082, and with int4 throughout, at 0.75.
"""


@dataclass(frozen=True, slots=True)
class Tolerance:
    """What a stage's distance is measured in, and its limit; None: reported, not judged."""

    measure: Measure
    limit: float | None


def tolerance(kind: Kind, recipe: Recipe) -> Tolerance:
    """Return what a stage of a recipe is held to."""
    exact = recipe.kl_limit <= KL_LIMIT["fp32"]
    if kind is Kind.SOFTMAX:
        return Tolerance(Measure.KL, recipe.kl_limit)
    if kind is Kind.GREEDY:
        return Tolerance(Measure.TOKENS, 0 if exact else None)
    if kind is Kind.EXPERTS and not exact:  # rounding may send a token to others where two are next to equal
        return Tolerance(Measure.RELATIVE, None)
    if not exact:
        return Tolerance(Measure.RELATIVE, next(limit for upto, limit in ROUNDED if recipe.kl_limit <= upto))
    if kind in (Kind.LOGITS, Kind.LLAMA_CPP):
        return Tolerance(Measure.ABSOLUTE, EXACT[kind])
    return Tolerance(Measure.SCALED, max(EXACT[kind], TRANSFORMED if recipe.transforms else 0))


@dataclass(frozen=True, slots=True)
class Stage:
    """One compared value.

    name: of the value in the graph. layer: None outside the layers.
    source: ``observed`` in the graph, ``turned back`` from there into the checkpoint's basis, or
        ``recomputed`` in numpy from values observed there.
    distance: in terms of ``measure``; limit: its tolerance, None if it is only reported.
    max_abs: largest difference; cosine: of the two arrays as vectors; None where a stage has no arrays.
    """

    name: str
    kind: Kind
    layer: int | None
    source: str
    measure: Measure
    distance: float
    limit: float | None
    max_abs: float | None
    cosine: float | None
    passed: bool


def compare(
    name: str, kind: Kind, layer: int | None, source: str, reference: Array, found: Array, recipe: Recipe
) -> Stage:
    """Compare two arrays of one shape whose last axis is the features of a position."""
    assert reference.shape == found.shape, (name, reference.shape, found.shape)
    wide, other = reference.astype(np.float64), found.astype(np.float64)
    difference = np.abs(wide - other)
    allowed = tolerance(kind, recipe)
    norm = _norm(wide)
    if allowed.measure is Measure.SCALED:
        scale = np.maximum(1, np.abs(wide).max(axis=-1))
        distance = float((difference.max(axis=-1) / scale).max())
    elif allowed.measure is Measure.RELATIVE:
        distance = _norm(difference) / max(norm, float(np.finfo(np.float32).tiny))
    else:
        distance = float(difference.max())
    product = norm * _norm(other)
    cosine = float((wide * other).sum()) / product if product else float(norm == 0)
    return judged(
        name, kind, layer, source, allowed, distance, max_abs=float(difference.max()), cosine=cosine
    )


def _norm(array: npt.NDArray[np.float64]) -> float:
    return float(np.sqrt(np.square(array).sum()))


def judged(
    name: str,
    kind: Kind,
    layer: int | None,
    source: str,
    allowed: Tolerance,
    distance: float,
    *,
    max_abs: float | None = None,
    cosine: float | None = None,
) -> Stage:
    """Return a stage with its verdict; a distance that is not a number never passes."""
    passed = allowed.limit is None or distance <= allowed.limit
    return Stage(
        name, kind, layer, source, allowed.measure, distance, allowed.limit, max_abs, cosine, bool(passed)
    )
