"""Feed-forward layers of experts: a router, the experts that it chooses, and a block that every token takes.

Each expert is a SwiGLU block, in some families with limits and biases. A token takes those with the largest
router logits, each times its share: softmax over the logits, of all experts or of the chosen ones alone
(Shazeer et al. 2017; Jiang et al. 2024). All of a layer's experts are one node over stacked weights, ``MoE``
or, in blocks, ``QMoE``, which reads only those that some token takes; so they are stored alike. Of equal
logits the node takes the higher index; transformers leaves it open.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import msgspec
import numpy as np
import onnx_ir as ir

from llorch_export.checkpoint.base import LazyTensor
from llorch_export.checkpoint.expert_names import PARTS, expert_module
from llorch_export.formats.experts import layer_format
from llorch_export.formats.module import block_quantizer
from llorch_export.formats.precisions import BITS, UNQUANTISED
from llorch_export.graph.blocks import SCALE_TYPES, carried_chunks, coded_chunks, quantised_chunks
from llorch_export.graph.builder import CONTRIB, GraphBuilder
from llorch_export.graph.linear import whole_linear
from llorch_export.graph.mlp import mlp
from llorch_export.graph.source_forms import requantised
from llorch_export.graph.weights import Arrays
from llorch_export.quantize.carried import carried_form
from llorch_export.quantize.layout import block_count, zero_point_bytes
from llorch_export.quantize.repack import REPACKED_TYPES, BlockForm, common_form
from llorch_serve.artifact.manifest import ExpertsConfig, Precision, ScaleType
from llorch_serve.errors import UsageError

_BITS: Final = (4, 8)  # widths of codes that were compared with numpy
_BLOCKS: Final = (32, 64, 128, 256)


def experts(
    b: GraphBuilder, x: ir.Value, prefix: str, kind: ExpertsConfig, *, lead: Sequence[int | str]
) -> ir.Value:
    """Append the layer of the block named ``prefix`` (``model.layers.0.mlp``) for ``x`` [*lead, hidden]."""
    shape = (*lead, b.config.hidden_size)
    logits = whole_linear(b, x, f"{prefix}.gate", lead=lead)
    flat_shape = b.shared_constant("experts.flat", np.array([-1, kind.count], np.int64))
    tokens = b.dims.positions if len(lead) > 1 else lead[0]
    flat = b.op("Reshape", [logits, flat_shape], name=f"{prefix}.gate/flat", shape=(tokens, kind.count))
    chosen = _chosen_experts(b, x, flat, prefix, kind, shape)
    if kind.shared_intermediate_size is None:
        return chosen
    shared = mlp(b, x, f"{prefix}.shared_expert", lead=lead)
    gate = whole_linear(b, x, f"{prefix}.shared_expert_gate", lead=lead)
    share = b.op("Sigmoid", [gate], name=f"{prefix}.shared_expert_gate/share", shape=(*lead, 1))
    scaled = b.op("Mul", [shared, share], name=f"{prefix}.shared_expert/scaled", shape=shape)
    return b.op("Add", [chosen, scaled], name=prefix, shape=shape)


def _chosen_experts(
    b: GraphBuilder,
    x: ir.Value,
    logits: ir.Value,
    prefix: str,
    kind: ExpertsConfig,
    shape: Sequence[int | str],
) -> ir.Value:
    """Append the weighted sum of each token's experts. logits: [tokens, experts]."""
    name = f"{prefix}.experts"
    attributes = {"k": kind.per_token, **_activation(kind)}
    stored = _block_form(b, prefix, kind)
    stacks = _stacks(b, prefix, kind)
    biases = [_biases(b, stack) if kind.biases else None for stack in stacks]
    if stored is None:
        up, down = (_whole(b, stack) for stack in stacks)
        attributes["normalize_routing_weights"] = int(kind.normalised)
        return b.op(
            "MoE",
            [x, logits, up, biases[0], down, *(biases[1:] if kind.biases else ())],
            name=name,
            shape=shape,
            attributes=attributes,
            domain=CONTRIB,
        )
    first, second = (_in_blocks(b, stack, stored) for stack in stacks)
    inputs = [x, logits, first.packed, first.scales, biases[0], second.packed, second.scales]
    inputs += [biases[1], None, None, None, first.zero_points, second.zero_points, None]
    if not kind.normalised:  # the node's own shares add up to one
        inputs.append(
            b.op(
                "Softmax",
                [logits],
                name=f"{prefix}.gate/shares",
                shape=_sizes(logits),
                attributes={"axis": -1},
            )
        )
    while inputs[-1] is None:
        inputs.pop()
    attributes |= {
        "expert_weight_bits": stored.form.bits,
        "block_size": stored.form.block_size,
        "accuracy_level": _accuracy_level(b, stored.form.bits),
    }
    return b.op("QMoE", inputs, name=name, shape=shape, attributes=attributes, domain=CONTRIB)


def _activation(kind: ExpertsConfig) -> dict[str, int | float | str]:
    """Return the attributes that say what an expert computes between its matrices."""
    swiglu: dict[str, int | float | str] = {
        "activation_type": "swiglu",
        "swiglu_fusion": 1,  # rows of gate and up by turns
    }
    if kind.clamped is msgspec.UNSET:
        return swiglu | {"activation_alpha": 1.0, "activation_beta": 0.0}
    alpha, limit = kind.clamped.alpha, kind.clamped.limit
    return swiglu | {"activation_alpha": alpha, "activation_beta": 1.0, "swiglu_limit": limit}


def _accuracy_level(b: GraphBuilder, bits: int) -> int:
    """Return in what the node multiplies. Raises UsageError if it cannot multiply as asked."""
    asked = b.recipe.accuracy_level
    if asked == 0 and bits == 8:
        raise UsageError(
            "--accuracy-level 0 asks for products in full precision, and the runtime multiplies 8-bit "
            f"experts in int8 alone; leave it out, or {_other_experts(b.recipe.precision)}"
        )
    return 4 if asked is None else asked


def _other_experts(precision: Precision) -> str:
    """Return how to store experts that the runtime multiplies in full precision."""
    if precision == "source":  # rules have no effect there
        return "choose --precision fp32 without it, which keeps the values of the checkpoint"
    return 'store "*.experts.*" at int4 or fp32'


@dataclass(frozen=True, slots=True)
class _Stored:
    """How a layer's experts lie in blocks. chunks: gives some rows of a tensor's blocks at a time."""

    form: BlockForm
    scale_type: ScaleType
    chunks: Callable[[str], Iterator[Arrays]]


@dataclass(frozen=True, slots=True)
class _Stack:
    """Matrices [rows, columns] of one kind, of all experts. tensors: an expert's, whose rows go by turns."""

    name: str
    tensors: tuple[tuple[str, ...], ...]
    rows: int
    columns: int

    def chunks(self, of: Callable[[str], Iterator[Arrays]]) -> Iterator[Arrays]:
        """Give some rows of an expert at a time. of: what a tensor's rows are stored as."""
        return (chunk for own in self.tensors for chunk in _by_turns([of(name) for name in own]))


def _stacks(b: GraphBuilder, prefix: str, kind: ExpertsConfig) -> tuple[_Stack, _Stack]:
    """Return what turns the hidden state into gate and up, and what turns their product back."""
    names = [
        {part: f"{prefix.removesuffix('mlp')}{expert_module(expert, part)}.weight" for part in PARTS}
        for expert in range(kind.count)
    ]
    hidden, inner = b.config.hidden_size, kind.intermediate_size
    up = tuple((own["gate_proj"], own["up_proj"]) for own in names)
    down = tuple((own["down_proj"],) for own in names)
    return (
        _Stack(f"{prefix}.experts.gate_up_proj", up, 2 * inner, hidden),
        _Stack(f"{prefix}.experts.down_proj", down, hidden, inner),
    )


def _block_form(b: GraphBuilder, prefix: str, kind: ExpertsConfig) -> _Stored | None:
    """Return the blocks that all experts of a layer are stored in; None where they stay whole."""
    weights = [name for stack in _stacks(b, prefix, kind) for names in stack.tensors for name in names]
    forms = [b.formats.of(_module(weight)) for weight in weights]
    form = layer_format(forms, b.config.hidden_size, kind.intermediate_size)
    if form.precision in UNQUANTISED:
        return None
    if form.precision == "source":
        tensors = [b.tensors[weight] for weight in weights]
        if any(tensor.packed is not None for tensor in tensors):
            return _packed_form(b, tensors, kind)
        if any(tensor.read_blocks is None or tensor.dtype not in REPACKED_TYPES for tensor in tensors):
            return None
        carried = common_form({tensor.dtype for tensor in tensors}, _BITS)
        return _Stored(carried, "float32", lambda weight: carried_chunks(b, [weight], carried))
    assert form.block_size is not None, "a quantised format has a block size"
    if form.block_size < min(one.block_size or 0 for one in forms):
        b.notices[f"experts are stored in blocks of {form.block_size}, which divide their sizes"] = None
    if block_quantizer(b.recipe, form.precision) == "gptq":
        b.notices[
            f"blocks of experts are found without error feedback ({form.quantizer or 'nearest'} in place of "
            "gptq), since each expert sees only some of a text's tokens"
        ] = None
    blocks = BlockForm(BITS[form.precision], form.block_size, zero_points=form.zero_points)
    return _Stored(
        blocks, form.scale_type, lambda weight: quantised_chunks(b, _module(weight), [weight], form)
    )


def _packed_form(b: GraphBuilder, tensors: Sequence[LazyTensor], kind: ExpertsConfig) -> _Stored:
    """Return the codes that a tool has packed a layer's experts in, or where the node cannot take those of
    all as they are, blocks that are found anew.
    """
    sizes = (b.config.hidden_size, kind.intermediate_size)
    codes = [tensor.codes for tensor in tensors]
    for finest in _BLOCKS if all(one is not None and one.takes_inputs_as_they_are for one in codes) else ():
        found = {(carried_form(one, _BITS, finest), one.scale_type) for one in codes if one is not None}
        blocks, scale_type = next(iter(found))
        if len(found) == 1 and blocks is not None and not any(size % blocks.block_size for size in sizes):
            return _Stored(blocks, scale_type, functools.partial(_coded, b, blocks))
    form = layer_format([requantised(tensor) for tensor in tensors], *sizes)
    assert form.block_size is not None, "a quantised format has a block size"
    b.notices[
        f"a layer's experts are not packed alike, or not as one node takes them, and were quantised anew: "
        f"{form.precision}, block {form.block_size}"
    ] = None
    return _Stored(
        BlockForm(BITS[form.precision], form.block_size, zero_points=False),
        form.scale_type,
        lambda weight: quantised_chunks(b, _module(weight), [weight], form),
    )


@dataclass(frozen=True, slots=True)
class _BlockStack:
    """A planned stack: codes [experts, rows, bytes], scales [experts, rows, blocks], zero points if any."""

    packed: ir.Value
    scales: ir.Value
    zero_points: ir.Value | None


def _in_blocks(b: GraphBuilder, stack: _Stack, stored: _Stored) -> _BlockStack:
    """Plan a stack in blocks; memory holds a chunk of an expert's rows at a time."""
    form, count = stored.form, len(stack.tensors)
    blocks, rows = block_count(stack.columns, form.block_size), stack.rows * count
    ready = SCALE_TYPES[stored.scale_type] == b.compute
    scales_name = f"{stack.name}.scales" if ready else f"{stack.name}.scales.stored"
    widths = {
        f"{stack.name}.weight": (ir.DataType.UINT8, stack.columns * form.bits // 8),
        scales_name: (SCALE_TYPES[stored.scale_type], blocks),
    }
    if form.zero_points:
        zeros = zero_point_bytes(stack.columns, form.block_size, form.bits)
        widths[f"{stack.name}.zero_points"] = (ir.DataType.UINT8, zeros)
    planned = b.weights.stream(
        [(name, dtype, (rows, width)) for name, (dtype, width) in widths.items()],
        lambda: _flat_rows(stack.chunks(stored.chunks)),
    )
    packed, scales, *zero_points = (
        b.weights.reinterpret(value, dtype, (count, stack.rows, width))
        for value, (dtype, width) in zip(planned, widths.values(), strict=True)
    )
    if not ready:
        shape = (count, stack.rows, blocks)
        scales = b.op(
            "Cast", [scales], name=f"{stack.name}.scales", shape=shape, attributes={"to": b.compute.value}
        )
    return _BlockStack(packed, scales, zero_points[0] if zero_points else None)


def _whole(b: GraphBuilder, stack: _Stack) -> ir.Value:
    """Plan a stack in the compute type, [experts, rows, columns]."""

    def chunks(name: str) -> Iterator[Arrays]:
        return ((b.weight_cast.cast(name, chunk),) for chunk in b.tensors[name].row_chunks())

    (planned,) = b.weights.stream(
        [(f"{stack.name}.weight", b.compute, (stack.rows * len(stack.tensors), stack.columns))],
        lambda: stack.chunks(chunks),
    )
    return b.weights.reinterpret(planned, b.compute, (len(stack.tensors), stack.rows, stack.columns))


def _biases(b: GraphBuilder, stack: _Stack) -> ir.Value:
    """Plan the biases of a stack in the compute type, [experts, rows]."""
    name = f"{stack.name}.bias"

    def chunks(weight: str) -> Iterator[Arrays]:
        bias = f"{_module(weight)}.bias"
        return ((b.weight_cast.cast(bias, chunk),) for chunk in b.tensors[bias].row_chunks())

    (planned,) = b.weights.stream(
        [(name, b.compute, (stack.rows * len(stack.tensors),))], lambda: stack.chunks(chunks)
    )
    return b.weights.reinterpret(planned, b.compute, (len(stack.tensors), stack.rows))


def _by_turns(parts: Sequence[Iterator[Arrays]]) -> Iterator[Arrays]:
    """Give the rows of tensors of one shape by turns: the first of each, the second of each."""
    for chunks in zip(*parts, strict=True):
        yield tuple(
            np.stack(arrays, axis=1).reshape(-1, *arrays[0].shape[1:]) for arrays in zip(*chunks, strict=True)
        )


def _flat_rows(chunks: Iterator[Arrays]) -> Iterator[Arrays]:
    """Give each array as rows of one dimension."""
    for arrays in chunks:
        yield tuple(array.reshape(len(array), -1) for array in arrays)


def _coded(b: GraphBuilder, form: BlockForm, weight: str) -> Iterator[Arrays]:
    return coded_chunks(b, [weight], form)


def _module(weight: str) -> str:
    return weight.removesuffix(".weight")


def _sizes(value: ir.Value) -> list[int | str]:
    assert value.shape is not None
    return [size if isinstance(size, int) else str(size.value) for size in value.shape]
