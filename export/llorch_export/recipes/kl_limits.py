"""The divergence that an export may have from the fp32 reference: the most that was measured, with a margin.

Goes into the recipe; ``llorch verify`` fails beyond it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from llorch_export.formats.precisions import half_precisions
from llorch_serve.artifact.manifest import ComputeType, Precision

KL_LIMIT: Final[dict[Precision, float]] = {
    "fp32": 1e-6,
    "fp16": 1e-4,
    "bf16": 0.01,
    "int8": 0.01,
    "int4": 0.4,
    "source": 0.007,
}
"""Mean Kullback-Leibler divergence from the fp32 reference, in nats."""

INT4_HEAD_KL_LIMIT: Final = 0.6
"""The same with a 4-bit head, which costs a small model as much as all its layers."""

PER_TOKEN_KL_LIMIT: Final = 0.06
"""The same where activations are rounded per token, in which one outlier widens every other value's step."""


def default_kl_limit(
    precisions: Iterable[Precision], head: Precision, compute_type: ComputeType, *, per_token: bool
) -> float:
    """Return the limit of a recipe: that of the worst among what it is made of.

    precisions: of layers and rules. per_token: some layer's input is rounded per token.
    """
    limit = max(KL_LIMIT[p] for p in (*precisions, head, *half_precisions(compute_type)))
    if per_token:
        limit = max(limit, PER_TOKEN_KL_LIMIT)
    return max(limit, INT4_HEAD_KL_LIMIT) if head == "int4" else limit
