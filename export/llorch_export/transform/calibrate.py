"""Measuring on a text: the checkpoint's own fp32 decoder, run on the CPU, with sums and maxima as its only
outputs.

Input are a checkpoint's tensors and token ids; output is a :class:`Calibration`. The decoder is built as an
export builds it, in a temporary folder, and every linear layer's input gets two more nodes: the sum of
squares and the largest magnitude of each channel. So no activation leaves the runtime; memory holds those of
one chunk of ``WINDOW`` tokens in one layer and the chunk's keys and values. The weights lie on disk, 4 bytes
each, and are mapped; the runtime makes no second, packed copy of them.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from llorch_export.artifact.write import ArtifactWriter
from llorch_export.calibration.measurements import Calibration, ChannelStatistics
from llorch_export.checkpoint.base import LazyTensor
from llorch_export.formats.targets import MIN_ONNXRUNTIME
from llorch_export.graph.builder import FLOAT
from llorch_export.graph.decoder import DecoderGraph, build_decoder
from llorch_export.graph.embedding import UNCAPPED_LOGITS
from llorch_export.graph.weights import DATA_FILE
from llorch_serve.artifact.manifest import LlamaConfig, Recipe
from llorch_serve.errors import ArtifactError, ProviderError
from llorch_serve.providers import CPU, import_runtime, usable_cpus

WINDOW: Final = 512
"""Tokens that are run together, each window from position 0."""

FP32: Final = Recipe(
    precision="fp32", head_precision="fp32", block_size=None, accuracy_level=None, kl_limit=0.0
)
LINEAR: Final = ("MatMul", "Gemm")
_PACKED: Final = {"qkv_proj": ("q_proj", "k_proj", "v_proj")}

Run = Callable[[Sequence[int]], Mapping[str, npt.NDArray[np.float32]]]


@dataclass(frozen=True, slots=True)
class _Probe:
    """The outputs that describe one linear layer's input, and the weights that it is multiplied with."""

    squares: str
    absmax: str
    weights: tuple[str, ...]


def calibrate(
    config: LlamaConfig,
    tensors: Mapping[str, LazyTensor],
    ids: Sequence[int],
    progress: Callable[[str, int, int], None],
) -> Calibration:
    """Run the model over ``ids`` and return what went through it.

    Raises ResourceError if the temporary folder has no room for the weights in fp32, ProviderError if the
    runtime refuses the graph, ArtifactError if a value is not finite.
    """
    window = min(WINDOW, config.max_exact_context)
    graph = build_decoder(config, FP32, tensors, context_length=window)
    probes = _add_probes(graph, config)
    with (
        tempfile.TemporaryDirectory(prefix="llorch-calibration-") as folder,
        ArtifactWriter(Path(folder) / "decoder", force=False) as writer,
    ):
        writer.require_space(graph.data_bytes)
        writer.add_weights(
            DATA_FILE, graph.jobs, lambda n: progress("preparing calibration", n, graph.data_bytes)
        )
        run = open_probed(graph, writer.folder)
        return _measure(run, config, probes, windows(ids, window, progress))


def windows(
    ids: Sequence[int], window: int, progress: Callable[[str, int, int], None]
) -> Iterator[Sequence[int]]:
    """Give the text in pieces of ``window`` tokens, and report each once it has been run."""
    for start in range(0, len(ids), window):
        piece = ids[start : start + window]
        yield piece
        progress("calibrating", len(piece), len(ids))


def _add_probes(graph: DecoderGraph, config: LlamaConfig) -> tuple[_Probe, ...]:
    """Add sums and maxima of every linear layer's input as outputs, and take out the logits, which nobody
    wants.
    """
    model = graph.model.graph
    probes: dict[str, _Probe] = {}
    for node in list(model):
        if node.op_type not in LINEAR:
            continue
        value, weights = node.inputs[0], weights_read_by(node, config)
        assert value is not None
        assert value.name is not None
        known = probes.get(value.name)
        if known is None:
            squares, absmax = _reductions(model, value)
            known = _Probe(squares, absmax, ())
        probes[value.name] = _Probe(known.squares, known.absmax, known.weights + weights)
    (logits,) = (output for output in model.outputs if output.name == "logits")
    model.outputs.remove(logits)
    _remove_head(model, logits)
    return tuple(probes.values())


def _remove_head(model: ir.Graph, logits: ir.Value) -> None:
    """Take out the output layer, and what is done to its product."""
    value: ir.Value | None = logits
    node = None
    while node is None or node.op_type not in LINEAR:
        assert value is not None
        node = value.producer()
        assert node is not None
        value = node.inputs[0]
        model.remove(node, safe=True)


def weights_read_by(node: ir.Node, config: LlamaConfig) -> tuple[str, ...]:
    """Return the checkpoint's names of the weights that a linear node multiplies with, which the graph's
    names say.
    """
    name = node.outputs[0].name
    assert name is not None
    if name.removesuffix("/product") in ("logits", UNCAPPED_LOGITS):
        return ("model.embed_tokens.weight" if config.tie_word_embeddings else "lm_head.weight",)
    parent, _, module = name.removesuffix("/product").rpartition(".")
    return tuple(f"{parent}.{part}.weight" for part in _PACKED.get(module, (module,)))


def _reductions(model: ir.Graph, value: ir.Value) -> tuple[str, str]:
    """Append the sum of squares and the largest magnitude of each channel of ``value`` [..., channels]."""
    assert value.shape is not None
    axes_name = f"{value.name}/leading"
    axes = ir.Value(
        name=axes_name, const_value=ir.tensor(np.arange(len(value.shape) - 1, dtype=np.int64), name=axes_name)
    )
    axes.type, axes.shape = ir.TensorType(ir.DataType.INT64), ir.Shape([len(value.shape) - 1])
    model.register_initializer(axes)
    magnitude = _append(model, "Abs", [value], f"{value.name}/magnitude", value.shape)
    channels = ir.Shape([value.shape[-1]])
    found = []
    for op, source, name in (("ReduceSumSquare", value, "squares"), ("ReduceMax", magnitude, "absmax")):
        found.append(_append(model, op, [source, axes], f"{value.name}/{name}", channels, keepdims=0))
    model.outputs.extend(found)
    return found[0].name or "", found[1].name or ""


def _append(
    model: ir.Graph, op: str, inputs: Sequence[ir.Value], name: str, shape: ir.Shape, **attributes: int
) -> ir.Value:
    output = ir.Value(name=name, type=ir.TensorType(FLOAT), shape=shape)
    model.append(ir.node(op, inputs, attributes, outputs=[output], name=f"{name}/{op}"))
    return output


def open_probed(graph: DecoderGraph, folder: Path) -> Run:
    """Load the graph over the data file in ``folder``; the weights are mapped, and not packed anew."""
    runtime = import_runtime(MIN_ONNXRUNTIME)
    options = runtime.SessionOptions()
    options.intra_op_num_threads = usable_cpus()
    options.log_severity_level = 3
    options.add_session_config_entry("session.model_external_initializers_file_folder_path", str(folder))
    options.add_session_config_entry("session.disable_prepacking", "1")
    proto = ir.to_proto(graph.model).SerializeToString()
    try:
        session: Any = runtime.InferenceSession(proto, options, providers=[CPU])
    except Exception as error:
        raise ProviderError(
            f"the runtime does not take the calibration graph: {' '.join(str(error).split())[:300]}"
        ) from error
    names = [output.name for output in session.get_outputs()]
    inputs = {node.name for node in session.get_inputs()}
    empty = np.zeros((1, graph.kv.kv_heads, 0, graph.kv.head_dim), np.float32)

    def run(ids: Sequence[int]) -> Mapping[str, npt.NDArray[np.float32]]:
        count = len(ids)
        feeds = {
            "input_ids": np.array([ids], np.int64),
            "seqlens_k": np.array([count - 1], np.int32),
            "total_sequence_length": np.array(count, np.int32),
            "logits_indices": np.arange(count, dtype=np.int64),
        }
        feeds |= dict.fromkeys(inputs - feeds.keys(), empty)
        try:
            return dict(zip(names, session.run(names, feeds), strict=True))
        except Exception as error:
            raise ProviderError(
                f"the runtime does not run the calibration graph: {' '.join(str(error).split())[:300]}"
            ) from error

    return run


def _measure(
    run: Run, config: LlamaConfig, probes: Sequence[_Probe], windows: Iterator[Sequence[int]]
) -> Calibration:
    layers, heads, size = config.num_hidden_layers, config.num_key_value_heads, config.head_dim
    squares: dict[str, npt.NDArray[np.float64]] = {}
    absmax: dict[str, npt.NDArray[np.float32]] = {}
    key_norm = np.zeros((layers, heads, size), np.float32)
    value_absmax = np.zeros((layers, heads), np.float32)
    tokens = 0
    for ids in windows:
        found = run(ids)
        tokens += len(ids)
        for probe in probes:
            squares[probe.squares] = squares.get(probe.squares, 0.0) + found[probe.squares].astype(np.float64)
            absmax[probe.absmax] = np.maximum(absmax.get(probe.absmax, np.float32(0)), found[probe.absmax])
        for layer in range(layers):
            keys, values = found[f"present.{layer}.key"][0], found[f"present.{layer}.value"][0]
            norms = key_norms(keys, config.rotary_dim if config.rotates(layer) else 0).max(axis=1)
            np.maximum(key_norm[layer], norms, out=key_norm[layer])
            np.maximum(value_absmax[layer], np.abs(values).max(axis=(1, 2)), out=value_absmax[layer])
    result = Calibration(
        inputs={
            weight: ChannelStatistics(squares[probe.squares] / tokens, absmax[probe.absmax])
            for probe in probes
            for weight in probe.weights
        },
        key_norm=key_norm,
        value_absmax=value_absmax,
    )
    _check_finite(result)
    return result


def key_norms(keys: npt.NDArray[np.float32], rotary_dim: int) -> npt.NDArray[np.float32]:
    """Return for keys [..., head_dim] the norm of each element's rotary pair; of an element beyond them its
    magnitude.
    """
    half = rotary_dim // 2
    pairs = np.hypot(keys[..., :half], keys[..., half:rotary_dim])
    return np.concatenate([pairs, pairs, np.abs(keys[..., rotary_dim:])], axis=-1)


def _check_finite(found: Calibration) -> None:
    """Raise ArtifactError if a figure is NaN or infinite, which no scale can be made from."""
    figures: dict[str, npt.NDArray[np.floating[Any]]] = {
        name: statistics.mean_square for name, statistics in found.inputs.items()
    }
    figures |= {"the keys": found.key_norm, "the values": found.value_absmax}
    for name, array in figures.items():
        if not np.isfinite(array).all():
            raise ArtifactError(
                f"calibration: what goes through {name} is not finite in fp32; is the checkpoint damaged?"
            )
