"""``--precision source``: every matrix of a GGUF file in the graph in its own type, equal to its dequantised
weights.
"""

from __future__ import annotations

from collections import Counter
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
from llorch_export.recipes.kl_limits import KL_LIMIT
from llorch_export.source.open import open_checkpoint
from llorch_export.verify.divergence import verify
from llorch_serve.artifact.folder import Artifact
from llorch_serve.errors import ArtifactError, UsageError
from llorch_serve.fidelity.divergence import DivergenceSum
from support.builders.checkpoints import Weights, tiny_config, write_gguf, write_hf_folder
from support.builders.tiny_exports import all_logits, contents, export_tiny, random_ids, silent
from support.oracles import numpy_llama
from support.oracles.gguf_blocks import AFFINE, SYMMETRIC, random_blocks
from tolerances import KL_LEVEL_4_INT8, KL_WIDENED_OFFSETS, QUANTISED_LOGITS_LEVEL_0

SHAPE: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64, "vocab_size": 512}
TIED = SHAPE | {"tie_word_embeddings": True}
BIASED = SHAPE | {"attention_bias": True, "mlp_bias": True}
IDS = random_ids(60)
# What llama.cpp's Q4_K_M makes of a Llama, with a float matrix here and there.
MIXED = {
    "token_embd.weight": "Q6_K",
    "output.weight": "Q6_K",
    "blk.0.attn_v.weight": "Q6_K",
    "blk.0.ffn_down.weight": "Q6_K",
    "blk.1.attn_output.weight": "Q8_0",
    "blk.1.ffn_gate.weight": "Q4_0",
}

Choice = Callable[[str], str | None]


def write_source(path: Path, choose: Choice, overrides: dict[str, Any] = SHAPE) -> Path:
    """Write a GGUF file whose matrix ``name`` consists of random blocks of ``choose(name)``; None leaves it
    F32.
    """

    def blocks(name: str, rows: int, columns: int) -> tuple[str, npt.NDArray[np.uint8]] | None:
        kind = choose(name)
        # The embedding is summed into a stream that norms divide, so its size matters little.
        return None if kind is None else (kind, random_blocks(kind, rows, columns, seed=len(name) + rows))

    return write_gguf(path, overrides, blocks=blocks)


def dequantised_model(source: Path) -> Weights:
    return {name: tensor.load() for name, tensor in open_checkpoint(str(source)).tensors.items()}


def exact_logits(source: Path, overrides: dict[str, Any] = SHAPE) -> npt.NDArray[np.float64]:
    return numpy_llama.forward(tiny_config(**overrides), dequantised_model(source), IDS)


def kl(reference: npt.NDArray[Any], model: npt.NDArray[np.float32]) -> float:
    total = DivergenceSum()
    total.add(reference.astype(np.float32), model)
    return total.result().kl


def nodes(artifact: Artifact, op: str) -> dict[str, dict[str, Any]]:
    graph = onnx.load(artifact.graph_path, load_external_data=False).graph
    return {
        node.output[0]: {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute}
        for node in graph.node
        if node.op_type == op
    }


@pytest.mark.parametrize("kind", SYMMETRIC)
@pytest.mark.parametrize("overrides", [SHAPE, TIED, BIASED], ids=["plain", "tied", "biases"])
def test_types_without_an_offset_equal_their_dequantised_weights(
    tmp_path: Path, kind: str, overrides: dict[str, Any]
) -> None:
    source = write_source(tmp_path / "m.gguf", lambda name: kind, overrides)
    found = all_logits(export_tiny(source, tmp_path / "a", precision="source", accuracy_level=0), IDS)
    np.testing.assert_allclose(found, exact_logits(source, overrides), atol=QUANTISED_LOGITS_LEVEL_0, rtol=0)


# One of each form; the rest in unit tests.
@pytest.mark.parametrize("kind", ["Q3_K", "IQ1_M", "TQ1_0", "Q1_0", "Q2_0"])
def test_types_of_looked_up_codes_equal_their_dequantised_weights(tmp_path: Path, kind: str) -> None:
    source = write_source(tmp_path / "m.gguf", lambda name: kind, TIED)
    found = all_logits(export_tiny(source, tmp_path / "a", precision="source", accuracy_level=0), IDS)
    np.testing.assert_allclose(found, exact_logits(source, TIED), atol=QUANTISED_LOGITS_LEVEL_0, rtol=0)


@pytest.mark.reference
@pytest.mark.parametrize("kind", ["Q1_0", "Q2_0"])
def test_files_of_types_that_transformers_cannot_read_are_verified_all_the_same(
    tmp_path: Path, kind: str
) -> None:
    source = write_source(tmp_path / "m.gguf", lambda name: kind)
    export_tiny(source, tmp_path / "a", precision="source", accuracy_level=0)
    found = verify(tmp_path / "a", str(source), silent)
    assert found.passed
    assert found.oracle.endswith("on tensors as llorch reads them")


def test_a_notice_says_what_form_each_type_gets(tmp_path: Path) -> None:
    source = write_source(tmp_path / "m.gguf", lambda name: "IQ4_NL" if "ffn" in name else "Q2_K")
    options = ExportOptions(source=str(source), output=tmp_path / "a", precision="source")
    (notice,) = export(options, silent).notices
    assert "6 of IQ4_NL (8 bits, block 32, exactly)" in notice
    assert "10 of Q2_K (8 bits, block 16, offsets rounded to part of a step)" in notice


@pytest.mark.parametrize("kind", AFFINE)
@pytest.mark.parametrize("overrides", [SHAPE, TIED], ids=["plain", "tied"])
def test_affine_types_diverge_from_their_dequantised_weights_by_next_to_nothing(
    tmp_path: Path, kind: str, overrides: dict[str, Any]
) -> None:
    source = write_source(tmp_path / "m.gguf", lambda name: kind, overrides)
    found = all_logits(export_tiny(source, tmp_path / "a", precision="source", accuracy_level=0), IDS)
    assert 0 < kl(exact_logits(source, overrides), found) < KL_WIDENED_OFFSETS


@pytest.mark.parametrize("kind", [*SYMMETRIC, *AFFINE])
def test_the_default_level_adds_what_int8_activations_cost(tmp_path: Path, kind: str) -> None:
    source = write_source(tmp_path / "m.gguf", lambda name: kind, TIED)
    artifact = export_tiny(source, tmp_path / "a", precision="source")
    assert artifact.manifest.recipe.accuracy_level == 4
    assert 0 < kl(exact_logits(source, TIED), all_logits(artifact, IDS)) < KL_LEVEL_4_INT8


def test_every_matrix_keeps_its_type_in_a_mixed_file(tmp_path: Path) -> None:
    def choose(name: str) -> str | None:
        return None if name == "blk.0.ffn_up.weight" else MIXED.get(name, "Q4_K")

    source = write_source(tmp_path / "m.gguf", choose)
    artifact = export_tiny(source, tmp_path / "a", precision="source", accuracy_level=0)
    assert kl(exact_logits(source), all_logits(artifact, IDS)) < KL_WIDENED_OFFSETS
    found = {name: (n["bits"], n["block_size"]) for name, n in nodes(artifact, "MatMulNBits").items()}
    assert found["logits"] == (8, 16)
    assert found["model.layers.0.self_attn.qkv_proj"] == (8, 16)  # q and k follow v
    assert found["model.layers.1.self_attn.qkv_proj"] == (8, 32)
    assert found["model.layers.1.mlp.gate_proj"] == (4, 32)
    assert Counter(found.values()) == {(8, 16): 3, (8, 32): 6, (4, 32): 1}
    assert list(nodes(artifact, "MatMul")) == ["model.layers.0.mlp.up_proj"]
    assert artifact.manifest.recipe.block_size is None


def test_a_projection_that_is_partly_float_is_float_as_a_whole(tmp_path: Path) -> None:
    source = write_source(tmp_path / "m.gguf", lambda name: None if "attn_k" in name else "Q8_0")
    artifact = export_tiny(source, tmp_path / "a", precision="source", accuracy_level=0)
    assert list(nodes(artifact, "MatMul")) == [f"model.layers.{i}.self_attn.qkv_proj" for i in range(2)]
    np.testing.assert_allclose(
        all_logits(artifact, IDS), exact_logits(source), atol=QUANTISED_LOGITS_LEVEL_0, rtol=0
    )


@pytest.mark.parametrize("weight_type", ["F32", "F16", "BF16"])
def test_float_files_stay_float(tmp_path: Path, weight_type: str) -> None:
    source = write_gguf(tmp_path / "m.gguf", weight_type=weight_type)
    found = export_tiny(source, tmp_path / "source", precision="source")
    expected = export_tiny(source, tmp_path / "fp32", precision="fp32")
    assert contents(found.folder)["model.onnx.data"] == contents(expected.folder)["model.onnx.data"]


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0", "Q6_K", "Q4_K"])
def test_a_tied_table_is_stored_once_in_its_own_type(tmp_path: Path, kind: str) -> None:
    sizes = []
    for name, overrides in (("tied", TIED), ("untied", SHAPE)):
        source = write_source(tmp_path / f"{name}.gguf", lambda _: kind, overrides)
        artifact = export_tiny(source, tmp_path / name, precision="source")
        assert len(nodes(artifact, "GatherBlockQuantized")) == 1
        sizes.append((artifact.folder / "model.onnx.data").stat().st_size)
    bytes_per_weight = {"Q8_0": 1 + 4 / 32, "Q4_0": 0.5 + 4 / 32, "Q6_K": 1 + 4 / 16, "Q4_K": 1 + 5 / 32}
    assert sizes[1] - sizes[0] == 512 * 256 * bytes_per_weight[kind]


def test_exporting_twice_gives_the_same_bytes_whatever_the_chunks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = write_source(tmp_path / "m.gguf", lambda name: MIXED.get(name, "Q4_K"))
    first = contents(export_tiny(source, tmp_path / "a", precision="source").folder)
    monkeypatch.setattr("llorch_export.graph.blocks.CHUNK_ELEMENTS", 10 * 256)  # not a whole head
    assert contents(export_tiny(source, tmp_path / "b", precision="source").folder) == first


def test_a_preview_knows_the_size(tmp_path: Path) -> None:
    source = write_source(tmp_path / "m.gguf", lambda name: MIXED.get(name, "Q5_K"))
    artifact = export_tiny(source, tmp_path / "a", precision="source")
    found = preview(ExportOptions(source=str(source), output=Path(), precision="source"))
    assert found["data_bytes"] == (artifact.folder / "model.onnx.data").stat().st_size


@pytest.mark.parametrize(
    "run", [preview, lambda options: export_tiny(Path(options.source), options.output, precision="source")]
)
def test_a_hugging_face_folder_has_no_blocks(tmp_path: Path, run: Callable[[ExportOptions], object]) -> None:
    folder = write_hf_folder(tmp_path / "model")
    with pytest.raises(
        UsageError,
        match=r"--precision source .* GGUF file or .*, and .*model is a Hugging Face folder of plain",
    ):
        run(ExportOptions(source=str(folder), output=tmp_path / "a", precision="source"))
    assert not (tmp_path / "a").exists()


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_1", "Q6_K"])
def test_scales_that_are_not_finite_are_reported(tmp_path: Path, kind: str) -> None:
    def blocks(name: str, rows: int, columns: int) -> tuple[str, npt.NDArray[np.uint8]]:
        data = random_blocks(kind, rows, columns, seed=1)
        if name == "blk.1.ffn_up.weight":
            place = 208 if kind == "Q6_K" else 0
            data[3, place : place + 2] = np.array([np.inf], "<f2").view(np.uint8)
        return kind, data

    source = write_gguf(tmp_path / "m.gguf", SHAPE, blocks=blocks)
    with pytest.raises(ArtifactError, match=r"model.layers.1.mlp.up_proj.scales: \d+ of \d+ values are NaN"):
        export_tiny(source, tmp_path / "a", precision="source")


def test_verify_fails_beyond_the_limit_that_was_measured(tmp_path: Path) -> None:
    source = write_source(tmp_path / "m.gguf", lambda name: "Q8_0")
    assert (
        export_tiny(source, tmp_path / "a", precision="source").manifest.recipe.kl_limit == KL_LIMIT["source"]
    )
