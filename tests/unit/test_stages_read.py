"""What is told of stages: by inspect, by their inner values, and by the notice of float16's range."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import onnx
import pytest

from llorch_export.graph.stage_choice import StageChoice
from llorch_export.inspect.contents import Contents, contents
from llorch_export.options import ExportOptions
from llorch_export.pipeline import export
from llorch_export.terminal.inspect import describe
from llorch_export.verify.layers.graph import run_observed
from llorch_serve.artifact.folder import Artifact
from llorch_serve.errors import ArtifactError
from support.builders.checkpoints import Weights, write_hf_folder
from support.builders.tiny_exports import export_tiny, random_ids, silent

SHAPE = {"num_hidden_layers": 5, "tie_word_embeddings": True}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_hf_folder(tmp_path_factory.mktemp("source") / "model", SHAPE)


@pytest.fixture(scope="module")
def whole(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    return export_tiny(source, tmp_path_factory.mktemp("whole") / "out", precision="int8")


@pytest.fixture(scope="module")
def staged(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    choice = StageChoice(2, (2,))
    return export_tiny(source, tmp_path_factory.mktemp("staged") / "out", precision="int8", stages=choice)


@pytest.fixture(scope="module")
def told(staged: Artifact) -> Contents:
    return contents(staged)


def test_each_stage_is_told_what_it_needs(told: Contents, staged: Artifact) -> None:
    sizes = {entry.path: entry.bytes for entry in staged.manifest.files}
    first, last = told.stages
    assert (first.layers, last.layers) == ((0, 2), (2, 5))
    assert first.weight_bytes == sizes["stage0.onnx.data"] + sizes["table.onnx.data"]
    assert last.weight_bytes == sizes["stage1.onnx.data"] + sizes["table.onnx.data"]
    # Keys and values, heads, head_dim, a byte each; two layers or three, and 128 positions.
    assert (first.kv_bytes_per_token, last.kv_bytes_per_token) == (2 * 2 * 2 * 16, 3 * 2 * 2 * 16)
    assert last.kv_bytes == 128 * last.kv_bytes_per_token
    assert first.kv_bytes_per_token + last.kv_bytes_per_token == told.kv_bytes_per_token
    assert (first.taken_bytes_per_token, last.taken_bytes_per_token) == (0, 2 * 64 * 4)
    assert set(last.files) == {
        "stage1.onnx",
        "stage1.onnx.data",
        "stage1_decode.onnx",
        "stage1_kv_scales.bin",
        "table.onnx.data",
    }


@pytest.mark.parametrize("stage", [0, 1])
def test_activations_are_those_of_the_widest_place_in_a_call(told: Contents, stage: int) -> None:
    """Gate, up and their product beside the residual stream, [tokens, 96] and [tokens, 64], and the scores of
    all heads.
    """
    found = told.stages[stage]
    scores = 4 * 4 * found.tokens * 128
    assert found.tokens == 128
    assert found.activation_bytes is not None
    values = 4 * 128 * (3 * 96 + 64)
    assert values <= found.activation_bytes - scores <= values + 128  # and the few numbers of a call


def test_the_whole_is_told_as_of_one_graph_but_for_rotary_tables(told: Contents, whole: Artifact) -> None:
    one = contents(whole)
    assert one.stages == ()
    assert one.graph is not None
    assert told.graph is not None
    assert told.graph.modules == one.graph.modules
    assert told.graph.ops == one.graph.ops
    rotary = "rotary tables"
    assert told.graph.weight_bytes == one.graph.weight_bytes | {rotary: 2 * one.graph.weight_bytes[rotary]}
    assert (told.kv_bytes_per_token, told.context_length) == (one.kv_bytes_per_token, one.context_length)


@pytest.mark.parametrize("kind", [0, 99])
def test_a_graph_whose_values_have_no_known_type_is_refused(
    staged: Artifact, tmp_path: Path, kind: int
) -> None:
    folder = tmp_path / "out"
    shutil.copytree(staged.folder, folder)
    path = folder / (staged.manifest.stages or ())[1].graph
    model = onnx.load(path, load_external_data=False)
    value = model.graph.value_info.add(name="odd")
    value.type.tensor_type.elem_type = kind
    path.write_bytes(model.SerializeToString())
    with pytest.raises(ArtifactError, match="'odd' has no type"):
        contents(Artifact(folder, staged.manifest))


def test_people_read_it_in_lines(told: Contents) -> None:
    text = describe(told)
    assert "stage 0       layers 0 to 1: weights " in text
    assert "stage 1       layers 2 to 4: weights " in text
    assert "takes 512 bytes a token" in text
    assert "stage1_decode.onnx" in text


def test_inner_values_are_those_of_one_graph_under_the_same_names(whole: Artifact, staged: Artifact) -> None:
    ids = random_ids(20)
    expected, found = (run_observed(artifact, ids, threads=1) for artifact in (whole, staged))
    assert list(found.values) == list(expected.values)
    for name, value in expected.values.items():
        np.testing.assert_array_equal(found.values[name], value, err_msg=name)
    assert found.attention == expected.attention
    assert found.tables.keys() == expected.tables.keys()


def test_weights_beyond_float16_are_found_in_stages_too(tmp_path: Path) -> None:
    def grown(weights: Weights) -> None:
        weights["model.layers.2.mlp.down_proj.weight"] *= 2e4

    source = write_hf_folder(tmp_path / "model", SHAPE, edit=grown)
    options = ExportOptions(str(source), tmp_path / "out", precision="fp16", stages=StageChoice(2))
    notices = export(options, silent).notices
    assert any("of the 65,504 that float16 holds" in notice for notice in notices), notices
