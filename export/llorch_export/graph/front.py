"""What stands before and behind the layers: the inputs that a runtime feeds, and the logits it wants.

Two runtimes, two fronts over the same layers and the same weights. llorch's own feeds what attention takes,
which the form of attention says (:func:`llorch_front`). onnxruntime-genai feeds an attention mask and wants
the logits of each row's last token (:func:`genai_front`, :func:`genai_logits`); its graph computes the rest.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

import numpy as np
import onnx_ir as ir

from llorch_export.graph.builder import GraphBuilder

_INT64 = ir.DataType.INT64
_INT32 = ir.DataType.INT32


class Interface(Enum):
    """Whose inputs and outputs a graph has."""

    LLORCH = "llorch"
    GENAI = "genai"


@dataclass(frozen=True, slots=True)
class Front:
    """What the layers take, and which of it are graph inputs.

    leading, trailing: the graph's inputs before and behind those that attention itself asks for, without the
        KV cache.
    input_ids: [batch, tokens]; None: another stage takes them. logits_indices: [rows], positions in the
        flattened [batch * tokens]; None: all are wanted.
    by_token: a value [batch, tokens, ...], whose shape tells how many tokens there are.
    lengths: where they are computed, each row's total length minus one [batch], and the largest total length;
        prompts may then have padding behind them. None: attention takes what it needs as inputs.
    has_past: tokens may come behind others whose keys and values are in the cache.
    """

    leading: tuple[ir.Value, ...]
    trailing: tuple[ir.Value, ...]
    input_ids: ir.Value | None
    logits_indices: ir.Value | None
    by_token: ir.Value
    lengths: tuple[ir.Value, ir.Value] | None = None
    has_past: bool = True


def make_front(b: GraphBuilder, interface: Interface) -> Front:
    """Return the front that a runtime feeds."""
    return genai_front(b) if interface is Interface.GENAI else llorch_front(b)


def llorch_front(b: GraphBuilder) -> Front:
    """Return the front where everything is an input."""
    input_ids = b.input("input_ids", _INT64, *b.dims.lead)
    wanted = _wanted(b)
    return Front((input_ids,), wanted, input_ids, next(iter(wanted), None), input_ids)


def stage_front(b: GraphBuilder, residual: ir.Value, delta: ir.Value | None) -> Front:
    """Return llorch's front of a stage that takes what another hands on."""
    crossing = (residual,) if delta is None else (residual, delta)
    wanted = _wanted(b)
    return Front(crossing, wanted, None, next(iter(wanted), None), residual)


def _wanted(b: GraphBuilder) -> tuple[ir.Value, ...]:
    """Return the input that says which rows' logits are wanted; of a stage that has no logits, none."""
    return () if b.hands_on else (b.input("logits_indices", _INT64, b.dims.rows),)


def genai_front(b: GraphBuilder) -> Front:
    """Append what turns ``input_ids`` and ``attention_mask`` [batch, total] into a :class:`Front`.

    A row's length is the sum of its mask. A prompt of several rows is padded behind, so the last token of a
    row is at its length minus one; in later calls all tokens are real, and it is the last of the call.
    """
    input_ids = b.input("input_ids", _INT64, "batch", "tokens")
    mask = b.input("attention_mask", _INT64, "batch", "total")
    zero, one = (b.constant(f"genai.{n}", np.array(v, np.int64)) for n, v in (("zero", 0), ("one", 1)))
    axis = b.constant("genai.axis", np.array([1], np.int64))

    def op(name: str, op_type: str, *inputs: ir.Value, shape: tuple[str | int, ...] = ()) -> ir.Value:
        return b.op(op_type, inputs, name=f"genai.{name}", shape=shape, dtype=_INT64)

    def int32(name: str, value: ir.Value, shape: tuple[str | int, ...]) -> ir.Value:
        return b.op("Cast", [value], name=name, shape=shape, attributes={"to": int(_INT32)}, dtype=_INT32)

    lengths = b.op(
        "ReduceSum",
        [mask, axis],
        name="genai.lengths",
        shape=("batch",),
        attributes={"keepdims": 0},
        dtype=_INT64,
    )
    last = op("last", "Sub", lengths, one, shape=("batch",))
    total = op("total", "Gather", op("mask.shape", "Shape", mask, shape=(2,)), one)
    ids_shape = op("ids.shape", "Shape", input_ids, shape=(2,))
    batch, tokens = op("batch", "Gather", ids_shape, zero), op("tokens", "Gather", ids_shape, one)
    column = op("column", "Min", last, op("tokens.last", "Sub", tokens, one), shape=("batch",))
    size = op("size", "Mul", batch, tokens)
    starts = op("starts", "Range", zero, size, tokens, shape=("batch",))
    return Front(
        leading=(input_ids, mask),
        trailing=(),
        input_ids=input_ids,
        by_token=input_ids,
        lengths=(int32("seqlens_k", last, ("batch",)), int32("total_sequence_length", total, ())),
        logits_indices=op("logits_indices", "Add", starts, column, shape=("batch",)),
    )


def genai_logits(b: GraphBuilder, logits: ir.Value) -> ir.Value:
    """Append the logits [batch, 1, vocabulary] to those of rows [batch, vocabulary].

    A second axis of fixed size 1 is how onnxruntime-genai knows that there are only the last tokens'.
    """
    logits.name = "logits.rows"
    axis = b.constant("logits.axis", np.array([1], np.int64))
    shape = ("batch", 1, b.config.vocab_size)
    return b.op("Unsqueeze", [logits, axis], name="logits", shape=shape)
