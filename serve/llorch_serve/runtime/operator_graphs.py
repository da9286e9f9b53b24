"""Graphs of one operator each, with an input and the answer that numpy computes from the operator's
definition.

The operators are those of the targets' decoders. The graphs are a few hundred bytes, made from
:mod:`llorch_serve.providers.onnx_messages`, so that serving needs no package to write ONNX.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal

import numpy as np
import numpy.typing as npt

from llorch_serve.providers.onnx_messages import model_class

Array = npt.NDArray[Any]

_ELEMENTS: Final = {"float32": 1, "uint8": 2, "int32": 6, "int64": 7, "float16": 10}
_FLOAT, _INT = 1, 2  # kinds of attributes
_CONTRIB: Final = "com.microsoft"

ATTENTION: Final = "GroupQueryAttention"


@dataclass(frozen=True, slots=True)
class OperatorCase:
    """One operator, once.

    name: for people. model: the graph. feeds: its inputs. expected: its first output. tolerance: of the
        largest difference, as part of the largest value.
    """

    name: str
    model: bytes
    feeds: Mapping[str, Array]
    expected: Array
    tolerance: float


def _graph(
    operator: str,
    inputs: Mapping[str, Array],
    weights: Mapping[str, Array],
    outputs: Mapping[str, tuple[int, ...]],
    *,
    domain: str = _CONTRIB,
    order: tuple[str, ...] = (),
    element: str = "float32",
    **attributes: int | float,
) -> bytes:
    """Return a model of one node. order: its inputs, "" for one left out; by default inputs, then weights.
    element: of its outputs.
    """
    model = model_class()(ir_version=10)
    model.opset_import.add(domain="", version=23 if not domain else 21)
    model.opset_import.add(domain=_CONTRIB, version=1)
    graph = model.graph
    graph.name = operator
    node = graph.node.add(op_type=operator, domain=domain, name=operator)
    node.input.extend(order or (*inputs, *weights))
    node.output.extend(outputs)
    for name, value in attributes.items():
        if isinstance(value, float):
            node.attribute.add(name=name, f=value, type=_FLOAT)
        else:
            node.attribute.add(name=name, i=value, type=_INT)
    for name, array in weights.items():
        graph.initializer.add(
            dims=array.shape, data_type=_ELEMENTS[str(array.dtype)], name=name, raw_data=array.tobytes()
        )
    for name, array in inputs.items():
        _declare(graph.input, name, _ELEMENTS[str(array.dtype)], array.shape)
    for name, shape in outputs.items():
        _declare(graph.output, name, _ELEMENTS[element], shape)
    return bytes(model.SerializeToString())


def _declare(values: Any, name: str, element: int, shape: tuple[int, ...]) -> None:
    value = values.add(name=name)
    value.type.tensor_type.elem_type = element
    value.type.tensor_type.shape.SetInParent()
    for size in shape:
        value.type.tensor_type.shape.dim.add(dim_value=size)


def _drawn(*shape: int, seed: int) -> Array:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def _blocks(bits: int) -> OperatorCase:
    rows, columns, block = 24, 64, 32
    x = _drawn(3, columns, seed=1)
    codes = np.random.default_rng(2).integers(0, 2**bits, (rows, columns)).astype(np.uint8)
    scales = np.abs(_drawn(rows, columns // block, seed=3)) + np.float32(0.1)
    packed = codes if bits == 8 else codes[:, ::2] | codes[:, 1::2] << 4
    packed = np.ascontiguousarray(packed.reshape(rows, columns // block, block * bits // 8))
    dense = (codes.astype(np.float32) - 2 ** (bits - 1)) * np.repeat(scales, block, axis=1)
    model = _graph(
        "MatMulNBits",
        {"x": x},
        {"codes": packed, "scales": scales},
        {"y": (3, rows)},
        K=columns,
        N=rows,
        bits=bits,
        block_size=block,
        accuracy_level=4,
    )
    # Activations may be rounded to int8, block by block.
    return OperatorCase(f"MatMulNBits, {bits} bits", model, {"x": x}, x @ dense.T, 0.02)


WIDE: Final = 40
"""Rows of attention that kernels which go by blocks of rows and keys have more than one block of."""


AttentionType = Literal["float32", "float16"]
_ATTENTION_TOLERANCES: Final[Mapping[AttentionType, float]] = {"float32": 1e-3, "float16": 5e-3}


def attention(tokens: int = WIDE, start: int = 0, element: AttentionType = "float32") -> OperatorCase:
    """Return attention of ``tokens`` rows in type ``element`` that follow ``start`` positions of the past."""
    heads, kv_heads, size, capacity, end = 4, 2, 32, 64, start + tokens
    query = _drawn(1, tokens, heads * size, seed=4).astype(element)
    keys, values = (_drawn(end, kv_heads, size, seed=seed).astype(element) for seed in (5, 6))
    pasts = np.zeros((2, 1, kv_heads, capacity, size), element)
    for past, whole in zip(pasts, (keys, values), strict=True):
        past[0, :, :start] = whole[:start].swapaxes(0, 1)
    feeds = {
        "query": query,
        "key": keys[start:].reshape(1, tokens, -1),
        "value": values[start:].reshape(1, tokens, -1),
        "past_key": pasts[0],
        "past_value": pasts[1],
        "seqlens_k": np.array([end - 1], np.int32),
        "total": np.array(end, np.int32),
    }
    present = pasts[0].shape
    model = _graph(
        "GroupQueryAttention",
        feeds,
        {},
        {"y": (1, tokens, heads * size), "present_key": present, "present_value": present},
        element=element,
        num_heads=heads,
        kv_num_heads=kv_heads,
    )
    answer = np.empty((tokens, heads, size), np.float32)
    for head in range(heads):
        q = query[0].reshape(tokens, heads, size)[:, head].astype(np.float32)
        k, v = (whole[:, head * kv_heads // heads].astype(np.float32) for whole in (keys, values))
        scores = np.where(np.tri(tokens, end, start, dtype=bool), q @ k.T / np.sqrt(size), -np.inf)
        weights = np.exp(scores - scores.max(axis=1, keepdims=True))
        answer[:, head] = weights / weights.sum(axis=1, keepdims=True) @ v
    return OperatorCase(
        ATTENTION, model, feeds, answer.reshape(1, tokens, -1), _ATTENTION_TOLERANCES[element]
    )


def _rms(x: Array, scale: Array) -> Array:
    return np.asarray(x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + 1e-5) * scale, np.float32)


def _skip_norm() -> OperatorCase:
    x, skip, scale = _drawn(1, 3, 64, seed=7), _drawn(1, 3, 64, seed=8), _drawn(64, seed=9)
    feeds = {"x": x, "skip": skip}
    model = _graph("SkipSimplifiedLayerNormalization", feeds, {"scale": scale}, {"y": x.shape}, epsilon=1e-5)
    return OperatorCase("SkipSimplifiedLayerNormalization", model, feeds, _rms(x + skip, scale), 1e-3)


def _norm() -> OperatorCase:
    x, scale = _drawn(1, 3, 64, seed=10), _drawn(64, seed=11)
    model = _graph(
        "RMSNormalization", {"x": x}, {"scale": scale}, {"y": x.shape}, domain="", axis=-1, epsilon=1e-5
    )
    return OperatorCase("RMSNormalization", model, {"x": x}, _rms(x, scale), 1e-3)


def _rotary(domain: str) -> OperatorCase:
    tokens, heads, size = 4, 2, 32
    x = _drawn(1, heads, tokens, size, seed=12)
    angles = np.arange(16)[:, None] * 10000.0 ** (-np.arange(size // 2) / (size // 2))
    tables = {"cos": np.cos(angles).astype(np.float32), "sin": np.sin(angles).astype(np.float32)}
    positions = np.array([[3, 4, 5, 9]])
    feeds = {"x": x, "positions": positions}
    order = ("x", "positions", "cos", "sin") if domain else ("x", "cos", "sin", "positions")
    model = _graph("RotaryEmbedding", feeds, tables, {"y": x.shape}, domain=domain, order=order)
    cos, sin = (table[positions[0]] for table in tables.values())
    first, second = x[..., : size // 2], x[..., size // 2 :]
    answer = np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return OperatorCase(f"RotaryEmbedding of {domain or 'ONNX'}", model, feeds, answer, 1e-3)


def _gated() -> OperatorCase:
    x = _drawn(3, 64, seed=13)
    model = _graph("QuickGelu", {"x": x}, {}, {"y": x.shape}, alpha=1.0)
    return OperatorCase("QuickGelu", model, {"x": x}, x / (1 + np.exp(-x)), 1e-3)


_MADE_BY: Final[Mapping[str, Callable[[], OperatorCase]]] = {
    "int4": lambda: _blocks(4),
    "int8": lambda: _blocks(8),
    "skip_norm": _skip_norm,
    "norm": _norm,
    "rotary": lambda: _rotary(""),
    "contrib_rotary": lambda: _rotary(_CONTRIB),
    "silu": _gated,
}
_FUSED: Final = (ATTENTION, "skip_norm", "silu", "int4")
_OF_TARGET: Final[Mapping[str, tuple[str, ...]]] = {
    "cpu": (*_FUSED, "int8", "norm", "rotary"),
    "cuda": (*_FUSED, "int8", "norm", "rotary"),
    "webgpu": (*_FUSED, "int8", "norm", "rotary"),
    "openvino": (*_FUSED, "int8", "contrib_rotary"),
    "directml": (*_FUSED, "contrib_rotary"),
}


def cases(target: str, element: AttentionType = "float32") -> list[OperatorCase]:
    """Return the operators that decoders of a target rely upon; none for one that has plain arithmetic alone.

    element: what attention is in; the others are in float32.
    """
    names = _OF_TARGET.get(target, ())
    return [attention(element=element) if name == ATTENTION else _MADE_BY[name]() for name in names]
