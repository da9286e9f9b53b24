"""The residual stream: what a block adds to it, and what the next block reads of it.

By where the model has its norms: before a block, behind it, or around it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import onnx_ir as ir

from llorch_export.graph.builder import GraphBuilder
from llorch_export.graph.norm import add_norm, norm

FINAL_NORM = "model.norm"


@dataclass(frozen=True, slots=True)
class Place:
    """Where the stream is read. norm: the module that normalises it. plain: its name where none does."""

    norm: str
    plain: str


def block_output(b: GraphBuilder, x: ir.Value, block: str, *, lead: Sequence[int | str]) -> ir.Value:
    """Append what stands between a block and the residual: the norm, if the model has one, and a scale."""
    if b.config.form.norm_placement != "before":
        x = norm(b, x, f"{block}.output_norm", shape=(*lead, b.config.hidden_size))
    return scaled(b, x, b.config.residual_multiplier, f"{block}/scaled")


def into_residual(
    b: GraphBuilder,
    residual: ir.Value,
    delta: ir.Value,
    place: Place,
    *,
    lead: Sequence[int | str],
    keep_sum: bool,
) -> tuple[ir.Value, ir.Value]:
    """Append the sum; return what is read of it at ``place``, and the sum itself.

    keep_sum: whether the sum is needed later; if not, it must not be used.
    """
    shape = (*lead, b.config.hidden_size)
    if b.config.form.norm_placement == "after" and place.norm != FINAL_NORM:
        total = b.op("Add", [delta, residual], name=place.plain, shape=shape)
        return total, total
    return add_norm(b, residual, delta, place.norm, shape=shape, keep_sum=keep_sum)


def scaled(b: GraphBuilder, x: ir.Value, factor: float, name: str) -> ir.Value:
    """Append the product of ``x`` and a constant; ``x`` itself if that is one."""
    if factor == 1:
        return x
    assert x.shape is not None
    shape = [d if isinstance(d, int) else str(d.value) for d in x.shape]
    return b.op("Mul", [x, b.factor(f"{name}/factor", factor)], name=name, shape=shape)
