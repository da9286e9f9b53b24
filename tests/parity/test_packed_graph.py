"""Packed weights at precision ``source``: codes reach the graph as they are, and what has no form is said."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import pytest

from llorch_export.options import ExportOptions
from llorch_export.pipeline import export
from llorch_export.preview import preview
from llorch_export.source.open import open_checkpoint
from llorch_serve.artifact.folder import Artifact
from llorch_serve.artifact.manifest import KvDtype
from llorch_serve.errors import ArtifactError, UsageError
from llorch_serve.fidelity.divergence import DivergenceSum
from support.builders.checkpoints import of_family, write_hf_folder
from support.builders.packed_checkpoints import Group, Packed, write_awq, write_compressed, write_gptq
from support.builders.tiny_exports import all_logits, export_tiny, random_ids, silent
from support.oracles import numpy_llama
from tolerances import KL_LEVEL_4_INT4, KL_REQUANTISED_SOURCE, QUANTISED_LOGITS_LEVEL_0

SHAPE: dict[str, Any] = {"hidden_size": 128, "intermediate_size": 192, "head_dim": 32}
BIASED = SHAPE | {"attention_bias": True, "mlp_bias": True}
TIED = SHAPE | {"tie_word_embeddings": True}
TAILS: dict[str, Any] = {"hidden_size": 96, "intermediate_size": 160, "head_dim": 24}
V2: dict[str, Any] = {"symmetric": False, "version": 2}
IDS = random_ids(40)
Write = Callable[[Path], Packed]

ROWS: dict[str, Write] = {
    "gptq": lambda path: write_gptq(path, BIASED),
    "gptq, 8 bits, affine": lambda path: write_gptq(path, SHAPE, bits=8, **V2),
    "gptq, 2 bits, affine, order": lambda path: write_gptq(path, BIASED, bits=2, order=True, **V2),
    "gptq, 3 bits, order": lambda path: write_gptq(path, SHAPE, bits=3, order=True),
    "gptq, one group, tails": lambda path: write_gptq(path, TAILS, group=-1, **V2),
    "gptq, order, short last group": lambda path: write_gptq(path, SHAPE, group=128, order=True),
    "gptq, tied": lambda path: write_gptq(path, TIED),
    "gptq, some plain": lambda path: write_gptq(
        path, SHAPE, skip=("lm_head", "layers.1.self_attn.k_proj", "down_proj")
    ),
    "awq": lambda path: write_awq(path, BIASED),
    "awq, gemv, tied": lambda path: write_awq(path, TIED, version="gemv", group=64),
    "compressed-tensors, affine, order": lambda path: write_compressed(
        path, SHAPE, Group(symmetric=False, order=True)
    ),
    "w8a8": lambda path: write_compressed(path, TAILS, Group("int-quantized", bits=8, strategy="channel")),
    "mxfp4": lambda path: write_compressed(path, SHAPE, Group("mxfp4-pack-quantized", "float", 4)),
    "nvfp4, tails": lambda path: write_compressed(
        path, TAILS, Group("nvfp4-pack-quantized", "float", 4, "tensor_group", 16)
    ),
    "two groups": lambda path: write_compressed(
        path,
        SHAPE,
        Group(targets=("re:.*self_attn.*",), parts=("self_attn",)),
        Group("int-quantized", bits=8, strategy="channel"),
        ignore=("lm_head", r"re:.*layers\.0\.mlp\.up.*"),
        plain=("lm_head", "layers.0.mlp.up"),
    ),
}


def kl(packed: Packed, found: npt.NDArray[np.float32]) -> float:
    total = DivergenceSum()
    total.add(numpy_llama.forward(packed.config, packed.values, IDS).astype(np.float32), found)
    return total.result().kl


def nodes(artifact: Artifact, op: str) -> dict[str, dict[str, Any]]:
    graph = onnx.load(artifact.graph_path, load_external_data=False).graph
    return {
        node.output[0]: {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute}
        for node in graph.node
        if node.op_type == op
    }


def source(packed: Packed, output: Path, **options: Any) -> Artifact:
    return export_tiny(packed.folder, output, precision="source", kv_dtype="float32", **options)


@pytest.mark.parametrize("write", ROWS.values(), ids=ROWS)
def test_logits_are_those_of_the_dequantised_weights(tmp_path: Path, write: Write) -> None:
    packed = write(tmp_path / "m")
    found = all_logits(source(packed, tmp_path / "a", accuracy_level=0), IDS)
    expected = numpy_llama.forward(packed.config, packed.values, IDS)
    np.testing.assert_allclose(found, expected, atol=QUANTISED_LOGITS_LEVEL_0, rtol=0)


def test_a_fused_projection_is_taken_apart(tmp_path: Path) -> None:
    family = SHAPE | of_family("phi3", head_dim=None)
    packed = write_gptq(tmp_path / "m", family, order=True, **V2)
    tensors = open_checkpoint(str(packed.folder)).tensors
    together = packed.values["model.layers.0.self_attn.qkv_proj.weight"]
    parts = [tensors[f"model.layers.0.self_attn.{part}_proj.weight"] for part in "qkv"]
    np.testing.assert_array_equal(np.concatenate([part.load() for part in parts]), together)
    values = {name: tensor.load() for name, tensor in tensors.items()}
    found = all_logits(source(packed, tmp_path / "a", accuracy_level=0), IDS)
    expected = numpy_llama.forward(packed.config, values, IDS)
    np.testing.assert_allclose(found, expected, atol=QUANTISED_LOGITS_LEVEL_0, rtol=0)


def test_inputs_in_another_order_are_gathered_once_for_all_that_read_them(tmp_path: Path) -> None:
    packed = write_gptq(tmp_path / "m", SHAPE, order=True)
    order = packed.stored["model.layers.0.self_attn.q_proj.g_idx"]
    for name in packed.stored:  # as tools write it: what reads the same input has the same order
        if name.endswith(("k_proj.g_idx", "v_proj.g_idx")) and "layers.0" in name:
            packed.stored[name] = order
    packed.rewrite()
    artifact = source(packed, tmp_path / "a", accuracy_level=0)
    gathers = nodes(artifact, "Gather")
    assert "model.layers.0.self_attn.qkv_proj/reordered" in gathers
    assert "model.layers.1.self_attn.q_proj/reordered" in gathers
    values = {name: tensor.load() for name, tensor in open_checkpoint(str(packed.folder)).tensors.items()}
    np.testing.assert_allclose(
        all_logits(artifact, IDS),
        numpy_llama.forward(packed.config, values, IDS),
        atol=QUANTISED_LOGITS_LEVEL_0,
        rtol=0,
    )


@pytest.mark.parametrize(
    ("settings", "bits", "block"),
    [
        ({"group": 64}, 4, 32),
        ({"bits": 3}, 4, 32),
        ({"bits": 2}, 4, 32),
        ({"bits": 8, "group": 128}, 8, 32),
    ],
)
def test_codes_are_no_wider_than_they_must_be(
    tmp_path: Path, settings: dict[str, Any], bits: int, block: int
) -> None:
    artifact = source(write_gptq(tmp_path / "m", SHAPE, **settings), tmp_path / "a")
    found = nodes(artifact, "MatMulNBits")["model.layers.0.self_attn.qkv_proj"]
    assert (found["bits"], found["block_size"]) == (bits, block)


def test_a_cache_in_int8_is_added_to_packed_weights_that_are_kept_only_if_asked_for(tmp_path: Path) -> None:
    packed = write_gptq(tmp_path / "m", SHAPE)
    cases: tuple[tuple[KvDtype | None, tuple[KvDtype, ...]], ...] = (
        (None, ("float32",)),
        ("int8", ("int8", "float32")),
    )
    for asked, dtypes in cases:
        options = ExportOptions(str(packed.folder), tmp_path / str(asked), precision="source", kv_dtype=asked)
        assert preview(options)["kv_dtype"] == dtypes[0]
        assert export(options, silent).artifact.manifest.kv_dtypes == dtypes
    other = ExportOptions(str(packed.folder), tmp_path / "other", precision="int8")
    assert preview(other)["kv_dtype"] == "int8"


def test_the_default_level_adds_what_int8_activations_cost(tmp_path: Path) -> None:
    packed = write_gptq(tmp_path / "m", SHAPE, group=128)
    assert kl(packed, all_logits(source(packed, tmp_path / "a"), IDS)) < KL_LEVEL_4_INT4


@pytest.mark.parametrize("kind", ["gptq", "awq", "w8a8"])
def test_an_artifact_is_at_most_a_twentieth_larger_than_its_source(tmp_path: Path, kind: str) -> None:
    shape = {"hidden_size": 512, "intermediate_size": 1024, "head_dim": 64, "num_hidden_layers": 4}
    write: dict[str, Write] = {
        "gptq": lambda path: write_gptq(path, shape, group=128),
        "awq": lambda path: write_awq(path, shape, group=128),
        "w8a8": lambda path: write_compressed(
            path, shape, Group("int-quantized", bits=8, strategy="channel")
        ),
    }
    packed = write[kind](tmp_path / "m")
    options = ExportOptions(source=str(packed.folder), output=tmp_path / "a", precision="source")
    before = (packed.folder / "model.safetensors").stat().st_size
    rotary = 2 * 128 * 32 * 4  # which the source has as a formula
    assert int(str(preview(options)["data_bytes"])) - rotary <= 1.05 * before


def test_what_the_runtime_has_no_form_for_is_quantised_anew_and_said(tmp_path: Path) -> None:
    packed = write_compressed(tmp_path / "m", SHAPE, Group("float-quantized", "float", 8, "channel"))
    options = ExportOptions(source=str(packed.folder), output=tmp_path / "a", precision="source")
    result = export(options, silent)
    (notice,) = result.notices
    assert "8 of floating point of 8 bits, one scale an output (quantised anew to 8 bits, block 32" in notice
    assert "--accuracy-level 0 keeps the values" in notice
    assert "7 of floating point of 8 bits, one scale an output (quantised anew to 8 bits, block 64" in notice
    assert "1 of F16 (whole, stored in float16)" in notice
    assert kl(packed, all_logits(result.artifact, IDS)) < KL_REQUANTISED_SOURCE
    forms = result.artifact.manifest.source_forms
    assert isinstance(forms, tuple)
    assert ("model.embed_tokens",) in [form.modules for form in forms]


@pytest.mark.parametrize("precision", ["fp32", "int8"])
def test_another_precision_stores_the_values_anew(tmp_path: Path, precision: str) -> None:
    packed = write_awq(tmp_path / "m", SHAPE)
    plain = write_hf_folder(tmp_path / "plain", SHAPE, edit=lambda weights: weights.update(packed.values))
    artifacts = [
        export_tiny(folder, tmp_path / name, precision=precision)
        for name, folder in (("a", packed.folder), ("b", plain))
    ]
    first, second = ((artifact.folder / "model.onnx.data").read_bytes() for artifact in artifacts)
    assert first == second
    options = ExportOptions(source=str(packed.folder), output=tmp_path / "c", precision="int8")
    assert any("--precision source keeps their codes" in notice for notice in export(options, silent).notices)


def test_rounding_of_activations_by_the_checkpoints_own_code_is_said(tmp_path: Path) -> None:
    rounded = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True}
    group = Group("int-quantized", bits=8, strategy="channel", activations=rounded)
    packed = write_compressed(tmp_path / "m", SHAPE, group)
    notices = preview(ExportOptions(source=str(packed.folder), output=tmp_path / "a"))["notices"]
    assert isinstance(notices, tuple)
    assert any("rounds input activations of layers to whole numbers of 8 bits" in text for text in notices)


def test_a_table_that_is_tied_and_packed_besides_is_refused(tmp_path: Path) -> None:
    packed = write_gptq(tmp_path / "m", SHAPE)
    packed.config["tie_word_embeddings"] = True
    packed.rewrite()
    with pytest.raises(ArtifactError, match=r"ties the head.*lm_head\.g_idx.*tie_word_embeddings to false"):
        open_checkpoint(str(packed.folder))
    packed.config["tie_word_embeddings"] = False
    packed.rewrite()
    open_checkpoint(str(packed.folder))


def test_plain_weights_have_no_codes_to_carry(tmp_path: Path) -> None:
    packed = write_gptq(tmp_path / "m", SHAPE, skip=("",))
    with pytest.raises(UsageError, match="folder of plain weights"):
        source(packed, tmp_path / "a")


@pytest.mark.parametrize("family", ["cohere", "qwen2", "gemma2", "olmo2"])
def test_codes_of_other_families_are_where_their_values_are(tmp_path: Path, family: str) -> None:
    shape = SHAPE | {"tie_word_embeddings": True}
    packed = write_gptq(tmp_path / "m", shape | of_family(family, head_dim=32, hidden_act=None), order=True)
    values = export_tiny(packed.folder, tmp_path / "v")
    found = all_logits(source(packed, tmp_path / "a", accuracy_level=0), IDS)
    np.testing.assert_allclose(found, all_logits(values, IDS), atol=QUANTISED_LOGITS_LEVEL_0, rtol=0)
