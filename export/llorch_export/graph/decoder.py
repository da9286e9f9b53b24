"""The whole decoder: from token ids and the KV cache to logits of the rows that are asked for.

Of a graph that embeds texts the layers are the same, and what is around them is :mod:`.pooling`'s. Else,
inputs: ``input_ids`` [batch, tokens]; what the target's form of attention needs, ``seqlens_k`` [batch], each
row's total length minus one, and ``total_sequence_length``, the largest total length, in most;
``logits_indices`` [rows], positions in the flattened [batch * tokens]; and past keys and values. Outputs:
``logits`` [rows, vocabulary] and present keys and values. Another runtime's inputs: :mod:`.front`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import msgspec
import onnx_ir as ir

from llorch_export.calibration.measurements import Calibration
from llorch_export.checkpoint.base import LazyTensor
from llorch_export.formats.targets import (
    CONTRIB,
    TARGETS,
    Capabilities,
)
from llorch_export.graph.attention import attention_plan
from llorch_export.graph.builder import Dimensions, GraphBuilder
from llorch_export.graph.embedding import Table, embed, head, tied_table
from llorch_export.graph.front import Front, Interface, genai_logits, make_front, stage_front
from llorch_export.graph.half_precision import WeightCast
from llorch_export.graph.layers import Between, final_norm, handed_on, taken, through_layers
from llorch_export.graph.lowest_runtime import lag_notice, lowest_runtime
from llorch_export.graph.pooling import embedding_front, pooled
from llorch_export.graph.residual import scaled
from llorch_export.graph.weights import Part, WeightJob
from llorch_export.quantize.error_factor import ErrorFactors
from llorch_serve.artifact.manifest import EmbeddingForm, KvLayout, LlamaConfig, Recipe, Target, TensorSpec
from llorch_serve.errors import ArtifactError

NEW_NAME = "new.{layer}.{kind}"  # of the cache's outputs, where they hold the new tokens alone
PREFILL_TOKENS = 128  # of the prefill graph, where shapes are fixed


@dataclass(frozen=True, slots=True)
class DecoderGraph:
    """A graph whose weights are planned but not yet read.

    jobs: what to write to the data file, in order; data_bytes: its final size.
    weight_cast: what rounding to half precision has cost, once the jobs have run.
    notices: what a person should know of how weights are stored, a line each.
    min_onnxruntime: the lowest release that runs it.
    prefill: where shapes are fixed, the graph that takes ``prefill_tokens`` tokens over the same data file;
        inputs and outputs are those of ``model``, which takes one.
    """

    model: ir.Model
    jobs: tuple[WeightJob, ...]
    data_bytes: int
    kv: KvLayout
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    weight_cast: WeightCast
    notices: tuple[str, ...]
    min_onnxruntime: str
    prefill: ir.Model | None = None
    prefill_tokens: int | None = None


def build_decoder(
    config: LlamaConfig,
    recipe: Recipe,
    tensors: Mapping[str, LazyTensor],
    *,
    context_length: int,
    calibration: Calibration | None = None,
    interface: Interface = Interface.LLORCH,
    error_factors: ErrorFactors | None = None,
    target: Target = "cpu",
    int8_cache: bool = False,
    part: Part | None = None,
) -> DecoderGraph:
    """Build the graph in the forms that the target can run; reads no weight. The data file is the same for
    every ``interface``.

    calibration: what was measured on ``tensors``, where the recipe calls for it.
    error_factors: of the weights' inputs, which writing the weights of a ``gptq`` recipe asks for.
    interface: another one than llorch's is for attention in the form of ``GroupQuery``, as is ``int8_cache``,
        a KV cache in int8, whose scales are in a file of their own.
    part: the layers of one stage, which has the embedding if they begin with the first, and norm and head if
        they end with the last; and the plan of another data file than the usual one. None: all layers, and
        that file. For targets without fixed shapes.

    Raises ArtifactError if the runtime's kernels cannot run the shapes.
    """
    capabilities = TARGETS[target]
    _check_shapes(config)

    def build(dims: Dimensions) -> DecoderGraph:
        b = GraphBuilder(
            config,
            recipe,
            tensors,
            calibration,
            error_factors,
            target=capabilities,
            dims=dims,
            part=part,
        )
        return _build(b, interface, context_length=context_length, int8_cache=int8_cache)

    if not capabilities.fixed_shapes:
        return build(Dimensions())
    assert part is None, "graphs of fixed shapes are not cut"
    tokens = min(PREFILL_TOKENS, context_length)
    step, prefill = (
        build(Dimensions(batch=1, tokens=count, rows=1, slots=1, capacity=context_length))
        for count in (1, tokens)
    )
    assert [job.tensors for job in step.jobs] == [job.tensors for job in prefill.jobs], (
        "one data file serves both"
    )
    return replace(step, prefill=prefill.model, prefill_tokens=tokens)


def _build(b: GraphBuilder, interface: Interface, *, context_length: int, int8_cache: bool) -> DecoderGraph:
    kv = _kv_layout(b, int8_cache=int8_cache)
    if b.target.fixed_shapes:
        kv = msgspec.structs.replace(kv, present_name=NEW_NAME)
    before = taken(b) if b.layers.start else None
    front = make_front(b, interface) if before is None else stage_front(b, before.residual, before.delta)
    plan = attention_plan(b, kv, front, context_length=context_length)
    state, table = _embedded(b, front) if before is None else (before, None)
    state = through_layers(b, state, plan, front.logits_indices)
    given = handed_on(b, state) if b.hands_on else [_logits(b, state, table, interface)]
    past = (value for cache in plan.caches for value in cache.past)
    inputs = [*front.leading, *plan.inputs, *front.trailing, *past]
    outputs = [*given, *(v for cache in plan.caches for v in cache.present)]
    return _graph(b, kv, inputs, outputs)


def _embedded(b: GraphBuilder, front: Front) -> tuple[Between, Table | None]:
    """Append the embedding; return what the first layer takes, and the table, for a tied head."""
    assert front.input_ids is not None, "a graph with the first layer takes them"
    hidden, table = embed(b, front.input_ids)
    return Between(scaled(b, hidden, b.config.embedding_multiplier, "embedding/scaled")), table


def _logits(b: GraphBuilder, state: Between, table: Table | None, interface: Interface) -> ir.Value:
    """Append final norm and head over the rows that are wanted.

    table: the embedding's, if the graph has it.
    """
    rows = final_norm(b, state, lead=(b.dims.rows,))
    # Scaling the rows before the head is linear in the logits, and much narrower than they are.
    rows = scaled(b, rows, 1 / b.config.logits_scaling, "model.norm/scaled")
    logits = head(b, rows, table if b.layers.start == 0 else tied_table(b))
    return genai_logits(b, logits) if interface is Interface.GENAI else logits


def plan_table(
    config: LlamaConfig,
    recipe: Recipe,
    tensors: Mapping[str, LazyTensor],
    *,
    calibration: Calibration | None = None,
    error_factors: ErrorFactors | None = None,
    target: Target = "cpu",
    part: Part,
) -> WeightCast:
    """Plan the table that lookup and head share, if there is one, in the data file of ``part``; what it costs
    is known once its jobs have run.
    """
    b = GraphBuilder(config, recipe, tensors, calibration, error_factors, target=TARGETS[target], part=part)
    tied_table(b)
    return b.weight_cast


def build_embedder(
    config: LlamaConfig,
    recipe: Recipe,
    tensors: Mapping[str, LazyTensor],
    form: EmbeddingForm,
    *,
    context_length: int,
    calibration: Calibration | None = None,
    error_factors: ErrorFactors | None = None,
) -> DecoderGraph:
    """Build the graph that gives a vector for each text, for the CPU; reads no weight. The rest is as in
    :func:`build_decoder`.

    tensors: where the recipe rotates, their head is what the rotation makes of the identity.
    """
    _check_shapes(config)
    dims = Dimensions(rows="batch")
    b = GraphBuilder(config, recipe, tensors, calibration, error_factors, dims=dims)
    kv, front = _kv_layout(b), embedding_front(b, form)
    plan = attention_plan(b, kv, front, context_length=context_length)
    state = through_layers(b, _embedded(b, front)[0], plan, front.logits_indices)
    normed = final_norm(b, state, lead=b.dims.lead if front.logits_indices is None else (b.dims.rows,))
    return _graph(b, kv, front.leading, [pooled(b, normed, front, form)])


def _kv_layout(b: GraphBuilder, *, int8_cache: bool = False) -> KvLayout:
    return KvLayout(
        layers=len(b.layers),
        kv_heads=b.config.num_key_value_heads,
        head_dim=b.config.head_dim,
        dtype="int8" if int8_cache else b.recipe.compute_type,
    )


def _graph(
    b: GraphBuilder, kv: KvLayout, inputs: Sequence[ir.Value], outputs: Sequence[ir.Value]
) -> DecoderGraph:
    """Return what has been appended so far as a graph with these inputs and outputs."""
    graph = ir.Graph(
        inputs,
        outputs,
        nodes=b.tape.nodes,
        initializers=[*b.weights.values, *b.tape.initializers],
        opset_imports={"": b.target.opset, **({CONTRIB: 1} if _uses_contrib(b.target) else {})},
        name="decoder",
    )
    lowest = lowest_runtime(graph, b.target)
    if (lag := lag_notice(lowest, b.target, b.recipe.precision)) is not None:
        b.notices[lag] = None
    return DecoderGraph(
        model=ir.Model(graph, ir_version=b.target.ir_version, producer_name="llorch"),
        jobs=tuple(b.weights.jobs),
        data_bytes=b.weights.total_bytes,
        kv=kv,
        inputs=tuple(_spec(value) for value in inputs),
        outputs=tuple(_spec(value) for value in outputs),
        weight_cast=b.weight_cast,
        notices=tuple(b.notices),
        min_onnxruntime=lowest,
    )


def _uses_contrib(target: Capabilities) -> bool:
    return any(name.startswith(f"{CONTRIB}:") for name in target.operators)


def _check_shapes(config: LlamaConfig) -> None:
    if config.head_dim % 8:
        raise ArtifactError(
            f"head_dim is {config.head_dim}; the runtime's attention takes heads whose size is a multiple "
            f"of 8, "
            "so this model cannot be exported"
        )


_DTYPES = {
    ir.DataType.FLOAT: "float32",
    ir.DataType.FLOAT16: "float16",
    ir.DataType.BFLOAT16: "bfloat16",
    ir.DataType.INT32: "int32",
    ir.DataType.INT64: "int64",
    ir.DataType.INT8: "int8",
}


def _spec(value: ir.Value) -> TensorSpec:
    assert value.name is not None
    assert value.shape is not None
    assert value.dtype is not None
    shape = tuple(d if isinstance(d, int) else str(d.value) for d in value.shape)
    return TensorSpec(name=value.name, dtype=_DTYPES[value.dtype], shape=shape)  # type: ignore[arg-type]  # a table of literals
