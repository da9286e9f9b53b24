"""The lowest onnxruntime that a finished graph runs on, by what its nodes ask for."""

from __future__ import annotations

import onnx_ir as ir

from llorch_export.formats.targets import (
    MIN_ONNXRUNTIME_BLOCK_EXPERTS,
    MIN_ONNXRUNTIME_ODD_ZERO_POINTS,
    Capabilities,
)
from llorch_serve.artifact.manifest import Precision


def lowest_runtime(graph: ir.Graph, target: Capabilities) -> str:
    """Return the lowest release that runs the graph as it should; a target's own where nothing is newer."""
    needs = [target.min_onnxruntime]
    if any(node.op_type == "QMoE" for node in graph):
        needs.append(MIN_ONNXRUNTIME_BLOCK_EXPERTS)
    if any(_odd_zero_points(node) for node in graph):
        needs.append(MIN_ONNXRUNTIME_ODD_ZERO_POINTS)
    return later(*needs)


def later(*versions: str) -> str:
    """Return the latest of some versions."""
    return max(versions, key=_numbers)


def lag_notice(lowest: str, target: Capabilities, precision: Precision) -> str | None:
    """Say that the provider's own wheels are older than a graph needs; None if they are not.

    lowest: what :func:`lowest_runtime` returned.
    """
    if target.wheels_at is None or _numbers(lowest) <= _numbers(target.wheels_at):
        return None
    other = "--precision int8" if precision == "source" else "--head-precision int8"
    return (
        f"the artifact needs onnxruntime {lowest}, and wheels with {target.provider} are at "
        f"{target.wheels_at}, which gather rows of 4 bits with an odd number of zero points wrongly; with "
        f"{other} it runs on them"
    )


def _odd_zero_points(node: ir.Node) -> bool:
    """Tell whether a node looks up rows of 4 bits whose zero points end within a byte."""
    if node.op_type != "GatherBlockQuantized" or len(node.inputs) < 4 or node.attributes["bits"].value != 4:
        return False
    scales = node.inputs[2]
    assert scales is not None, "the operator has scales"
    assert scales.shape is not None, "whose shape is known"
    blocks = scales.shape[-1]
    assert isinstance(blocks, int), "in every dimension"
    return blocks % 2 == 1


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split("."))
