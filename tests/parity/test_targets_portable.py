"""The portable graph: codes mean what they say, half precision is near, and slots of a batch do not disturb
each other.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import onnx
import onnxruntime
import pytest

from llorch_export.formats.module import Formats
from llorch_export.formats.precisions import BITS
from llorch_export.graph import dequantize
from llorch_export.graph.blocks import quantised
from llorch_export.options import Rule
from llorch_serve.artifact.folder import Artifact
from llorch_serve.artifact.manifest import Recipe
from llorch_serve.errors import ArtifactError, UsageError
from llorch_serve.fidelity.divergence import DivergenceSum
from llorch_serve.providers import ActiveProvider
from support.builders.checkpoints import (
    Weights,
    tiny_config,
    tiny_llama_config,
    tiny_weights,
    write_hf_folder,
)
from support.builders.tiny_exports import (
    Logits,
    all_logits,
    export_tiny,
    open_fixed_tiny,
    open_tiny,
    random_ids,
)
from support.oracles import numpy_llama
from support.oracles.quantised_numpy import dequantise
from tolerances import KL_HALF_TARGETS, KL_LEVEL_4_INT8, QUANTISED_LOGITS_LEVEL_0, STEPWISE_LOGITS

IDS = random_ids(60)
MODELS: dict[str, dict[str, Any]] = {
    "plain": {},
    "tied, biases": {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True},
    # 72 and 88 are no multiples of 32 or 64: the last block of a column is short; 9 blocks of zero points is
    # odd
    "short last blocks": {"hidden_size": 72, "intermediate_size": 88, "head_dim": 16},
}
RECIPES: dict[str, dict[str, Any]] = {
    "int8": {"precision": "int8"},
    "int8, head fp32": {"precision": "int8", "head_precision": "fp32"},
    "int8, bfloat16 scales": {"precision": "int8", "scale_type": "bfloat16", "fine_block_size": 16},
    "int4": {"precision": "int4", "quantizer": "affine"},
    "int4, three formats of q, k and v": {
        "precision": "int4",
        "quantizer": "affine",
        "rules": (Rule(("*.q_proj",), precision="int8"), Rule(("*.v_proj",), precision="fp32")),
    },
    "int4, no zero points": {"precision": "int4", "quantizer": "nearest", "block_size": 32},
}


def as_written(artifact: Artifact, token_ids: list[int]) -> Logits:
    """Return all logits of a whole prompt with every node computed as it stands in the file."""
    manifest, count = artifact.manifest, len(token_ids)
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(
        str(artifact.graph_path), options, providers=["CPUExecutionProvider"]
    )
    past = np.zeros((1, manifest.kv.kv_heads, count + 3, manifest.kv.head_dim), np.float32)
    feeds: dict[str, npt.NDArray[np.generic]] = {spec.name: past for spec in manifest.inputs}
    feeds |= {
        "input_ids": np.array([token_ids]),
        "seqlens_k": np.array([count - 1], np.int32),
        "logits_indices": np.arange(count),
    }
    logits: Logits = session.run(["logits"], feeds)[0]
    return logits


def quantised_weights(overrides: dict[str, Any], recipe: Recipe) -> Weights:
    """Return the weights as the recipe leaves them, from the quantiser's own blocks, dequantised by
    definition.
    """
    weights = tiny_weights(tiny_llama_config(**overrides))
    for name, value in weights.items():
        form = Formats(recipe).of(name.removesuffix(".weight"))
        if value.ndim == 2 and form.precision in BITS:
            blocks = quantised(value, form)
            weights[name] = dequantise(blocks, bits=BITS[form.precision], columns=value.shape[1])
    return weights


def kl(reference: npt.NDArray[Any], model: npt.NDArray[Any]) -> float:
    total = DivergenceSum()
    total.add(reference.astype(np.float32), model.astype(np.float32))
    return total.result().kl


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("recipe", RECIPES)
def test_quantised_graphs_equal_the_model_on_dequantised_weights(
    tmp_path: Path, name: str, recipe: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dequantize, "_BAND_ELEMENTS", 64 * 100)  # several bands a matrix
    source = write_hf_folder(tmp_path / "model", MODELS[name])
    artifact = export_tiny(source, tmp_path / "out", target="portable", **RECIPES[recipe])
    weights = quantised_weights(MODELS[name], artifact.manifest.recipe)
    expected = numpy_llama.forward(tiny_config(**MODELS[name]), weights, IDS)
    np.testing.assert_allclose(as_written(artifact, IDS), expected, atol=QUANTISED_LOGITS_LEVEL_0, rtol=0)
    # As the runtime fuses it, activations are rounded to int8.
    assert kl(expected, all_logits(artifact, IDS)) < KL_LEVEL_4_INT8


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("precision", ["int4", "int8"])
def test_columns_that_make_up_for_others_do_so_in_every_band(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, precision: str, tied: bool
) -> None:
    """Codes of ``gptq`` depend on all columns before them, so bands must not begin anew."""
    source = write_hf_folder(tmp_path / "model", {"tie_word_embeddings": tied})
    text = tmp_path / "text.txt"
    text.write_text("Paris is the capital of France, and Rome of Italy. " * 40)
    options: dict[str, Any] = {"precision": precision, "quantizer": "gptq", "calibration": text}
    blocks = export_tiny(source, tmp_path / "cpu", accuracy_level=0, **options)
    monkeypatch.setattr(dequantize, "_BAND_ELEMENTS", 64 * 100)
    portable = export_tiny(source, tmp_path / "portable", target="portable", **options)
    np.testing.assert_allclose(
        as_written(portable, IDS), all_logits(blocks, IDS), atol=QUANTISED_LOGITS_LEVEL_0, rtol=0
    )


@pytest.mark.parametrize("precision", ["int8", "int4"])
def test_the_runtime_multiplies_the_blocks_as_blocks(tmp_path: Path, precision: str) -> None:
    """Else each step would unpack every weight: a hundred times slower."""
    artifact = export_tiny(
        write_hf_folder(tmp_path / "model"), tmp_path / "out", target="portable", precision=precision
    )
    options = onnxruntime.SessionOptions()
    options.optimized_model_filepath = str(tmp_path / "optimised.onnx")
    options.log_severity_level = 3
    onnxruntime.InferenceSession(str(artifact.graph_path), options, providers=["CPUExecutionProvider"])
    graph = onnx.load(tmp_path / "optimised.onnx", load_external_data=False).graph
    kinds = [node.op_type for node in graph.node]
    # All but the last layer's two products that are added to the residual: of two dimensions, they become
    # Gemm first.
    assert kinds.count("MatMulNBits") == 2 * 5 + 1 - 2
    assert kinds.count("Gemm") == 2
    assert "MatMul" not in kinds


def test_slots_of_a_batch_decode_as_each_does_alone(tmp_path: Path) -> None:
    artifact = export_tiny(write_hf_folder(tmp_path / "model"), tmp_path / "out", target="portable")
    prompts = [IDS[:1], IDS[:40], IDS[5:12], IDS[20:53]]
    together, alone = open_tiny(artifact, slots=4), open_tiny(artifact, slots=1)
    for slot, prompt in enumerate(prompts):
        together.prefill(slot, prompt, 0)
    for step in range(1, 9):
        lengths = [len(prompt) + step for prompt in prompts]
        rows = together.decode([step] * 4, lengths).copy()
        for prompt, row in zip(prompts, rows, strict=True):
            alone.prefill(0, [*prompt, *range(1, step)], 0)
            expected = alone.decode([step], [len(prompt) + step])[0]
            np.testing.assert_allclose(row, expected, atol=STEPWISE_LOGITS, rtol=0)


def test_what_lies_in_the_cache_behind_a_sequence_does_not_show(tmp_path: Path) -> None:
    session = open_tiny(export_tiny(write_hf_folder(tmp_path / "model"), tmp_path / "out", target="portable"))
    fresh = session.prefill(0, IDS[:9], 0).copy()
    session.prefill(0, IDS, 0)
    np.testing.assert_array_equal(session.prefill(0, IDS[:9], 0), fresh)
    session.prefill(1, IDS[:9], 0)
    session.copy_slot(0, 1, 9)
    np.testing.assert_array_equal(*session.decode([7, 7], [10, 10]))


@pytest.mark.parametrize("target", ["portable", "directml", "openvino"])
def test_half_precision_is_near_the_reference(tmp_path: Path, target: str) -> None:
    source = write_hf_folder(tmp_path / "model")
    expected = numpy_llama.forward(tiny_config(), tiny_weights(tiny_llama_config()), IDS)
    artifact = export_tiny(source, tmp_path / "out", target=target, precision="fp16")
    assert artifact.manifest.kv.dtype == "float16"
    assert 0 < kl(expected, all_logits(artifact, IDS)) < KL_HALF_TARGETS


def test_fixed_shapes_in_half_precision_are_near_the_reference(tmp_path: Path) -> None:
    source = write_hf_folder(tmp_path / "model")
    expected = numpy_llama.forward(tiny_config(), tiny_weights(tiny_llama_config()), IDS)
    session = open_fixed_tiny(export_tiny(source, tmp_path / "out", target="coreml", precision="fp16"))
    rows = np.concatenate([session.prefill(0, IDS[:20], 0), session.verify(0, IDS[20:], 20)])
    assert 0 < kl(expected[19:], rows) < KL_HALF_TARGETS


@pytest.fixture(scope="module")
def fixed(tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    folder = tmp_path_factory.mktemp("fixed")
    return export_tiny(write_hf_folder(folder / "model"), folder / "out", target="coreml", max_context=48)


def test_fixed_shapes_slots_hold_sequences_of_their_own(fixed: Artifact) -> None:
    """Prompts longer than a call takes, one after a longer one in the same slot, copied, swapped and advanced
    together.
    """
    expected = numpy_llama.forward(tiny_config(), tiny_weights(tiny_llama_config()), IDS[:48])
    session = open_fixed_tiny(fixed, slots=3)
    assert fixed.manifest.fixed_shapes is not None
    session.prefill(0, IDS[40:] + IDS[:27], 0)  # which must not show in what follows
    for slot, length in ((0, 9), (1, 47)):
        near(session.prefill(slot, IDS[:length], 0), expected[length - 1 : length])
    session.copy_slot(1, 2, 30)
    session.swap_slots(0, 1, 47)
    session.release_slot(0, 47)
    near(session.decode([IDS[47], IDS[9], IDS[30]], [48, 10, 31]), expected[[47, 9, 30]])
    assert session.prefill(1, IDS[10:12], 10, ()).shape == (0, 512)
    near(session.prefill(1, IDS[12:14], 12, (0, 1)), expected[12:14])


def test_a_session_of_fixed_shapes_tells_the_providers_device(
    fixed: Artifact, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ActiveProvider, "device", "coreml:7")
    assert open_fixed_tiny(fixed).placement.device == "coreml:7"


def near(found: Logits, expected: Logits) -> None:
    np.testing.assert_allclose(found, expected, atol=STEPWISE_LOGITS, rtol=0)


@pytest.mark.parametrize(
    ("flag", "options"),
    [
        ("--kv-dtype", {"kv_dtype": "float32"}),
        ("--single-graph", {"single_graph": True}),
        ("--batch-invariant", {"batch_invariant": True}),
    ],
)
def test_what_fixed_shapes_cannot_do_is_refused(fixed: Artifact, flag: str, options: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=f"^{flag} has no effect on .*whose graphs have fixed shapes"):
        open_fixed_tiny(fixed, **options)


def test_fixed_shapes_check_their_inputs_and_memory(fixed: Artifact) -> None:
    odd = msgspec.structs.replace(fixed.manifest.inputs[0], name="pixels")
    claimed = msgspec.structs.replace(fixed.manifest, inputs=(odd, *fixed.manifest.inputs))
    with pytest.raises(ArtifactError, match="has the inputs pixels, which this llorch does not fill"):
        open_fixed_tiny(msgspec.structs.replace(fixed, manifest=claimed))
    with pytest.raises(UsageError, match="--max-context is 49; this artifact takes 2 to 48"):
        open_fixed_tiny(fixed, max_context=49)
    assert open_fixed_tiny(fixed, max_context=40).capacity.context == 40


def test_directml_int4_with_a_whole_head_is_the_quantised_model(tmp_path: Path) -> None:
    """Its form of rotation and norms, around the same codes as the CPU's graph."""
    source = write_hf_folder(tmp_path / "model")
    options: dict[str, Any] = {
        "precision": "int4",
        "quantizer": "affine",
        "compute_type": "float32",
        "accuracy_level": 0,
    }
    artifact = export_tiny(source, tmp_path / "out", target="directml", **options)
    weights = quantised_weights({}, artifact.manifest.recipe)
    expected = numpy_llama.forward(tiny_config(), weights, IDS)
    np.testing.assert_allclose(all_logits(artifact, IDS), expected, atol=QUANTISED_LOGITS_LEVEL_0, rtol=0)
