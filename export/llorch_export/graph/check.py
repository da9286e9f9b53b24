"""The checks that a graph passes before anything is written: what ONNX says of it, and the target's table of
operators.
"""

from __future__ import annotations

import onnx
import onnx_ir as ir

from llorch_export.formats.targets import TARGETS
from llorch_serve.artifact.manifest import Target
from llorch_serve.errors import ArtifactError, LlorchError


def checked_bytes(model: ir.Model, target: Target) -> bytes:
    """Return the model's bytes after the checks that need no weights.

    Raises LlorchError, an internal error, if the graph holds what the target's row of the table has not,
    ArtifactError if ONNX refuses it.
    """
    proto = ir.to_proto(model)
    check_operators(proto, target)
    try:
        onnx.checker.check_model(_without_data(proto))
        onnx.shape_inference.infer_shapes(proto, strict_mode=True, check_type=True)
    except onnx.checker.ValidationError as error:
        raise ArtifactError(
            f"the graph does not pass ONNX's checker: {error}. Please report this model."
        ) from error
    except onnx.shape_inference.InferenceError as error:
        raise ArtifactError(
            f"the graph does not pass ONNX shape inference: {error}. Please report this model."
        ) from error
    return proto.SerializeToString(deterministic=True)


def check_operators(proto: onnx.ModelProto, target: Target) -> None:
    """Raise LlorchError if a node's operator is not in the target's row, or newer than its opset."""
    row = TARGETS[target]
    found = {f"{node.domain}:{node.op_type}" if node.domain else node.op_type for node in proto.graph.node}
    if strange := sorted(found - row.operators):
        raise LlorchError(
            f"internal error: the graph for target {target} holds {', '.join(strange)}, which its table of "
            f"operators has not; "
            "please report this model and the flags"
        )
    opset = {entry.domain: entry.version for entry in proto.opset_import}[""]
    if opset != row.opset:
        raise LlorchError(
            f"internal error: the graph for target {target} is of opset {opset}, not {row.opset}; please "
            f"report it"
        )


def _without_data(proto: onnx.ModelProto) -> onnx.ModelProto:
    """Return a copy whose weights are inputs, because the checker looks for the data file, which is not
    written yet.
    """
    bare = onnx.ModelProto()
    bare.CopyFrom(proto)
    inside = [t for t in bare.graph.initializer if t.data_location != onnx.TensorProto.EXTERNAL]
    for tensor in bare.graph.initializer:
        if tensor.data_location == onnx.TensorProto.EXTERNAL:
            bare.graph.input.append(
                onnx.helper.make_tensor_value_info(tensor.name, tensor.data_type, tensor.dims)
            )
    del bare.graph.initializer[:]
    bare.graph.initializer.extend(inside)
    return bare
