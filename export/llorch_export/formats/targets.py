"""What each target's runtime can do: the one table that decides the form of every part of a graph.

A target is chosen with ``--target``. The graph modules ask for a capability, never for a target's name, so a
new target is a new row. Where the facts come from is in docs/targets.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Final

from llorch_serve.artifact.manifest import ComputeType, Precision, Target

CONTRIB: Final = "com.microsoft"
OPSET: Final = 23  # of the CPU's graph: the first with RMSNormalization
IR_VERSION: Final = 11  # the one of opset 23
MIN_ONNXRUNTIME: Final = "1.24"
MIN_ONNXRUNTIME_BLOCK_EXPERTS: Final = "1.31"  # 1.30 has no shares apart from logits, and is 50 times slower
MIN_ONNXRUNTIME_ODD_ZERO_POINTS: Final = "1.27"  # of a table of 4 bits: 1.26 looks them up in another row
MIN_ONNXRUNTIME_INT8_CACHE: Final = "1.27"  # 1.26 loads such a graph on the CPU and fails in its first step


class AttentionForm(Enum):
    """How queries meet the KV cache."""

    GROUP_QUERY = "GroupQueryAttention, which appends to a cache of any capacity"
    STANDARD = "TensorScatter into the cache and Attention over all of it behind a mask"
    PRIMITIVE = "MatMul and Softmax over a full past and the new tokens beside it"


class RotaryForm(Enum):
    """How queries and keys are rotated outside attention."""

    STANDARD = "RotaryEmbedding of ONNX"
    CONTRIB = "RotaryEmbedding of com.microsoft"
    PRIMITIVE = "Split, Mul, Sub, Add, Concat"


class NormForm(Enum):
    """How a root mean square is taken."""

    OPERATOR = "RMSNormalization of ONNX"
    PRIMITIVE = "Mul, ReduceMean, Add, Sqrt, Div, in float32"


class BlockForm(Enum):
    """How weights in blocks are multiplied."""

    NBITS = "MatMulNBits and GatherBlockQuantized"
    DEQUANTIZE = "DequantizeLinear before MatMul"


@dataclass(frozen=True, slots=True, kw_only=True)
class Capabilities:
    """One target.

    provider: the execution provider it is made for; None: any.
    opset, ir_version, min_onnxruntime: of the graph, and the lowest release that loads it.
    wheels_at: the release that the newest wheels with the provider are of, where they lag behind; None: they
        do not.
    operators: every operator that a graph may hold, as ``op`` or ``domain:op``.
    attention, rotary, norm: the forms of these parts.
    packed_qkv: attention takes query, key and value as one tensor. rotary_inside: and rotates them itself.
    fused_skip_norm, fused_silu: whether SkipSimplifiedLayerNormalization and QuickGelu have kernels.
    gelu: whether Gelu of ONNX has one.
    blocks: how weights in blocks are stored; None: not at all.
    linear_bits, table_bits: code widths of linear layers, and of the embedding with the output head.
    per_channel_int8: whether linear layers may multiply int8 with int8: weights with a scale for each output
        channel, inputs rounded per token.
    carries_blocks: whether the blocks of a GGUF file, or the codes of packed weights, can be kept;
        carried_bits: code widths of linear layers where they are.
    folds_constants: whether a session computes once what depends on constants alone, whatever its size.
    compute_types: of activations and KV cache; the first is the default. precision: the default one of the
        weights.
    fixed_shapes: one sequence, a past that is always full and two graphs, for prefill and decode. Otherwise
        any number of sequences and tokens.
    chunked_prefill: whether several tokens may follow a past that is not empty.
    experts: whether several feed-forward blocks of a layer can be one node.
    int8_cache: whether attention takes keys and values in int8 with a scale for each channel.
    checked_on: the execution providers on which graphs of this target have been compared with the reference.
    """

    provider: str | None
    opset: int
    ir_version: int
    min_onnxruntime: str
    wheels_at: str | None = None
    operators: frozenset[str]
    attention: AttentionForm
    packed_qkv: bool = False
    rotary_inside: bool = False
    rotary: RotaryForm
    norm: NormForm
    fused_skip_norm: bool = False
    fused_silu: bool = False
    gelu: bool = True
    blocks: BlockForm | None
    linear_bits: tuple[int, ...] = ()
    table_bits: tuple[int, ...] = ()
    per_channel_int8: bool = False
    carries_blocks: bool = False
    carried_bits: tuple[int, ...] = (4, 8)
    folds_constants: bool = False
    compute_types: tuple[ComputeType, ...]
    precision: Precision
    fixed_shapes: bool = False
    chunked_prefill: bool = True
    experts: bool = False
    int8_cache: bool = False
    checked_on: tuple[str, ...]


def _contrib(*names: str) -> frozenset[str]:
    return frozenset(f"{CONTRIB}:{name}" for name in names)


# Behind them what some families alone have: activations, soft limits, norms by mean and variance.
_PLAIN: Final = frozenset({"Add", "Cast", "Gather", "Gemm", "MatMul", "Mul", "Reshape", "Split"}) | {
    "Elu",
    "Greater",
    "LayerNormalization",
    "Min",
    "Relu",
    "Sub",
    "Tanh",
    "Where",
}
_GELU: Final = frozenset({"Gelu"})
_POSITIONS: Final = frozenset({"Range", "Shape", "Sub", "Unsqueeze"})
_GROUP_QUERY: Final = (
    _PLAIN
    | _GELU
    | _POSITIONS
    | _contrib("GroupQueryAttention", "MatMulNBits", "QuickGelu", "SkipSimplifiedLayerNormalization")
)
_STANDARD_HELPERS: Final = frozenset({"RMSNormalization", "RotaryEmbedding"})
_BLOCK_LOOKUP: Final = _contrib("GatherBlockQuantized") | {"Slice"}
_PRIMITIVE_NORM: Final = frozenset({"Div", "ReduceMean", "Sqrt"})
_GUEST_FRONT: Final = frozenset(
    {"Max", "Min", "ReduceSum"}
)  # of onnxruntime-genai's graph, for the CPU alone
_PER_CHANNEL_INT8: Final = _contrib("MatMulIntegerToFloat") | {
    "Abs",
    "Div",
    "Max",
    "QuantizeLinear",
    "ReduceMax",
    "Sum",
}
_FOLDED: Final = frozenset({"BitwiseOr", "Concat", "Transpose"})
_POOLING: Final = frozenset({"Less", "ReduceL2", "Where"})  # of graphs that embed texts
_EXPERTS: Final = _contrib("MoE", "QMoE") | {"Sigmoid", "Softmax"}
_CPU: Final = "CPUExecutionProvider"


def _group_query(**changes: object) -> Capabilities:
    """Return the row of the CPU's provider, with what differs on another one that has the same operators."""
    row: dict[str, object] = {
        "provider": _CPU,
        "opset": OPSET,
        "ir_version": IR_VERSION,
        "min_onnxruntime": MIN_ONNXRUNTIME,
        "operators": _GROUP_QUERY | _STANDARD_HELPERS | _BLOCK_LOOKUP,
        "attention": AttentionForm.GROUP_QUERY,
        "packed_qkv": True,
        "rotary_inside": True,
        "rotary": RotaryForm.STANDARD,
        "norm": NormForm.OPERATOR,
        "fused_skip_norm": True,
        "fused_silu": True,
        "blocks": BlockForm.NBITS,
        "linear_bits": (4, 8),
        "table_bits": (4, 8),
        "carries_blocks": True,
        "compute_types": ("float32", "float16", "bfloat16"),
        "precision": "int8",
        "checked_on": (_CPU,),
    }
    return Capabilities(**{**row, **changes})  # type: ignore[arg-type]  # the fields of Capabilities, by name


TARGETS: Final[Mapping[Target, Capabilities]] = {
    "cpu": _group_query(
        operators=_GROUP_QUERY
        | _STANDARD_HELPERS
        | _BLOCK_LOOKUP
        | _GUEST_FRONT
        | _PER_CHANNEL_INT8
        | _POOLING
        | _EXPERTS
        | _FOLDED,
        per_channel_int8=True,
        experts=True,
        int8_cache=True,
        carried_bits=(2, 4, 8),
        folds_constants=True,
    ),
    "cuda": _group_query(
        provider="CUDAExecutionProvider",
        carries_blocks=False,  # whose graphs compute in float32
        compute_types=("float16", "bfloat16"),
        checked_on=(_CPU, "CUDAExecutionProvider"),
    ),
    "directml": _group_query(
        provider="DmlExecutionProvider",
        wheels_at="1.24",
        # Its last release knows no operator of a later opset.
        opset=21,
        ir_version=10,
        operators=_GROUP_QUERY | _PRIMITIVE_NORM | _contrib("RotaryEmbedding"),
        packed_qkv=False,
        rotary_inside=False,
        rotary=RotaryForm.CONTRIB,
        norm=NormForm.PRIMITIVE,
        linear_bits=(4,),
        table_bits=(),
        carries_blocks=False,
        compute_types=("float16", "float32"),
        precision="fp16",
        chunked_prefill=False,
    ),
    "openvino": _group_query(
        provider="OpenVINOExecutionProvider",
        wheels_at="1.24",
        # It leaves RMSNormalization to the CPU, and then cuts some graphs into parts that wait for each
        # other.
        opset=21,
        ir_version=10,
        operators=_GROUP_QUERY | _PRIMITIVE_NORM | _BLOCK_LOOKUP | _contrib("RotaryEmbedding"),
        rotary=RotaryForm.CONTRIB,
        norm=NormForm.PRIMITIVE,
        compute_types=("float32", "float16"),
        checked_on=(_CPU, "OpenVINOExecutionProvider"),
    ),
    "webgpu": _group_query(provider="WebGpuExecutionProvider", compute_types=("float16", "float32")),
    "portable": Capabilities(
        provider=None,
        opset=24,  # the first with TensorScatter
        ir_version=12,
        min_onnxruntime="1.25",
        operators=_PLAIN
        | _POSITIONS
        | _STANDARD_HELPERS
        | _GELU
        | {
            "And",
            "Attention",
            "DequantizeLinear",
            "Greater",
            "LessOrEqual",
            "Sigmoid",
            "TensorScatter",
            "Transpose",
        },
        attention=AttentionForm.STANDARD,
        rotary=RotaryForm.STANDARD,
        norm=NormForm.OPERATOR,
        blocks=BlockForm.DEQUANTIZE,
        linear_bits=(4, 8),
        table_bits=(8,),  # Gather has no 4-bit type
        compute_types=("float32", "float16"),
        precision="int8",
        checked_on=(_CPU,),
    ),
    "coreml": Capabilities(
        provider="CoreMLExecutionProvider",
        opset=21,
        ir_version=10,
        min_onnxruntime=MIN_ONNXRUNTIME,
        operators=_PLAIN | _PRIMITIVE_NORM | {"Concat", "Erf", "Sigmoid", "Softmax", "Sub", "Transpose"},
        attention=AttentionForm.PRIMITIVE,
        rotary=RotaryForm.PRIMITIVE,
        norm=NormForm.PRIMITIVE,
        gelu=False,
        blocks=None,
        compute_types=("float16", "float32"),
        precision="fp16",
        fixed_shapes=True,
        checked_on=(_CPU,),
    ),
}
