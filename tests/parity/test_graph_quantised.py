"""int8 and int4 graphs compute the fp32 model on dequantised weights; every option has its effect and no
other.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import pytest

from llorch_export.formats.module import ModuleFormat
from llorch_export.formats.precisions import BITS
from llorch_export.graph.blocks import quantised
from llorch_export.options import ExportOptions
from llorch_export.recipes.base import base_recipe
from llorch_serve.artifact.folder import Artifact
from llorch_serve.artifact.manifest import Precision, Recipe
from llorch_serve.fidelity.divergence import DivergenceSum
from support.builders.checkpoints import (
    Weights,
    tiny_config,
    tiny_llama_config,
    tiny_weights,
    write_hf_folder,
)
from support.builders.tiny_exports import all_logits, export_tiny, open_tiny, random_ids
from support.oracles import numpy_llama
from support.oracles.quantised_numpy import dequantise
from tolerances import (
    KL_LEVEL_4_INT4,
    KL_LEVEL_4_INT8,
    QUANTISED_LOGITS_LEVEL_0,
    STEPWISE_LOGITS,
)

MODELS: dict[str, dict[str, Any]] = {
    "plain": {},
    "tied": {"tie_word_embeddings": True},
    "biases": {"attention_bias": True, "mlp_bias": True},
    # 72 and 88 are no multiples of 32: rows are padded, embedding rows included
    "padded": {"hidden_size": 72, "intermediate_size": 88, "head_dim": 16},
    "padded and tied": {
        "hidden_size": 72,
        "intermediate_size": 88,
        "head_dim": 16,
        "tie_word_embeddings": True,
    },
}
IDS = random_ids(100)


def quantised_weights(overrides: dict[str, Any], recipe: Recipe) -> Weights:
    """Return the weights as the recipe leaves them."""

    def kept(name: str, value: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
        table = name in ("lm_head.weight", "model.embed_tokens.weight")
        here = recipe.head_precision if table else recipe.precision
        if value.ndim == 1 or here == "fp32":
            return value
        block_size = recipe.block_size
        if (
            name.split(".")[-2] in ("q_proj", "k_proj", "v_proj", "down_proj")
            and recipe.fine_block_size is not None
        ):
            block_size = recipe.fine_block_size
        assert block_size is not None
        quantizer = recipe.quantizer if here == "int4" else None
        blocks = quantised(value, ModuleFormat(here, block_size, quantizer, recipe.scale_type))
        return dequantise(blocks, bits=BITS[here], columns=value.shape[1])

    return {name: kept(name, value) for name, value in tiny_weights(tiny_llama_config(**overrides)).items()}


def kl(reference: npt.NDArray[np.float32], model: npt.NDArray[np.float32]) -> float:
    total = DivergenceSum()
    total.add(reference, model)
    return total.result().kl


RECIPES: dict[str, dict[str, Any]] = {
    "int8": {"precision": "int8", "block_size": 32},
    "int4": {"precision": "int4", "quantizer": "affine"},
    "int4 throughout": {
        "precision": "int4",
        "head_precision": "int4",
        "block_size": 32,
        "quantizer": "affine",
    },
    "int4, head int8": {"precision": "int4", "block_size": 16, "quantizer": "nearest"},
    "int4 search, float32 scales": {
        "precision": "int4",
        "head_precision": "int4",
        "quantizer": "search",
        "scale_type": "float32",
    },
    "int4, half-quadratic": {"precision": "int4", "quantizer": "hqq"},
    "int8, head fp32": {"precision": "int8", "head_precision": "fp32", "block_size": 64},
    "int8, bfloat16 scales, finer blocks": {
        "precision": "int8",
        "scale_type": "bfloat16",
        "fine_block_size": 16,
    },
    "fp32, head int8": {"precision": "fp32", "head_precision": "int8", "block_size": 32},
    "fp32, head int4": {
        "precision": "fp32",
        "head_precision": "int4",
        "block_size": 128,
        "quantizer": "affine",
    },
    "int8, head int4": {
        "precision": "int8",
        "head_precision": "int4",
        "block_size": 256,
        "quantizer": "affine",
    },
}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("recipe", RECIPES)
def test_level_0_equals_the_model_on_dequantised_weights(tmp_path: Path, name: str, recipe: str) -> None:
    overrides = MODELS[name]
    source = write_hf_folder(tmp_path / "model", overrides)
    options = RECIPES[recipe] | {"accuracy_level": 0}
    artifact = export_tiny(source, tmp_path / "artifact", **options)
    assert artifact.manifest.recipe == base_recipe(ExportOptions(source="", output=Path(), **options))
    weights = quantised_weights(overrides, artifact.manifest.recipe)
    expected = numpy_llama.forward(tiny_config(**overrides), weights, IDS)
    np.testing.assert_allclose(all_logits(artifact, IDS), expected, atol=QUANTISED_LOGITS_LEVEL_0, rtol=0)


@pytest.mark.parametrize("name", ["plain", "padded and tied", "biases"])
@pytest.mark.parametrize(("precision", "limit"), [("int8", KL_LEVEL_4_INT8), ("int4", KL_LEVEL_4_INT4)])
def test_level_4_diverges_from_level_0_by_little(
    tmp_path: Path, name: str, precision: Precision, limit: float
) -> None:
    source = write_hf_folder(tmp_path / "model", MODELS[name])
    exact, fast = (
        all_logits(
            export_tiny(
                source,
                tmp_path / str(level),
                precision=precision,
                head_precision=precision,
                accuracy_level=level,
            ),
            IDS,
        )
        for level in (0, 4)
    )
    assert 0 < kl(exact, fast) < limit


@pytest.mark.parametrize("precision", ["int8", "int4"])
def test_decode_equals_prefill_at_level_4(tmp_path: Path, precision: Precision) -> None:
    """Activations are rounded row by row, so a row does not depend on its neighbours."""
    artifact = export_tiny(write_hf_folder(tmp_path / "model"), tmp_path / "artifact", precision=precision)
    session = open_tiny(artifact)
    full = session.prefill(0, IDS, 0, range(len(IDS))).copy()
    session.prefill(0, IDS[:10], 0)
    for position in range(10, 60):
        found = session.decode([IDS[position]], [position + 1])[0]
        # A last-bit difference before rounding may move an activation by a whole int8 step.
        assert kl(full[position][None], found[None]) < KL_LEVEL_4_INT8


def test_more_bits_and_smaller_blocks_are_nearer_to_fp32(tmp_path: Path) -> None:
    source = write_hf_folder(tmp_path / "model")
    exact = numpy_llama.forward(tiny_config(), tiny_weights(tiny_llama_config()), IDS).astype(np.float32)

    def divergence(*, tag: str, **options: Any) -> float:
        return kl(exact, all_logits(export_tiny(source, tmp_path / tag, **options), IDS))

    fp32 = divergence(tag="a", precision="fp32")
    int8 = divergence(tag="b", precision="int8")
    int4 = divergence(tag="c", precision="int4", head_precision="int4")
    int4_head8 = divergence(tag="d", precision="int4")
    int4_small = divergence(tag="e", precision="int4", head_precision="int4", block_size=16)
    assert fp32 < 1e-9 < int8 < int4_head8 < int4
    assert int4_small < int4


def nodes(artifact: Artifact, op: str) -> list[dict[str, Any]]:
    graph = onnx.load(artifact.graph_path, load_external_data=False).graph
    return [
        {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute} | {"name": node.name}
        for node in graph.node
        if node.op_type == op
    ]


@pytest.mark.parametrize("level", [0, 4])
@pytest.mark.parametrize("block_size", [16, 64])
def test_level_block_and_bits_reach_every_node(tmp_path: Path, level: int, block_size: int) -> None:
    artifact = export_tiny(
        write_hf_folder(tmp_path / "model"),
        tmp_path / "artifact",
        precision="int4",
        block_size=block_size,
        accuracy_level=level,
    )
    found = nodes(artifact, "MatMulNBits")
    assert len(found) == 2 * 5 + 1
    assert {(n["accuracy_level"], n["block_size"]) for n in found} == {(level, block_size)}
    assert {n["bits"] for n in found if n["name"].startswith("logits")} == {8}
    assert {n["bits"] for n in found if not n["name"].startswith("logits")} == {4}
    (gather,) = nodes(artifact, "GatherBlockQuantized")
    assert (gather["bits"], gather["block_size"]) == (8, block_size)


def test_head_precision_changes_head_and_embedding_only(tmp_path: Path) -> None:
    source = write_hf_folder(tmp_path / "model")
    artifact = export_tiny(source, tmp_path / "artifact", precision="int8", head_precision="fp32")
    assert not nodes(artifact, "GatherBlockQuantized")
    assert len(nodes(artifact, "MatMulNBits")) == 2 * 5
    assert len(nodes(artifact, "Gemm")) == 1


@pytest.mark.parametrize("precision", ["fp32", "int8", "int4"])
def test_tied_tables_are_stored_once(tmp_path: Path, precision: Precision) -> None:
    sizes = {}
    for tied in (True, False):
        source = write_hf_folder(tmp_path / f"model-{tied}", {"tie_word_embeddings": tied})
        artifact = export_tiny(
            source, tmp_path / f"artifact-{tied}", precision=precision, head_precision=precision
        )
        sizes[tied] = (artifact.folder / "model.onnx.data").stat().st_size
    table = {"fp32": 512 * 64 * 4, "int8": 512 * (64 + 2 * 4), "int4": 512 * (32 + 2 + 1)}[precision]
    assert sizes[False] - sizes[True] == table


def test_max_context_cuts_the_tables_and_changes_no_logit(tmp_path: Path) -> None:
    source = write_hf_folder(tmp_path / "model")
    full = export_tiny(source, tmp_path / "full")
    short = export_tiny(source, tmp_path / "short", max_context=32)
    assert (full.manifest.context_length, short.manifest.context_length) == (128, 32)
    sizes = [(a.folder / "model.onnx.data").stat().st_size for a in (full, short)]
    assert sizes[0] - sizes[1] == 2 * (128 - 32) * 8 * 4
    np.testing.assert_allclose(
        all_logits(short, IDS[:32]), all_logits(full, IDS[:32]), atol=STEPWISE_LOGITS, rtol=0
    )
