"""Artifacts in stages: where a model is cut, what the manifest says of each, and which of it is believed."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import onnx
import pytest

from llorch_export.graph.stage_choice import StageChoice, check_stages, parse_stages
from llorch_export.graph.stage_sizes import Sizes, balanced, cut
from llorch_export.options import ExportOptions
from llorch_export.preview import preview
from llorch_serve.artifact.folder import MANIFEST_NAME, Artifact, load_artifact
from llorch_serve.artifact.manifest import PLAIN_SCHEMA_VERSION, SCHEMA_VERSION, cache_names
from llorch_serve.artifact.stages import stage_artifacts
from llorch_serve.errors import ArtifactError, UsageError
from support.builders.checkpoints import write_hf_folder
from support.builders.tiny_exports import export_tiny

Edit = Callable[[dict[str, Any]], object]


# -- the flag


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (None, None),
        ("2", StageChoice(2)),
        ("3,at=1,2", StageChoice(3, (1, 2))),
        (" 2, at=7", StageChoice(2, (7,))),
    ],
)
def test_the_flag_says_how_many_and_where(text: str | None, found: StageChoice | None) -> None:
    assert parse_stages(text) == found
    if found is not None:
        assert parse_stages(str(found)) == found


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "expected a number of stages"),
        ("two", "expected a number of stages"),
        ("2,at=", "expected a number of stages"),
        ("2;at=1", "expected a number of stages"),
        ("-2", "expected a number of stages"),
        ("1", "needs no --stages"),
        ("0", "expected 2 to 100"),
        ("101", "expected 2 to 100"),
        ("9" * 5000, "expected a number of stages"),
        ("3,at=1", "2 layers, and at= names 1"),
        ("2,at=1,2", "1 layers, and at= names 2"),
    ],
)
def test_what_the_flag_cannot_say(text: str, said: str) -> None:
    with pytest.raises(UsageError, match=said) as caught:
        parse_stages(text)
    assert len(str(caught.value)) < 400


@pytest.mark.parametrize("text", ["5", "2,at=0", "2,at=4", "3,at=2,2", "3,at=3,1", "3,at=1,9"])
def test_a_model_is_not_cut_where_it_has_no_layer(text: str) -> None:
    choice = parse_stages(text)
    assert choice is not None
    with pytest.raises(UsageError, match=r"expected at most 4|from 1 to 3 in ascending order"):
        check_stages(choice, 4)


# -- the cut


def largest(found: Sizes, starts: tuple[int, ...]) -> int:
    ends = (*starts[1:], len(found.layers))
    return max(found.of(range(start, end)) for start, end in zip(starts, ends, strict=True))


@pytest.mark.parametrize("seed", range(6))
def test_the_largest_stage_is_as_small_as_can_be(seed: int) -> None:
    random = np.random.default_rng(seed)
    layers = tuple(random.integers(1, 50, 9).tolist())
    found = Sizes(int(random.integers(0, 150)), layers, int(random.integers(0, 150)))
    for count in range(1, 10):
        every = ((0, *cuts) for cuts in itertools.combinations(range(1, 9), count - 1))
        assert largest(found, balanced(found, count)) == min(largest(found, starts) for starts in every)


def test_equal_layers_are_shared_out_evenly_beside_the_ends() -> None:
    assert balanced(Sizes(0, (1,) * 12, 0), 4) == (0, 3, 6, 9)
    assert balanced(Sizes(3, (1,) * 12, 3), 3) == (0, 3, 9)  # two tables of the size of three layers
    assert cut(Sizes(0, (1,) * 4, 0), StageChoice(2, (1,))) == (range(1), range(1, 4))


# -- the artifact


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    folder = tmp_path_factory.mktemp("stages")
    source = write_hf_folder(folder / "model", {"num_hidden_layers": 3, "tie_word_embeddings": True})
    prompts = ExportOptions("", Path(), precision="int8", activations="row")
    return export_tiny(source, folder / "out", precision="int8", prompts=prompts, stages=StageChoice(2, (2,)))


def test_an_older_llorch_sees_a_newer_schema(exported: Artifact, tmp_path: Path) -> None:
    assert exported.manifest.schema_version == SCHEMA_VERSION > PLAIN_SCHEMA_VERSION
    plain = export_tiny(write_hf_folder(tmp_path / "model"), tmp_path / "out").manifest
    assert plain.schema_version == PLAIN_SCHEMA_VERSION
    assert "stages" not in json.loads((tmp_path / "out" / MANIFEST_NAME).read_bytes())


def test_each_stage_is_an_artifact_of_its_layers(exported: Artifact) -> None:
    first, last = (stage.manifest for stage in stage_artifacts(exported))
    assert (first.kv.layers, last.kv.layers) == (2, 1)
    assert (first.schema_version, first.stages) == (PLAIN_SCHEMA_VERSION, msgspec.UNSET)
    crossing = {"residual.2", "delta.2"}
    assert {spec.name for spec in last.inputs} - cache_names(last.kv) == {
        *crossing,
        "seqlens_k",
        "total_sequence_length",
        "logits_indices",
    }
    assert {spec.name for spec in first.outputs} - cache_names(first.kv) == crossing
    assert {spec.shape for spec in last.inputs if spec.name in crossing} == {("batch", "tokens", 64)}
    for view in (first, last):
        assert view.prompts is not None
        assert view.int8_cache is not None
        own = {e.path for e in view.files}
        assert {view.graph, view.int8_cache.decode_graph, view.int8_cache.scales} < own
        assert {view.prompts.graph, view.prompts.data, "tokenizer.json", "chat_template.jinja"} < own
        for name in (view.graph, view.int8_cache.decode_graph, view.prompts.graph):
            model = onnx.load(exported.folder / name, load_external_data=False)
            read = {p.value for t in model.graph.initializer for p in t.external_data if p.key == "location"}
            assert read <= own, name
    shared = {e.path for e in first.files} & {e.path for e in last.files}
    assert shared == {"table.onnx.data", "tokenizer.json", "chat_template.jinja"}


def test_an_artifact_of_one_graph_is_its_own_stage(tmp_path: Path) -> None:
    artifact = export_tiny(write_hf_folder(tmp_path / "model"), tmp_path / "out")
    assert stage_artifacts(artifact) == (artifact,)


def test_nothing_is_left_of_the_graph_that_was_measured(exported: Artifact) -> None:
    listed = {MANIFEST_NAME, *(entry.path for entry in exported.manifest.files)}
    assert {path.name for path in exported.folder.iterdir()} == listed
    assert not {"model.onnx", "model.onnx.data"} & listed
    load_artifact(exported.folder, verify_hashes=True)


def test_every_weight_is_written_once(exported: Artifact, tmp_path: Path) -> None:
    """In one file, that of a stage or of the table, but for rotary tables."""
    names: list[str] = []
    for stage in exported.manifest.stages or ():
        graph = onnx.load(exported.folder / stage.graph, load_external_data=False).graph
        for tensor in graph.initializer:
            place = {entry.key: entry.value for entry in tensor.external_data}
            if place.get("location") == stage.data and not tensor.name.startswith("rotary."):
                names.append(tensor.name)
    assert len(names) == len(set(names))
    assert not any(name.startswith("model.embed_tokens") for name in names)


def crossing(manifest: dict[str, Any], only: str | None = None, **said: Any) -> None:
    """Say something else of what crosses the cut, on both sides. only: of the tensor with this name."""
    first, last = manifest["stages"]
    for spec in (*first["outputs"], *last["inputs"]):
        if len(spec["shape"]) == 3 and only in (None, spec["name"]):
            spec.update(said)
    last["takes"] = [said.get("name", name) if name == only else name for name in last["takes"]]


def nothing_crosses(manifest: dict[str, Any]) -> None:
    first, last = manifest["stages"]
    taken = last.pop("takes")
    first["outputs"] = [spec for spec in first["outputs"] if spec["name"] not in taken]


def twice(manifest: dict[str, Any], field: str) -> None:
    first, last = manifest["stages"]
    last[field] = first[field]


EDITS: dict[str, tuple[Edit, str]] = {
    "one stage": (lambda m: m["stages"].pop(), "stages"),
    "no stages": (lambda m: m["stages"].clear(), "stages"),
    "stages in an old schema": (lambda m: m.update(schema_version=1), "schema version 1"),
    "stages turned round": (lambda m: m["stages"].reverse(), "stage 0 has layers 2 to 3"),
    "a layer left out": (lambda m: m["stages"][1].update(first_layer=3), "layers 3 to 3"),
    "a layer twice": (lambda m: m["stages"][1].update(first_layer=1), "layers 1 to 3"),
    "a layer more": (lambda m: m["stages"][1].update(end_layer=4), "some of 3"),
    "a negative layer": (lambda m: m["stages"][0].update(first_layer=-1), "first_layer"),
    "no end": (lambda m: m["kv"].update(layers=2**31 - 1), "past_key_values.3.key"),
    "a graph that is not listed": (lambda m: m["stages"][1].update(graph="other.onnx"), "other.onnx"),
    "weights that are not listed": (lambda m: m["stages"][1].update(data="../secret"), "../secret"),
    "shared weights outside": (lambda m: m["stages"][1].update(shared_data=["/etc/passwd"]), "/etc/passwd"),
    "no scales": (lambda m: m["stages"][1].pop("scales"), "stage 1 differs"),
    "no graph for prompts": (lambda m: m["stages"][0].pop("prompts_graph"), "stage 0 differs"),
    "prompts that the artifact has not": (lambda m: m.update(prompts=None), "a graph for prompts"),
    "nothing taken": (lambda m: m["stages"][1].pop("takes"), "stage 1 takes nothing"),
    "something else taken": (lambda m: m["stages"][1].update(takes=["residual.2"]), "takes residual.2"),
    "another type crosses": (
        lambda m: next(s for s in m["stages"][1]["inputs"] if s["name"] == "delta.2").update(dtype="float16"),
        "is given something else",
    ),
    "another shape crosses": (
        lambda m: next(s for s in m["stages"][0]["outputs"] if s["name"] == "delta.2").update(shape=[1, 2]),
        "is given something else",
    ),
    "a cache that is not there": (
        lambda m: m["stages"][0].update(
            inputs=[s for s in m["stages"][0]["inputs"] if ".1.key" not in s["name"]]
        ),
        "past_key_values.1.key",
    ),
    "a width without a number": (lambda m: crossing(m, shape=["batch", "tokens", "x"]), "crosses"),
    "two widths": (lambda m: crossing(m, "delta.2", shape=["batch", "tokens", "x"]), "crosses"),
    "no rows": (lambda m: crossing(m, shape=[]), "crosses"),
    "another type on both sides": (lambda m: crossing(m, dtype="int64"), "crosses"),
    "nothing crosses": (lambda m: nothing_crosses(m), "crosses"),
    "logits cross": (lambda m: crossing(m, "delta.2", name="logits"), "crosses"),
    "a stage's graph twice": (lambda m: twice(m, "graph"), "stage 1 has stage0.onnx"),
    "a stage's weights twice": (lambda m: twice(m, "data"), "stage 1 has stage0.onnx.data"),
    "a stage's scales twice": (lambda m: twice(m, "scales"), "stage 1 has stage0_kv_scales.bin"),
    "another stage's weights as shared": (
        lambda m: m["stages"][1].update(shared_data=["stage0.onnx.data"]),
        "stage 1 has stage0.onnx.data",
    ),
    "no logits": (
        lambda m: next(s for s in m["stages"][1]["outputs"] if s["name"] == "logits").update(name="odds"),
        "expected logits",
    ),
    "an unknown field": (lambda m: m["stages"][0].update(invented=1), "invented"),
    "vectors of texts in stages": (lambda m: m.update(embedding={"pooling": "last"}), "has stages"),
    "another's graph": (lambda m: m.update(layout="optimum"), "has stages"),
}


@pytest.mark.parametrize(("edit", "named"), EDITS.values(), ids=EDITS)
def test_stages_that_make_no_model_are_refused(
    exported: Artifact, tmp_path: Path, edit: Edit, named: str
) -> None:
    document = json.loads((exported.folder / MANIFEST_NAME).read_bytes())
    edit(document)
    for path in exported.folder.iterdir():
        (tmp_path / path.name).hardlink_to(path)
    (tmp_path / MANIFEST_NAME).unlink()
    (tmp_path / MANIFEST_NAME).write_text(json.dumps(document))
    with pytest.raises(ArtifactError) as caught:
        load_artifact(tmp_path)
    assert named in str(caught.value)
    assert "xport the model again" in str(caught.value)


@pytest.mark.parametrize("options", [{"precision": "int8"}, {"precision": "fp32", "stages": StageChoice(2)}])
def test_a_preview_says_where_a_model_would_be_cut(tmp_path: Path, options: dict[str, Any]) -> None:
    source = write_hf_folder(tmp_path / "model", {"num_hidden_layers": 4})
    found = preview(ExportOptions(str(source), tmp_path / "out", **options))["stages"]
    exported = export_tiny(source, tmp_path / "out", **options).manifest.stages or ()
    assert found == [{"first_layer": s.first_layer, "end_layer": s.end_layer} for s in exported]
    assert bool(found) is ("stages" in options)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(
    "options",
    [
        {"precision": "fp32"},
        {"precision": "int8", "activations": "static", "transforms": ("rotate",), "head_precision": "fp32"},
    ],
    ids=["fp32", "rotated"],
)
def test_no_layer_moved_across_the_cut_would_make_the_largest_stage_smaller(
    tmp_path: Path, options: dict[str, Any], *, tied: bool
) -> None:
    """Of layers that are small beside the tables, which lie in one stage or in both."""
    small = {"num_hidden_layers": 8, "intermediate_size": 32, "num_attention_heads": 2, "head_dim": 16}
    shape = small | {"num_key_value_heads": 1, "tie_word_embeddings": tied}
    staged = export_tiny(
        write_hf_folder(tmp_path / "model", shape), tmp_path / "out", stages=StageChoice(2), **options
    )
    sizes = {entry.path: entry.bytes for entry in staged.manifest.files}
    stages = staged.manifest.stages or ()
    first, last = (sum(sizes[name] for name in (s.data, *s.shared_data)) for s in stages)
    graph = onnx.load(staged.folder / stages[0].graph, load_external_data=False).graph
    layer = sum(
        int(entry.value)
        for tensor in graph.initializer
        if tensor.name.startswith("model.layers.0.")
        for entry in tensor.external_data
        if entry.key == "length"
    )
    assert layer < sizes[stages[0].data] / 3
    slack = 64 * 40  # of arrays that begin at whole cache lines
    assert max(first, last) <= min(max(first - layer, last + layer), max(first + layer, last - layer)) + slack
