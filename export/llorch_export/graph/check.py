"""A built model to the bytes of its file, after the checks that need no weights."""

from __future__ import annotations

import onnx
import onnx_ir as ir

from llorch_serve.errors import ArtifactError


def checked_bytes(model: ir.Model) -> bytes:
    """Return the model's bytes. Raises ArtifactError if it does not pass ONNX's own checks."""
    proto = ir.to_proto(model)
    try:
        onnx.shape_inference.infer_shapes(proto, strict_mode=True, check_type=True)
    except onnx.shape_inference.InferenceError as error:
        raise ArtifactError(
            f"the graph does not pass ONNX shape inference: {error}. Please report this model."
        ) from error
    return proto.SerializeToString(deterministic=True)
