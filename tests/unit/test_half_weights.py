"""Weights in half precision: rounded as IEEE says, counted where they vanish, refused where they do not
fit.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest

from llorch_export.graph.half_precision import WeightCast
from llorch_export.options import ExportOptions
from llorch_export.pipeline import export
from llorch_export.preview import preview
from llorch_serve.errors import ArtifactError
from support.builders.checkpoints import tiny_llama_config, tiny_weights, write_hf_folder
from support.builders.tiny_exports import export_tiny, silent
from support.oracles.half_precision import Weights, bfloat16_bytes, float16_bytes, stored
from support.oracles.quantised_numpy import unpack

EDGES = np.array(
    [0, -0.0, 1, 1 + 2**-11, 1 + 3 * 2**-11, 65504, 65519.9, -65519.9, 6e-5, 6e-8, 2.98e-8, -3.1e-8, 1e-30],
    np.float32,
)


@pytest.mark.parametrize(
    ("kind", "oracle"), [("float16", float16_bytes), ("bfloat16", bfloat16_bytes)], ids=["fp16", "bf16"]
)
def test_rounding_is_to_nearest_and_ties_to_even(kind, oracle) -> None:
    values = np.concatenate([EDGES, np.random.default_rng(0).normal(0, 3, 5000).astype(np.float32)])
    assert WeightCast(kind).cast("w", values).tobytes() == oracle(values)


def test_float32_is_handed_on_as_it_is() -> None:
    cast = WeightCast("float32")
    assert cast.cast("w", EDGES) is EDGES
    assert cast.underflow_notice() is None


@pytest.mark.parametrize(
    ("precision", "oracle", "kind"),
    [
        ("fp16", float16_bytes, onnx.TensorProto.FLOAT16),
        ("bf16", bfloat16_bytes, onnx.TensorProto.BFLOAT16),
    ],
)
def test_an_artifact_holds_every_weight_rounded_once(tmp_path: Path, precision, oracle, kind) -> None:
    overrides = {"attention_bias": True}
    source = write_hf_folder(tmp_path / "source", overrides)
    folder = export_tiny(source, tmp_path / "out", precision=precision).folder
    weights = tiny_weights(tiny_llama_config(**overrides))
    for name in ("model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"):
        assert stored(folder, name) == (kind, oracle(weights[name])), name
    mlp, attention = "model.layers.1.mlp", "model.layers.0.self_attn"
    down = np.ascontiguousarray(weights[f"{mlp}.down_proj.weight"].T)  # MatMul takes [in, out]
    assert stored(folder, f"{mlp}.down_proj.weight") == (kind, oracle(down))
    bias = np.concatenate([weights[f"{attention}.{part}_proj.bias"] for part in "qkv"])
    assert stored(folder, f"{attention}.qkv_proj.bias") == (kind, oracle(bias))


def test_scales_of_blocks_are_stored_in_the_type_they_are_used_in(tmp_path: Path) -> None:
    source = write_hf_folder(tmp_path / "source")
    folder = export_tiny(source, tmp_path / "out", precision="int8", compute_type="float16").folder
    name = "model.layers.0.mlp.gate_proj"
    weight = tiny_weights(tiny_llama_config())[f"{name}.weight"]
    kind, data = stored(folder, f"{name}.scales")
    assert kind == onnx.TensorProto.FLOAT16
    scales = np.frombuffer(data, "<f2").astype(np.float32).reshape(len(weight), -1, 1)
    codes = unpack(np.frombuffer(stored(folder, f"{name}.weight")[1], np.uint8), 8) - 128
    error = np.abs(codes.reshape(*scales.shape[:2], 32) * scales - weight.reshape(*scales.shape[:2], 32))
    # Half a step, and at the ends of the range what rounding the scale takes away: 127 times 2**-11 of a
    # step.
    assert (error <= np.abs(scales) * (0.5 + 128 * 2**-11) + 1e-7).all()
    ops = [node.op_type for node in onnx.load(folder / "model.onnx", load_external_data=False).graph.node]
    assert ops.count("Cast") == 1  # of the logits


def edited(path: Path, edit: Callable[[Weights], None]) -> Path:
    return write_hf_folder(path, edit=edit)


@pytest.mark.parametrize(
    "options",
    [
        {"precision": "fp16"},
        {"precision": "int8", "compute_type": "float16"},
        {"precision": "int4", "compute_type": "float16"},
    ],
    ids=["fp16", "int8", "int4"],
)
def test_weights_beyond_float16_are_refused_by_tensor_and_count(tmp_path: Path, options) -> None:
    def edit(weights: Weights) -> None:
        weights["model.layers.1.mlp.up_proj.weight"][3, :2] = (-70000, 65520)

    source = edited(tmp_path / "source", edit)
    with pytest.raises(ArtifactError) as caught:
        export_tiny(source, tmp_path / "out", **options)
    message = str(caught.value)
    assert message.startswith(
        "model.layers.1.mlp.up_proj.weight: 2 or more values are beyond float16's largest, 65504"
    )
    assert "found 70000" in message
    assert "--precision bf16 or fp32" in message
    assert [path.name for path in tmp_path.iterdir()] == ["source"]
    assert export_tiny(source, tmp_path / "out", precision="bf16").folder.is_dir()


def test_a_damaged_weight_is_called_damaged_and_not_too_large(tmp_path: Path) -> None:
    def edit(weights: Weights) -> None:
        weights["model.norm.weight"][5] = np.inf

    source = edited(tmp_path / "source", edit)
    for precision in ("fp16", "bf16"):
        with pytest.raises(ArtifactError, match=r"model\.norm\.weight holds NaN or infinity"):
            export_tiny(source, tmp_path / "out", precision=precision)


def test_weights_that_vanish_are_counted_and_said(tmp_path: Path) -> None:
    def edit(weights: Weights) -> None:
        weights["model.layers.0.mlp.up_proj.weight"][0, :7] = 1e-9
        weights["model.layers.1.input_layernorm.weight"][:2] = -1e-20

    source = edited(tmp_path / "source", edit)
    options = ExportOptions(source=str(source), output=tmp_path / "out", precision="fp16")
    (notice,) = export(options, silent).notices
    assert notice == (
        "9 weights are below float16's smallest value and became zero, 7 of them among the 6,144 of "
        "model.layers.0.mlp.up_proj.weight"
    )
    assert export(ExportOptions(str(source), tmp_path / "wide", precision="bf16"), silent).notices == ()


def test_a_preview_counts_two_bytes_a_weight_and_a_cached_value(tmp_path: Path) -> None:
    source = write_hf_folder(tmp_path / "source")
    found = {
        precision: preview(ExportOptions(str(source), Path("out"), precision=precision))
        for precision in ("fp32", "fp16", "bf16")
    }
    for precision in ("fp16", "bf16"):
        for name in ("data_bytes", "kv_bytes_per_token"):
            assert 2 * found[precision][name] == pytest.approx(found["fp32"][name], rel=0.01), name  # type: ignore[operator]  # numbers
