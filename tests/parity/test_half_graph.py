"""Half-precision graphs against float32 forwards on the same rounded weights: numpy's, and transformers'."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import onnx
import onnxruntime
import pytest

from llorch_serve.artifact.folder import Artifact
from llorch_serve.fidelity.divergence import DivergenceSum
from llorch_serve.providers import CPU
from support.builders.checkpoints import tiny_config, tiny_llama_config, tiny_weights, write_hf_folder
from support.builders.tiny_exports import export_tiny, open_tiny, random_ids
from support.oracles import numpy_llama
from support.oracles.half_precision import as_bfloat16, as_float16, rounded, stored
from tolerances import FP16_LOGITS, FP32_LOGITS, KL_FP16, KL_LEVEL_4_INT8

Array = npt.NDArray[np.float32]
TOKENS = 128
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "tied": {"tie_word_embeddings": True},
    "biases": {"attention_bias": True, "mlp_bias": True},
    "one kv head": {"num_key_value_heads": 1},
    "rotated outside attention": {"head_dim": 24},
    "llama3": {
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        }
    },
}


def numpy_logits(overrides: dict[str, Any], round_: Any, ids: list[int]) -> Array:
    weights = tiny_weights(tiny_llama_config(**overrides))
    rounded(round_)(weights)
    return numpy_llama.forward(tiny_config(**overrides), weights, ids).astype(np.float32)


def kl(expected: Array, found: Array) -> float:
    total = DivergenceSum()
    total.add(expected, found)
    return total.result().kl


@pytest.mark.parametrize("variant", VARIANTS)
def test_fp16_is_the_forward_on_rounded_weights(tmp_path: Path, variant: str) -> None:
    overrides, ids = VARIANTS[variant], random_ids(TOKENS)
    source = write_hf_folder(tmp_path / "source", overrides)
    artifact = export_tiny(source, tmp_path / "out", precision="fp16")
    assert artifact.manifest.kv.dtype == "float16"
    found = open_tiny(artifact).prefill(0, ids, 0, range(TOKENS))
    assert found.dtype == np.float32
    expected = numpy_logits(overrides, as_float16, ids)
    np.testing.assert_allclose(found, expected, atol=FP16_LOGITS, rtol=0)
    assert kl(expected, found) < KL_FP16


@pytest.mark.reference
def test_fp16_is_what_transformers_computes_in_float32_on_the_rounded_weights(tmp_path: Path) -> None:
    import torch
    import transformers

    ids = random_ids(TOKENS)
    source = write_hf_folder(tmp_path / "source")
    same = write_hf_folder(tmp_path / "rounded", edit=rounded(as_float16))
    found = open_tiny(export_tiny(source, tmp_path / "out", precision="fp16")).prefill(
        0, ids, 0, range(TOKENS)
    )
    model = transformers.LlamaForCausalLM.from_pretrained(same, dtype=torch.float32, local_files_only=True)
    with torch.inference_mode():
        expected = model.eval()(torch.tensor([ids])).logits[0].numpy()
    np.testing.assert_allclose(found, expected, atol=FP16_LOGITS, rtol=0)
    assert kl(expected, found) < KL_FP16


def test_the_float16_cache_serves_chunks_and_slots_of_different_length(tmp_path: Path) -> None:
    source = write_hf_folder(tmp_path / "source")
    artifact = export_tiny(source, tmp_path / "out", precision="fp16")
    ids, session = random_ids(60), open_tiny(artifact)
    assert (
        session.capacity.bytes_per_token == 2 * 2 * 2 * 16 * 2
    )  # keys and values, layers, heads, head_dim, bytes
    expected = numpy_logits({}, as_float16, ids)
    for start in range(0, 20, 8):  # slot 1 is five tokens behind
        session.prefill(0, ids[start : min(start + 8, 20)], start)
    session.prefill(1, ids[:15], 0)
    for position in range(20, len(ids)):
        found = session.decode([ids[position], ids[position - 5]], [position + 1, position - 4])
        np.testing.assert_allclose(found, expected[[position, position - 5]], atol=FP16_LOGITS, rtol=0)


@pytest.mark.parametrize("precision", ["int8", "int4"])
def test_blocks_in_a_float16_graph_diverge_as_in_a_float32_one(tmp_path: Path, precision: str) -> None:
    source, ids = write_hf_folder(tmp_path / "source"), random_ids(TOKENS)
    found = {}
    for kind in ("float16", "float32"):
        options = {
            "precision": precision,
            "compute_type": kind,
            **({"scale_type": "float32"} if kind == "float32" else {}),
        }
        session = open_tiny(export_tiny(source, tmp_path / kind, **options))
        found[kind] = session.prefill(0, ids, 0, range(TOKENS)).copy()
    assert kl(found["float32"], found["float16"]) < KL_LEVEL_4_INT8


@pytest.mark.parametrize(
    ("precision", "overrides"),
    [
        ("bf16", {}),
        ("bf16", {"tie_word_embeddings": True, "attention_bias": True}),
        ("bf16", {"head_dim": 24}),
    ],
    ids=["plain", "tied and biased", "rotated outside attention"],
)
def test_a_bf16_graph_with_its_types_widened_is_the_forward_on_rounded_weights(
    tmp_path: Path, precision: str, overrides: dict[str, Any]
) -> None:
    """The CPU has no bfloat16, so the graph runs as its float32 twin: the same nodes over the weights that
    are stored.
    """
    source, ids = write_hf_folder(tmp_path / "source", overrides), random_ids(40)
    artifact = export_tiny(source, tmp_path / "out", precision=precision)
    assert artifact.manifest.kv.dtype == "bfloat16"
    expected = numpy_logits(overrides, as_bfloat16, ids)
    # The rotary tables are rounded too, which the forward does not do.
    np.testing.assert_allclose(widened_logits(artifact, ids), expected, atol=10 * FP16_LOGITS, rtol=0)
    exact = widened_logits(artifact, ids, tables=True)
    np.testing.assert_allclose(exact, expected, atol=FP32_LOGITS, rtol=0)


def widened_logits(artifact: Artifact, ids: list[int], *, tables: bool = False) -> Array:
    """Run a bfloat16 graph as a float32 one. tables: with rotary tables that have not been rounded."""
    from llorch_export.graph.rope import rotary_tables

    narrow, wide = onnx.TensorProto.BFLOAT16, onnx.TensorProto.FLOAT
    model = onnx.load(artifact.graph_path, load_external_data=False)
    graph, config = model.graph, artifact.manifest.model
    fresh = dict(
        zip(
            ("rotary.cos", "rotary.sin"),
            rotary_tables(config.rope, config.head_dim, artifact.manifest.context_length),
            strict=True,
        )
    )
    for index, tensor in enumerate(graph.initializer):
        if tensor.data_type != narrow:
            continue
        assert tensor.external_data, f"{tensor.name} is no weight"
        values = np.frombuffer(stored(artifact.folder, tensor.name)[1], ml_dtypes.bfloat16)
        array = values.astype(np.float32).reshape(tuple(tensor.dims))
        if tables and tensor.name in fresh:
            array = fresh[tensor.name]
        graph.initializer[index].CopyFrom(onnx.numpy_helper.from_array(array, tensor.name))
    for value in (*graph.input, *graph.output, *graph.value_info):
        if value.type.tensor_type.elem_type == narrow:
            value.type.tensor_type.elem_type = wide
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=[CPU])
    kv = artifact.manifest.kv
    feeds: dict[str, npt.NDArray[np.generic]] = {
        "input_ids": np.array([ids]),
        "seqlens_k": np.array([len(ids) - 1], np.int32),
        "total_sequence_length": np.array(len(ids), np.int32),
        "logits_indices": np.arange(len(ids)),
    }
    for node in session.get_inputs():
        feeds.setdefault(node.name, np.zeros((1, kv.kv_heads, 0, kv.head_dim), np.float32))
    logits: Array = session.run(["logits"], feeds)[0]
    return logits
