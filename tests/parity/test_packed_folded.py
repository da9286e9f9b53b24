"""Codes and scales that the data file keeps in the checkpoint's own width: what the runtime makes of them
when it opens the graph, held against numpy's values of the same weights.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import onnx
import onnxruntime
import pytest
from onnx import numpy_helper

from llorch_export.checkpoint.packed.stored import StoredArray
from llorch_export.graph import source_forms
from llorch_export.inspect.contents import contents
from llorch_export.options import ExportOptions
from llorch_export.pipeline import export
from llorch_export.preview import preview
from llorch_export.terminal.inspect import describe
from llorch_serve.artifact.folder import Artifact
from llorch_serve.config import SessionConfig
from llorch_serve.errors import ArtifactError
from llorch_serve.fidelity.divergence import DivergenceSum
from llorch_serve.runtime import embedding_session, memory_plan, opening
from llorch_serve.runtime.memory_plan import loaded_bytes
from support.builders import packed_bitsandbytes, packed_hqq, packed_modelopt, packed_quanto, packed_torchao
from support.builders.packed_checkpoints import Group, Packed, write_compressed, write_gptq
from support.builders.packed_folders import Made, Maker, write_packed
from support.builders.tiny_exports import all_logits, export_tiny, random_ids, silent
from support.oracles import numpy_llama
from support.oracles.quantised_numpy import unpack
from tolerances import FOLDED_VALUES, KL_LEVEL_4_INT4, KL_ROW_CODES, QUANTISED_LOGITS_LEVEL_0

SHAPE: dict[str, Any] = {"hidden_size": 128, "intermediate_size": 192, "head_dim": 32}
UNEVEN: dict[str, Any] = {"hidden_size": 96, "intermediate_size": 160, "head_dim": 24}
IDS = random_ids(40)
Write = Callable[[Path, dict[str, Any]], Packed]


def by_bitsandbytes(table: str, **more: Any) -> Write:
    maker = packed_bitsandbytes.four_bits(table, **more)
    settings = packed_bitsandbytes.settings(table)
    return lambda path, shape: write_packed(path, shape, maker, settings, skip=("lm_head",))


def by_hqq(*form: Any, **more: Any) -> Write:
    maker = packed_hqq.matrix(*form, whole=False, **more)
    return lambda path, shape: write_packed(path, shape, maker, packed_hqq.SETTINGS, skip=("lm_head",))


def by_quanto(bits: int, group: int) -> Write:
    maker = packed_quanto.narrow(bits, group)
    return lambda path, shape: packed_quanto.write_quanto(path, shape, maker, f"qint{bits}")


def by_torchao(path: Path, shape: dict[str, Any]) -> Packed:
    return packed_torchao.write_torchao(path, shape, packed_torchao.offsets, "Int4Tensor", {}, 32)


def by_modelopt(algorithm: str, maker: Maker) -> Write:
    settings = packed_modelopt.settings(algorithm)
    return lambda path, shape: write_packed(path, shape, maker, settings, skip=("lm_head",))


def by_compressed(*group: Any, **more: Any) -> Write:
    return lambda path, shape: write_compressed(path, shape, Group(*group, **more))


FP8_SETTINGS: dict[str, object] = {
    "quant_method": "fp8",
    "activation_scheme": "dynamic",
    "weight_block_size": [64, 64],
}


def _fp8(sizes: tuple[int, int], rng: np.random.Generator) -> Made:
    codes = rng.normal(0, 60, sizes).astype(ml_dtypes.float8_e4m3fn)
    scales = rng.uniform(0.5, 1, tuple(-(-size // 64) for size in sizes)).astype(np.float32) / 600
    wide = np.repeat(np.repeat(scales, 64, axis=0), 64, axis=1)[: sizes[0], : sizes[1]]
    return {"weight": codes, "weight_scale_inv": scales}, codes.astype(np.float32) * wide


def by_its_own_method(path: Path, shape: dict[str, Any]) -> Packed:
    """Write 8-bit floating point as DeepSeek and Qwen publish it."""
    return write_packed(path, shape, _fp8, FP8_SETTINGS, skip=("lm_head",))


EXACT: dict[str, tuple[Write, str]] = {
    "nvfp4 over a scale": (
        by_compressed("nvfp4-pack-quantized", "float", 4, "tensor_group", 16),
        "8 bits, block 16, exactly, of 4 bits in the file",
    ),
    "nvfp4 times a scale": (
        by_modelopt("NVFP4", packed_modelopt.nvfp4),
        "8 bits, block 16, exactly, of 4 bits in the file",
    ),
    "mxfp4": (
        by_compressed("mxfp4-pack-quantized", "float", 4),
        "8 bits, block 32, exactly, of 4 bits in the file",
    ),
    "3 bits": (
        lambda path, shape: write_gptq(path, shape, bits=3, order=True),
        "4 bits, block 32, exactly, of 3 bits in the file",
    ),
    "3 bits, zero points": (
        lambda path, shape: write_gptq(path, shape, bits=3, symmetric=False, version=2),
        "4 bits, block 32, exactly, of 3 bits in the file",
    ),
}
BESIDE: dict[str, tuple[Write, str]] = {
    "hqq, 8 bits": (by_hqq(8, 32), "8 bits, block 32, exactly, zero points beside the codes"),
    "hqq, 4 bits": (by_hqq(4, 32), "4 bits, block 32, exactly, zero points beside the codes"),
    "hqq, 3 bits": (by_hqq(3, 32), "4 bits, block 32, exactly, of 3 bits in the file, zero points beside"),
    "hqq, 2 bits": (by_hqq(2, 32), "of 2 bits in the file, inputs not rounded, zero points beside the codes"),
    "quanto, 2 bits": (
        by_quanto(2, 32),
        "of 2 bits in the file, inputs not rounded, zero points beside the codes",
    ),
    "quanto, 4 bits": (by_quanto(4, 32), "4 bits, block 32, exactly, zero points beside the codes"),
    "torchao, Int4Tensor": (by_torchao, "4 bits, block 32, exactly, zero points beside the codes"),
}
NEARLY: dict[str, tuple[Write, str]] = {
    "nf4": (by_bitsandbytes("nf4"), "0.38% of a block's largest value, of 4 bits in the file"),
    "fp4": (by_bitsandbytes("fp4"), "0.31% of a block's largest value, of 4 bits in the file"),
    "nf4, double": (by_bitsandbytes("nf4", nested=16), "0.38% of a block's largest value, of 4 bits in the"),
}
ACROSS: dict[str, Write] = {
    f"hqq, {bits} along outputs": by_hqq(int(bits[0]), 16, axis=0)
    for bits in ("8 bits", "4 bits", "3 bits", "2 bits", "1 bit")
}
VALUES: dict[str, Write] = {
    **ACROSS,
    **{name: write for name, (write, _) in NEARLY.items()},
    "fp8": by_its_own_method,
    "fp8, one scale": by_modelopt("FP8", packed_modelopt.fp8("tensor")),
    "fp8, one an output": by_compressed("float-quantized", "float", 8, "channel"),
    "fp8, blocks": by_compressed("float-quantized", "float", 8, "block", block=(32, 64)),
    "fp8, blocks of another model": by_modelopt("fp8_pb_wo", packed_modelopt.fp8("128 by 128")),
}


def source(packed: Packed, output: Path, **options: Any) -> Artifact:
    return export_tiny(packed.folder, output, precision="source", kv_dtype="float32", **options)


def kl(packed: Packed, found: npt.NDArray[np.float32]) -> float:
    total = DivergenceSum()
    total.add(numpy_llama.forward(packed.config, packed.values, IDS).astype(np.float32), found)
    return total.result().kl


def opened(artifact: Artifact) -> onnx.ModelProto:
    """Return the graph as onnxruntime runs it, all weights inside."""
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_BASIC
    path = artifact.folder / "opened.onnx"
    options.optimized_model_filepath = str(path)
    options.log_severity_level = 3
    onnxruntime.InferenceSession(artifact.graph_path, options, providers=["CPUExecutionProvider"])
    return onnx.load(path)


def widened_in_a_step(model: onnx.ModelProto) -> list[str]:
    """Return what a graph still makes of weights when it runs."""
    outputs = [node.output[0] for node in model.graph.node]
    return [name for name in outputs if ".weight" in name or ".scales" in name or ".zeros" in name]


def dequantised(model: onnx.ModelProto, name: str) -> npt.NDArray[np.float32]:
    """Return what a MatMulNBits node of an opened graph multiplies with, [rows, columns]."""
    node = next(node for node in model.graph.node if node.output[0] == name)
    assert node.op_type == "MatMulNBits"
    settings = {a.name: a.i for a in node.attribute}
    tensors = {tensor.name: numpy_helper.to_array(tensor) for tensor in model.graph.initializer}
    codes, scales = unpack(tensors[node.input[1]], settings["bits"]), tensors[node.input[2]]
    middle = np.full(scales.shape, 2 ** (settings["bits"] - 1))
    if len(node.input) > 3 and node.input[3]:
        middle = unpack(tensors[node.input[3]], settings["bits"])[:, : scales.shape[1]]
    values = (codes - middle[..., None]).astype(np.float32) * scales[..., None]
    return values.reshape(len(codes), -1)[:, : settings["K"]]


@pytest.mark.parametrize("row", EXACT)
def test_what_the_runtime_multiplies_with_are_the_values_bit_by_bit(tmp_path: Path, row: str) -> None:
    packed = EXACT[row][0](tmp_path / "m", SHAPE)
    model = opened(source(packed, tmp_path / "a"))
    for module in ("mlp.down_proj", "mlp.up_proj", "self_attn.o_proj"):
        name = f"model.layers.1.{module}"
        expected = packed.values[f"{name}.weight"]
        order = packed.stored.get(f"{name}.g_idx")
        if order is not None:
            expected = expected[:, np.argsort(order, kind="stable")]
        np.testing.assert_array_equal(dequantised(model, name), expected, err_msg=name)
    assert widened_in_a_step(model) == []


@pytest.mark.parametrize("row", BESIDE | NEARLY)
def test_nothing_is_widened_in_a_step(tmp_path: Path, row: str) -> None:
    packed = (BESIDE | NEARLY)[row][0](tmp_path / "m", SHAPE)
    model = opened(source(packed, tmp_path / "a"))
    assert widened_in_a_step(model) == []


@pytest.mark.parametrize("row", EXACT | BESIDE | VALUES)
def test_logits_in_fp32_are_those_of_the_values(tmp_path: Path, row: str) -> None:
    write = VALUES[row] if row in VALUES else (EXACT | BESIDE)[row][0]
    packed = write(tmp_path / "m", UNEVEN)
    found = all_logits(source(packed, tmp_path / "a", accuracy_level=0), IDS)
    expected = numpy_llama.forward(packed.config, packed.values, IDS)
    np.testing.assert_allclose(found, expected, atol=QUANTISED_LOGITS_LEVEL_0, rtol=0)


@pytest.mark.parametrize("row", VALUES)
def test_values_that_8_bits_do_not_hold_are_values_where_inputs_are_not_rounded(
    tmp_path: Path, row: str
) -> None:
    packed = VALUES[row](tmp_path / "m", SHAPE)
    artifact = source(packed, tmp_path / "a", accuracy_level=0)
    model = opened(artifact)
    tensors = {tensor.name: numpy_helper.to_array(tensor) for tensor in model.graph.initializer}
    name = "model.layers.0.mlp.down_proj"
    node = next(node for node in model.graph.node if node.output[0] == name)
    np.testing.assert_allclose(tensors[node.input[1]].T, packed.values[f"{name}.weight"], rtol=FOLDED_VALUES)
    bits = 4 if row in NEARLY else int(row[5]) if row in ACROSS else 8
    assert f"values in float32, exactly, of {bits} bits in the file" in describe(contents(artifact))


@pytest.mark.parametrize("bits", [3, 4])
def test_projections_whose_groups_differ_keep_their_own_scales(tmp_path: Path, bits: int) -> None:
    def make(shape: tuple[int, int], rng: np.random.Generator) -> Made:
        group = 64 if shape[0] == shape[1] else 32
        return packed_hqq.matrix(bits, group, whole=False)(shape, rng)

    packed = write_packed(tmp_path / "m", SHAPE, make, packed_hqq.SETTINGS, skip=("lm_head",))
    found = all_logits(source(packed, tmp_path / "a", accuracy_level=0), IDS)
    expected = numpy_llama.forward(packed.config, packed.values, IDS)
    np.testing.assert_allclose(found, expected, atol=QUANTISED_LOGITS_LEVEL_0, rtol=0)


def test_values_of_large_models_stay_in_8_bits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    packed = VALUES["nf4"](tmp_path / "m", SHAPE)
    matrices = [v for n, v in packed.values.items() if v.ndim == 2 and "layers" in n]
    values = sum(4 * matrix.size for matrix in matrices)
    for most, form in (
        (values, "values in float32, exactly"),
        (values - 1, "8 bits, block 32, within 0.38%"),
    ):
        monkeypatch.setattr(source_forms, "_MOST_VALUES", most)
        options = ExportOptions(
            str(packed.folder), tmp_path / str(most), precision="source", accuracy_level=0
        )
        assert any(form in notice for notice in export(options, silent).notices)


@pytest.mark.parametrize("level", [0, 4])
@pytest.mark.parametrize("kind", ["fp8", "mxfp4", "fp8 by its own method"])
def test_scales_that_make_no_numbers_of_codes_are_refused_whatever_becomes_of_them(
    tmp_path: Path, kind: str, level: int
) -> None:
    name = {"fp8": "FP8", "mxfp4": "MXFP4"}.get(kind, "")
    maker = {"FP8": packed_modelopt.fp8("tensor"), "MXFP4": packed_modelopt.mxfp4}.get(name, _fp8)

    def make(shape: tuple[int, int], rng: np.random.Generator) -> Made:
        parts, values = maker(shape, rng)
        scales = "weight_scale" if name else "weight_scale_inv"
        largest = np.full_like(parts[scales], 254 if name == "MXFP4" else 3e38)
        return {**parts, scales: largest}, values

    settings = packed_modelopt.settings(name) if name else FP8_SETTINGS
    packed = write_packed(tmp_path / "m", SHAPE, make, settings, skip=("lm_head",))
    with pytest.raises(ArtifactError, match=r"model\.layers\.0\..*(give|holds) NaN or infinity"):
        source(packed, tmp_path / "a", accuracy_level=level)


def test_groups_along_outputs_are_values_by_default_and_quantised_anew_in_large_models(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    packed = ACROSS["hqq, 3 bits along outputs"](tmp_path / "m", SHAPE)
    artifact = source(packed, tmp_path / "a")
    assert kl(packed, all_logits(artifact, IDS)) < KL_ROW_CODES
    monkeypatch.setattr(source_forms, "_MOST_VALUES", 0)
    options = ExportOptions(str(packed.folder), tmp_path / "b", precision="source")
    assert any("quantised anew to 8 bits" in notice for notice in export(options, silent).notices)


@pytest.mark.parametrize("row", EXACT | BESIDE | NEARLY)
def test_the_default_costs_little(tmp_path: Path, row: str) -> None:
    packed = (EXACT | BESIDE | NEARLY)[row][0](tmp_path / "m", SHAPE)
    assert kl(packed, all_logits(source(packed, tmp_path / "a"), IDS)) < KL_LEVEL_4_INT4


@pytest.mark.parametrize("row", ["nvfp4 over a scale", "3 bits, zero points", "hqq, 4 bits"])
def test_without_optimisation_the_graph_gives_the_same(tmp_path: Path, row: str) -> None:
    packed = (EXACT | BESIDE)[row][0](tmp_path / "m", SHAPE)
    artifact = source(packed, tmp_path / "a", accuracy_level=0)
    kv = artifact.manifest.kv
    past = np.zeros((1, kv.kv_heads, len(IDS), kv.head_dim), np.float32)
    feeds = {
        "input_ids": np.array([IDS], np.int64),
        "seqlens_k": np.array([len(IDS) - 1], np.int32),
        "total_sequence_length": np.array(len(IDS), np.int32),
        "logits_indices": np.arange(len(IDS)),
    }
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = onnxruntime.InferenceSession(artifact.graph_path, options, providers=["CPUExecutionProvider"])
    feeds |= {value.name: past for value in session.get_inputs() if value.name not in feeds}
    (found,) = session.run(["logits"], feeds)
    np.testing.assert_allclose(found, all_logits(artifact, IDS), atol=QUANTISED_LOGITS_LEVEL_0, rtol=0)


@pytest.mark.parametrize("row", ["nvfp4 over a scale", "mxfp4", "3 bits", "hqq, 4 bits", "nf4, double"])
def test_a_file_is_about_as_large_as_its_source_and_says_what_memory_it_takes(
    tmp_path: Path, row: str
) -> None:
    shape = {"hidden_size": 512, "intermediate_size": 1024, "head_dim": 64, "num_hidden_layers": 3}
    write, said = (EXACT | BESIDE | NEARLY)[row]
    packed = write(tmp_path / "m", shape)
    options = ExportOptions(str(packed.folder), tmp_path / "a", precision="source")
    before = (packed.folder / "model.safetensors").stat().st_size
    apart = 2 * 128 * 32 * 4  # rotary tables, which the source has as a formula
    apart += 2**16 * (12 if "3 bits" in row else 4)  # tables that all matrices share
    assert int(str(preview(options)["data_bytes"])) - apart <= 1.05 * before
    result = export(options, silent)
    assert any(said in notice and "MiB more once" in notice for notice in result.notices), result.notices
    manifest = result.artifact.manifest
    wider = manifest.widened_bytes
    assert isinstance(wider, int)
    matrices = sum(v.size for n, v in packed.values.items() if v.ndim == 2 and "layers" in n)
    bits = 4 if "4" in row and "hqq" not in row else "3 bits" in row
    assert bits / 8 * matrices <= wider <= (bits / 8 + 0.4) * matrices
    assert loaded_bytes(manifest, "CPUExecutionProvider") == wider + sum(
        file.bytes for file in manifest.files
    )


@pytest.mark.parametrize("row", ["nvfp4 over a scale", "mxfp4", "nf4, double"])
def test_a_matrix_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, row: str) -> None:
    packed = (EXACT | NEARLY)[row][0](tmp_path / "m", SHAPE)
    read: list[str] = []
    rows = StoredArray.rows
    monkeypatch.setattr(
        StoredArray, "rows", lambda own, start, stop: (read.append(own.name), rows(own, start, stop))[1]
    )
    source(packed, tmp_path / "a")
    (name,) = {name for name in read if "layers.1.mlp.down_proj" in name and packed_matrix(name)}
    assert read.count(name) == 1


def packed_matrix(name: str) -> bool:
    """Tell whether a tensor is the matrix itself."""
    return name.endswith((".weight", ".weight_packed"))


@pytest.mark.parametrize("embed", [None, "mean"])
def test_opening_gives_back_what_it_freed_and_says_where_it_needs_more_than_is_free(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, embed: Any
) -> None:
    freed: list[str] = []
    for module in (opening, embedding_session):
        monkeypatch.setattr(module, "give_back_freed", lambda: freed.append("all"), raising=False)
    packed = EXACT["mxfp4"][0](tmp_path / "m", SHAPE)
    artifact = export_tiny(packed.folder, tmp_path / "a", precision="source", embed=embed)
    said: list[str | None] = []
    opens = opening.open_session if embed is None else embedding_session.open_embedder
    for times in (memory_plan.PASSING, 2**60):
        monkeypatch.setattr(memory_plan, "PASSING", times)
        opens(artifact, SessionConfig(threads=1), lambda report: said.append(report.notice))
    assert freed == ["all", "all"]
    assert said[0] is None
    assert said[1] is not None
    assert "since its weights are widened" in said[1]


def test_inspect_tells_the_bits_of_the_file(tmp_path: Path) -> None:
    found = describe(contents(source(EXACT["mxfp4"][0](tmp_path / "m", SHAPE), tmp_path / "a")))
    (line,) = [line for line in found.splitlines() if "mlp.down_proj" in line and line.startswith("stored")]
    assert "int8" in line
    assert "block 32" in line
    assert float(line.split()[-2]) == pytest.approx(4 + 8 / 32, abs=0.5)


def test_a_target_that_does_not_fold_has_the_widths_that_operators_take(tmp_path: Path) -> None:
    packed = EXACT["mxfp4"][0](tmp_path / "m", SHAPE)
    options = ExportOptions(str(packed.folder), tmp_path / "a", precision="source", target="openvino")
    result = export(options, silent)
    assert any("(8 bits, block 32, exactly)" in notice for notice in result.notices), result.notices
    assert not result.artifact.manifest.widened_bytes


def test_a_cache_in_int8_reads_the_same_file(tmp_path: Path) -> None:
    packed = EXACT["nvfp4 over a scale"][0](tmp_path / "m", SHAPE)
    artifact = export_tiny(packed.folder, tmp_path / "a", precision="source", kv_dtype="int8")
    assert artifact.manifest.kv_dtypes == ("int8", "float32")
    assert kl(packed, all_logits(artifact, IDS)) < 2 * KL_LEVEL_4_INT4
