"""How many bytes of weights each node of an ONNX file reads, without the onnx package.

Four messages of ONNX's format are declared here with the few fields that are needed; the rest of a file is skipped.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.message import DecodeError

from llorch_serve.errors import ArtifactError

_PACKAGE: Final = "llorch.onnx"
_TEXT: Final = descriptor_pb2.FieldDescriptorProto.TYPE_STRING
_BYTES: Final = descriptor_pb2.FieldDescriptorProto.TYPE_BYTES
_MESSAGE: Final = descriptor_pb2.FieldDescriptorProto.TYPE_MESSAGE
_ONE: Final = descriptor_pb2.FieldDescriptorProto.LABEL_OPTIONAL
_MANY: Final = descriptor_pb2.FieldDescriptorProto.LABEL_REPEATED

# Message -> field -> (number in ONNX's own definition, type, label, message of the field).
_MESSAGES: Final[Mapping[str, Mapping[str, tuple[int, Any, Any, str]]]] = {
    "Model": {"graph": (7, _MESSAGE, _ONE, "Graph")},
    "Graph": {"node": (1, _MESSAGE, _MANY, "Node"), "initializer": (5, _MESSAGE, _MANY, "Tensor")},
    "Node": {"input": (1, _TEXT, _MANY, ""), "name": (3, _TEXT, _ONE, "")},
    "Tensor": {
        "name": (8, _TEXT, _ONE, ""),
        "raw_data": (9, _BYTES, _ONE, ""),
        "external_data": (13, _MESSAGE, _MANY, "Entry"),
    },
    "Entry": {"key": (1, _TEXT, _ONE, ""), "value": (2, _TEXT, _ONE, "")},
}


def weights_of_nodes(path: Path) -> dict[str, dict[str, int]]:
    """Return the weights that each node reads: node name -> weight name -> bytes.

    Raises ArtifactError if the file cannot be read as ONNX.
    """
    model = _model_class()()
    try:
        model.ParseFromString(path.read_bytes())
    except (OSError, DecodeError) as error:
        raise ArtifactError(f"{path} cannot be read as ONNX ({error}); export the model again") from error
    sizes = {tensor.name: _size(tensor) for tensor in model.graph.initializer}
    return {
        node.name: {name: sizes[name] for name in node.input if name in sizes} for node in model.graph.node
    }


def _size(tensor: Any) -> int:
    lengths = [entry.value for entry in tensor.external_data if entry.key == "length"]
    return int(lengths[0]) if lengths and lengths[0].isdecimal() else len(tensor.raw_data)


@functools.cache
def _model_class() -> Any:
    file = descriptor_pb2.FileDescriptorProto(
        name="llorch/onnx_names.proto", package=_PACKAGE, syntax="proto2"
    )
    for name, fields in _MESSAGES.items():
        message = file.message_type.add(name=name)
        for field, (number, kind, label, of) in fields.items():
            message.field.add(
                name=field,
                number=number,
                type=kind,
                label=label,
                type_name=f".{_PACKAGE}.{of}" if of else None,
            )
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName(f"{_PACKAGE}.Model"))
