"""How each matrix of an artifact is stored, read from its graph: for ``llorch inspect``."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Final

import onnx

from llorch_export.formats.module import EMBEDDING, HEAD, QUARTERS
from llorch_export.inspect.widening import Widening

_FLOATS: Final = {"float32": "fp32", "float16": "fp16", "bfloat16": "bf16"}
_OFFSETS: Final = "/offsets"
_PART: Final = re.compile(r"/part\.\d+$")
_LEVELS: Final = re.compile(r"\.levels\.(\d)$")
_LAYER: Final = re.compile(r"model\.layers\.(\d+)\.(.+)")


@dataclass(frozen=True, slots=True)
class StoredModule:
    """One matrix, several packed ones, or a vocabulary table.

    name: as in the graph; ``self_attn.qkv_proj`` is the packed projections. precision: of its codes or
        values.
    bits_per_weight: stored bytes, scales and zero points included, times 8, over its weights.
    """

    name: str
    precision: str
    block_size: int | None
    zero_points: bool
    bits_per_weight: float


def stored_modules(model: onnx.ModelProto) -> tuple[StoredModule, ...]:
    """Return the matrices of a graph in the order of use; a table that lookup and head share is there
    twice.
    """
    widening = Widening(model)
    weights = widening.weights
    # Scales that are stored narrower than they are used.
    narrow = {
        node.output[0]: node.input[0]
        for node in model.graph.node
        if node.op_type == "Cast" and node.input[0] in weights
    }
    # Rows of a table, which are looked up before they are dequantised.
    looked_up = {
        node.output[0]: node.input[0]
        for node in model.graph.node
        if node.op_type == "Gather" and node.input[0] in weights
    }
    dequantised = {
        name for node in model.graph.node if node.op_type == "DequantizeLinear" for name in node.input
    }
    widened = {
        node.output[0]: node.input[0]
        for node in model.graph.node
        if node.op_type == "Cast" and node.output[0] in dequantised
    }
    offsets = {node.output[0]: node.input[1] for node in model.graph.node if node.op_type == "MatMul"}
    found = []
    for node in model.graph.node:
        if node.op_type == "DequantizeLinear":
            names = (widened.get(name, name) for name in node.input)
            found.append(_dequantised(node, [weights[looked_up.get(name, name)] for name in names]))
            continue
        if node.output[0] in dequantised or node.output[0] in widened.values():
            continue
        if widening.makes(node.output[0]) or node.output[0].endswith(_OFFSETS):
            continue
        inputs = [weights.get(narrow.get(name, name)) for name in node.input]
        if node.op_type in ("MatMulNBits", "GatherBlockQuantized"):
            beside = offsets.get(f"{_module(node)}{_OFFSETS}")
            found.append(_in_blocks(node, widening, [] if beside is None else widening.behind(beside)))
        elif node.op_type in ("MoE", "QMoE"):
            found.extend(_experts(node, inputs))
        elif node.op_type == "MatMulIntegerToFloat":
            part = _in_rows(node, inputs)
            if not (_PART.search(node.output[0]) and found and found[-1].name == part.name):
                found.append(part)  # parts of a row follow each other, and are stored alike
        elif node.op_type in ("MatMul", "Gemm") and node.input[1] not in {*weights, *narrow}:
            found.extend(_values(node, widening))
        elif node.op_type in ("MatMul", "Gemm", "Gather"):
            found.extend(_plain(node, tensor) for tensor in inputs if tensor and len(tensor.dims) == 2)
    return tuple(found)


def _in_blocks(node: onnx.NodeProto, widening: Widening, beside: list[onnx.TensorProto]) -> StoredModule:
    """Describe a matrix in blocks. beside: what else its product is made of, scales among it."""
    attributes = {a.name: a.i for a in node.attribute}
    gathers = node.op_type == "GatherBlockQuantized"
    packed, scales = widening.behind(node.input[0 if gathers else 1]), widening.behind(node.input[2])
    zero_points = widening.behind(node.input[3]) if len(node.input) > 3 else []
    bits, block_size = attributes["bits"], attributes["block_size"]
    count = 8 * sum(map(_nbytes, packed)) // bits if gathers else attributes["N"] * attributes["K"]
    stored = {tensor.name: tensor for tensor in (*packed, *scales, *zero_points, *beside)}
    total = sum(map(_nbytes, stored.values()))
    return StoredModule(
        _module(node), f"int{bits}", block_size, bool(zero_points or beside), 8 * total / count
    )


def _values(node: onnx.NodeProto, widening: Widening) -> Iterator[StoredModule]:
    """Describe a matrix of values that the file has as levels; nothing for a product of two inputs."""
    stored = widening.behind(node.input[1])
    codes = [(tensor, found) for tensor in stored if (found := _LEVELS.search(tensor.name))]
    for tensor, found in codes[:1]:  # others are further bits of the same
        count = 8 * _nbytes(tensor) // int(found[1])
        yield StoredModule(_module(node), "fp32", None, False, 8 * sum(map(_nbytes, stored)) / count)


def _experts(node: onnx.NodeProto, inputs: list[onnx.TensorProto | None]) -> Iterator[StoredModule]:
    """Describe the two stacks that all experts of a layer are, gate with up, and down."""
    if node.op_type == "MoE":
        for tensor in (inputs[2], inputs[4]):
            assert tensor is not None
            yield replace(_plain(node, tensor), name=tensor.name.removesuffix(".weight"))
        return
    attributes = {a.name: a.i for a in node.attribute}
    bits, block_size = attributes["expert_weight_bits"], attributes["block_size"]
    for first, zeros in ((2, 11), (5, 12)):
        packed, scales = inputs[first], inputs[first + 1]
        zero_points = inputs[zeros] if len(inputs) > zeros else None
        assert packed is not None
        assert scales is not None
        total = sum(_nbytes(tensor) for tensor in (packed, scales, zero_points) if tensor is not None)
        name, count = packed.name.removesuffix(".weight"), 8 * _nbytes(packed) // bits
        yield StoredModule(name, f"int{bits}", block_size, zero_points is not None, 8 * total / count)


def _dequantised(node: onnx.NodeProto, inputs: list[onnx.TensorProto]) -> StoredModule:
    codes, *rest = inputs
    bits = 4 if codes.data_type in (onnx.TensorProto.INT4, onnx.TensorProto.UINT4) else 8
    block_size = next(a.i for a in node.attribute if a.name == "block_size")
    bits_per_weight = bits * sum(_nbytes(tensor) for tensor in inputs) / _nbytes(codes)
    return StoredModule(_module(node), f"int{bits}", block_size, len(rest) > 1, bits_per_weight)


def _in_rows(node: onnx.NodeProto, inputs: list[onnx.TensorProto | None]) -> StoredModule:
    """Describe a layer in per-channel int8, or a part of one: a scale for each output, which parts share, so
    no blocks.
    """
    codes, scales = inputs[1], inputs[3]
    assert codes is not None
    assert scales is not None
    parts = QUARTERS if _PART.search(node.output[0]) else 1
    total = parts * _nbytes(codes) + _nbytes(scales)
    return StoredModule(_module(node), "int8", None, False, 8 * total / (parts * math.prod(codes.dims)))


def _plain(node: onnx.NodeProto, tensor: onnx.TensorProto) -> StoredModule:
    dtype = onnx.helper.tensor_dtype_to_np_dtype(tensor.data_type)
    precision = _FLOATS.get(dtype.name, dtype.name)
    return StoredModule(_module(node), precision, None, False, 8 * dtype.itemsize)


def _module(node: onnx.NodeProto) -> str:
    name = _PART.sub("", node.output[0]).removesuffix("/product")
    if node.op_type == "DequantizeLinear":
        name = name.removesuffix(".weight")
    if name.startswith("logits"):
        return HEAD
    return EMBEDDING if name.startswith("embedding") else name


def _nbytes(tensor: onnx.TensorProto) -> int:
    length = next((int(entry.value) for entry in tensor.external_data if entry.key == "length"), None)
    return tensor.ByteSize() if length is None else length


def described(modules: tuple[StoredModule, ...]) -> Iterator[tuple[str, StoredModule]]:
    """Give a pattern and one of its modules for each run of layers that store a part alike."""
    groups: dict[tuple[object, ...], list[tuple[str, StoredModule]]] = {}
    for module in modules:
        layered = _LAYER.fullmatch(module.name)
        part = layered[2] if layered else module.name
        key = (part, module.precision, module.block_size, module.zero_points, module.bits_per_weight)
        groups.setdefault(key, []).append((layered[1] if layered else "", module))
    for (part, *_), members in groups.items():
        yield _pattern(str(part), [int(layer) for layer, _ in members if layer]), members[0][1]


def patterns(names: Iterable[str]) -> Iterator[str]:
    """Give a pattern for each part of layers, over the layers of all ``names``; other names as they are."""
    parts: dict[str, list[int]] = {}
    for name in names:
        layered = _LAYER.fullmatch(name)
        layers = parts.setdefault(layered[2] if layered else name, [])
        layers += [int(layered[1])] if layered else []
    return (_pattern(part, layers) for part, layers in parts.items())


def _pattern(part: str, layers: list[int]) -> str:
    return f"model.layers.{{{_runs(layers)}}}.{part}" if layers else part


def _runs(numbers: list[int]) -> str:
    """Return ascending numbers as runs: ``0-3,7``."""
    texts = []
    for _, run in itertools.groupby(enumerate(numbers), lambda pair: pair[1] - pair[0]):
        members = [number for _, number in run]
        texts.append(str(members[0]) if len(members) == 1 else f"{members[0]}-{members[-1]}")
    return ",".join(texts)
