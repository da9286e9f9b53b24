"""int8 with activations rounded row by row: the whole decoder against numpy, and every row for itself."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import pytest

from llorch_export.inspect.contents import contents
from llorch_export.inspect.modules import stored_modules
from llorch_export.options import Rule
from llorch_serve.artifact.folder import Artifact
from llorch_serve.artifact.manifest import Activations
from llorch_serve.fidelity.divergence import DivergenceSum
from support.builders.checkpoints import tiny_config, tiny_llama_config, tiny_weights, write_hf_folder
from support.builders.tiny_exports import all_logits, export_tiny, open_tiny, random_ids
from support.oracles import numpy_llama
from support.oracles.integer_numpy import Matrix, quarter_product, row_product
from tolerances import KL_ROW_CODES, KL_ROW_TINY

MODELS: dict[str, dict[str, Any]] = {
    "plain": {},
    "tied": {"tie_word_embeddings": True},
    "biases": {"attention_bias": True, "mlp_bias": True},
    # 70 and 90 are multiples of neither 4 nor 32
    "odd sizes": {
        "hidden_size": 70,
        "intermediate_size": 90,
        "head_dim": 16,
        "num_attention_heads": 5,
        "num_key_value_heads": 1,
    },
}
IDS = random_ids(100)


def export_rows(
    tmp_path: Path, name: str = "plain", activations: Activations = "row", **overrides: Any
) -> Artifact:
    """Export a tiny model with an fp32 head, so that every rounding is the layers' own."""
    source = write_hf_folder(tmp_path / "model", MODELS[name] | overrides)
    return export_tiny(
        source, tmp_path / "artifact", precision="int8", head_precision="fp32", activations=activations
    )


def expected_logits(
    overrides: dict[str, Any],
    *,
    rounded: bool,
    product: Callable[[Matrix, Matrix], Matrix] = row_product,
    head: bool = False,
) -> npt.NDArray[np.float32]:
    weights = tiny_weights(tiny_llama_config(**overrides))

    def multiply(x: numpy_llama.Array, module: str) -> numpy_llama.Array:
        weight = weights[f"{module}.weight"]
        if not rounded or (module in ("lm_head", "model.embed_tokens") and not head):
            return x @ weight.astype(np.float64).T
        return product(x.astype(np.float32), weight).astype(np.float64)

    logits = numpy_llama.forward(tiny_config(**overrides), weights, IDS, multiply=multiply)
    return logits.astype(np.float32)


def kl(reference: npt.NDArray[np.float32], model: npt.NDArray[np.float32]) -> float:
    total = DivergenceSum()
    total.add(reference, model)
    return total.result().kl


@pytest.mark.parametrize("name", MODELS)
def test_the_decoder_computes_what_numpy_computes_in_whole_numbers(tmp_path: Path, name: str) -> None:
    found = all_logits(export_rows(tmp_path, name), IDS)
    # float32 norms may move a value over the edge between two codes, so not all logits agree to the last
    # bits.
    assert kl(expected_logits(MODELS[name], rounded=True), found) < KL_ROW_CODES
    unrounded = kl(expected_logits(MODELS[name], rounded=False), found)
    assert 10 * KL_ROW_CODES < unrounded < KL_ROW_TINY


@pytest.mark.parametrize("name", ["plain", "biases"])
def test_the_decoder_with_quarters_is_numpy_with_quarters(tmp_path: Path, name: str) -> None:
    found = all_logits(export_rows(tmp_path, name, "quarters"), IDS)
    assert kl(expected_logits(MODELS[name], rounded=True, product=quarter_product), found) < KL_ROW_CODES
    assert kl(expected_logits(MODELS[name], rounded=True), found) > 2 * KL_ROW_CODES


@pytest.mark.parametrize(
    ("name", "form", "product"),
    [
        ("plain", "row", row_product),
        ("odd sizes", "row", row_product),
        ("plain", "quarters", quarter_product),
    ],
)
def test_a_head_in_whole_bytes_is_numpy_s(
    tmp_path: Path, name: str, form: Activations, product: Callable[[Matrix, Matrix], Matrix]
) -> None:
    source = write_hf_folder(tmp_path / "model", MODELS[name])
    head = Rule(("lm_head",), precision="int8", activations=form)
    artifact = export_tiny(
        source, tmp_path / "a", precision="int8", head_precision="fp32", activations=form, rules=(head,)
    )
    found = all_logits(artifact, IDS)
    assert kl(expected_logits(MODELS[name], rounded=True, head=True, product=product), found) < KL_ROW_CODES
    assert kl(expected_logits(MODELS[name], rounded=True), found) > 2 * KL_ROW_CODES
    model = onnx.load(artifact.graph_path, load_external_data=False)
    (stored,) = (module for module in stored_modules(model) if module.name == "lm_head")
    hidden = artifact.manifest.model.hidden_size
    assert (stored.precision, stored.block_size, stored.bits_per_weight) == ("int8", None, 8 + 32 / hidden)
    config = artifact.manifest.model
    tables = contents(artifact).graph.weight_bytes["embedding and head"]
    assert tables == (4 + 1) * config.vocab_size * hidden  # an fp32 embedding, and a head of bytes


def test_a_row_does_not_depend_on_how_a_prompt_is_cut(tmp_path: Path) -> None:
    ids = random_ids(512)
    source = write_hf_folder(tmp_path / "model", {"max_position_embeddings": 512})
    session = open_tiny(
        export_tiny(source, tmp_path / "artifact", precision="int8", activations="row"), slots=1
    )
    whole = session.prefill(0, ids, 0, range(len(ids))).copy()
    start = 0
    # Never one row, nor one beyond a multiple of 32: attention over a single row differs in its last bits.
    for count in (2, 3, 7, 32, 67, 145, 256):
        part = session.prefill(0, ids[start : start + count], start, range(count))
        np.testing.assert_array_equal(part, whole[start : start + count])
        start += count
    assert start == len(ids)


def test_a_decoded_row_is_the_same_alone_and_among_others(tmp_path: Path) -> None:
    session = open_tiny(export_rows(tmp_path), slots=8)
    for slot in range(8):
        session.prefill(slot, random_ids(5 + 3 * slot, seed=slot), 0)
    lengths = [6 + 3 * slot for slot in range(8)]
    together = session.decode(IDS[:8], lengths).copy()
    for count in (1, 2, 3, 7):
        np.testing.assert_array_equal(session.decode(IDS[:count], lengths[:count]), together[:count])
    session.copy_slot(7, 0, lengths[7])  # the last one alone, in the first slot
    np.testing.assert_array_equal(session.decode([IDS[7]], [lengths[7]])[0], together[7])


def test_token_by_token_is_the_whole_prompt(tmp_path: Path) -> None:
    session = open_tiny(export_rows(tmp_path), kv_dtype="float32")
    full = session.prefill(0, IDS, 0, range(len(IDS))).copy()
    session.prefill(0, IDS[:10], 0)
    for position in range(10, 60):
        found = session.decode([IDS[position]], [position + 1])[0]
        # Attention over one row differs in its last bits, which may move an activation to the next code.
        assert kl(full[position][None], found[None]) < KL_ROW_CODES


def test_layers_are_whole_bytes_and_the_head_keeps_its_blocks(tmp_path: Path) -> None:
    source = write_hf_folder(tmp_path / "model", {"attention_bias": True})
    artifact = export_tiny(source, tmp_path / "artifact", precision="int8", block_size=64, activations="row")
    graph = onnx.load(artifact.graph_path, load_external_data=False).graph
    ops = [node.op_type for node in graph.node]
    assert ops.count("MatMulIntegerToFloat") == 2 * 5
    assert ops.count("QuantizeLinear") == 2 * 4  # gate and up share theirs
    assert [node.output[0] for node in graph.node if node.op_type == "MatMulNBits"] == ["logits"]
    assert all(len(node.input) == 5 for node in graph.node if node.op_type == "MatMulIntegerToFloat")
    assert "MatMul" not in ops
    onnx.checker.check_model(str(artifact.graph_path))


def test_quarters_lie_over_the_bytes_of_whole_rows(tmp_path: Path) -> None:
    row, quarters = (export_rows(tmp_path / form, activations=form) for form in ("row", "quarters"))
    listed = [
        stored_modules(onnx.load(artifact.graph_path, load_external_data=False))
        for artifact in (row, quarters)
    ]
    assert listed[0] == listed[1]
    data = [(artifact.folder / "model.onnx.data").read_bytes() for artifact in (row, quarters)]
    assert data[0] == data[1]


def test_exporting_twice_gives_the_same_files(tmp_path: Path) -> None:
    source = write_hf_folder(tmp_path / "model")
    first, second = (
        export_tiny(source, tmp_path / name, precision="int8", activations="row") for name in "ab"
    )
    assert [entry.sha256 for entry in first.manifest.files] == [
        entry.sha256 for entry in second.manifest.files
    ]
