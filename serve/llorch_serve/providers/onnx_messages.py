"""The few messages of ONNX's file format that serving needs, declared without the onnx package.

What is not declared is skipped when a file is read. Field numbers are those of ONNX's own definition.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any, Final

_PACKAGE: Final = "llorch.onnx"
_KINDS: Final = {
    "text": "TYPE_STRING",
    "bytes": "TYPE_BYTES",
    "float": "TYPE_FLOAT",
    "int": "TYPE_INT64",
    "number": "TYPE_INT32",
}

# Message -> field -> number, and a kind above or the message that it holds; a star: repeated.
_MESSAGES: Final[Mapping[str, Mapping[str, tuple[int, str]]]] = {
    "Model": {"ir_version": (1, "int"), "graph": (7, "Graph"), "opset_import": (8, "OperatorSet*")},
    "OperatorSet": {"domain": (1, "text"), "version": (2, "int")},
    "Graph": {
        "node": (1, "Node*"),
        "name": (2, "text"),
        "initializer": (5, "Tensor*"),
        "input": (11, "ValueInfo*"),
        "output": (12, "ValueInfo*"),
    },
    "Node": {
        "input": (1, "text*"),
        "output": (2, "text*"),
        "name": (3, "text"),
        "op_type": (4, "text"),
        "attribute": (5, "Attribute*"),
        "domain": (7, "text"),
    },
    "Attribute": {"name": (1, "text"), "f": (2, "float"), "i": (3, "int"), "type": (20, "number")},
    "Tensor": {
        "dims": (1, "int*"),
        "data_type": (2, "number"),
        "name": (8, "text"),
        "raw_data": (9, "bytes"),
        "external_data": (13, "Entry*"),
    },
    "Entry": {"key": (1, "text"), "value": (2, "text")},
    "ValueInfo": {"name": (1, "text"), "type": (2, "Type")},
    "Type": {"tensor_type": (1, "TensorType")},
    "TensorType": {"elem_type": (1, "number"), "shape": (2, "Shape")},
    "Shape": {"dim": (1, "Dimension*")},
    "Dimension": {"dim_value": (1, "int")},
}


@functools.cache
def model_class() -> Any:
    """Return the class of a whole model; the other messages are reached through its fields."""
    # Imported here, as most commands read no graph themselves and the library takes long to import.
    from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

    field_type = descriptor_pb2.FieldDescriptorProto
    file = descriptor_pb2.FileDescriptorProto(
        name="llorch/onnx_messages.proto", package=_PACKAGE, syntax="proto2"
    )
    for name, fields in _MESSAGES.items():
        message = file.message_type.add(name=name)
        for field, (number, kind) in fields.items():
            single = kind.rstrip("*")
            message.field.add(
                name=field,
                number=number,
                type=getattr(field_type, _KINDS.get(single, "TYPE_MESSAGE")),
                label=field_type.LABEL_OPTIONAL if single == kind else field_type.LABEL_REPEATED,
                type_name=None if single in _KINDS else f".{_PACKAGE}.{single}",
            )
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName(f"{_PACKAGE}.Model"))
