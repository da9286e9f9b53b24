"""Other tools' folders are told apart, described from their own files, and refused by name where they cannot
be run.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx
import pytest
from onnx import TensorProto, helper

from llorch_serve.artifact.folder import Artifact
from llorch_serve.artifact.kinds import ModelKind
from llorch_serve.artifact.manifest import GenerationDefaults
from llorch_serve.config import SessionConfig
from llorch_serve.errors import ArtifactError, ProviderError, ResourceError, UsageError
from llorch_serve.foreign import files
from llorch_serve.foreign.detect import foreign_kind
from llorch_serve.foreign.growing import plan_growing
from llorch_serve.foreign.model import ForeignModel
from llorch_serve.loading.models import load_model, open_model
from llorch_serve.providers import ProviderChoice
from llorch_serve.sampling.params import check_defaults
from support.builders.checkpoints import (
    BOS_ID,
    CHAT_TEMPLATE,
    EOS_ID,
    TURN_END_ID,
    tiny_weights,
    write_hf_folder,
)
from support.builders.foreign_folders import HEADS, LAYERS, SHAPE, write_genai_folder, write_optimum_folder
from support.builders.linked_folders import as_hub_snapshot, as_volume
from support.builders.tiny_artifact import write_tiny_artifact

GENAI, OPTIMUM = ModelKind.GENAI, ModelKind.OPTIMUM
Edit = Callable[[Path], object]


def described(folder: Path) -> ForeignModel:
    model = load_model(folder)
    assert isinstance(model, ForeignModel)
    return model


def opened(folder: Path) -> object:
    return open_model(load_model(folder), SessionConfig(threads=1, slots=1), lambda _report: None)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[ModelKind, Path]:
    folder = tmp_path_factory.mktemp("made")
    return {GENAI: write_genai_folder(folder / "genai"), OPTIMUM: write_optimum_folder(folder / "optimum")}


@pytest.fixture
def genai(made: dict[ModelKind, Path], tmp_path: Path) -> Path:
    return Path(shutil.copytree(made[GENAI], tmp_path / "model"))


@pytest.fixture
def optimum(made: dict[ModelKind, Path], tmp_path: Path) -> Path:
    return Path(shutil.copytree(made[OPTIMUM], tmp_path / "model"))


# Which kind.


def test_the_maker_is_told_by_the_files(made: dict[ModelKind, Path], tmp_path: Path) -> None:
    assert foreign_kind(made[GENAI]) is GENAI
    assert foreign_kind(made[OPTIMUM]) is OPTIMUM
    assert foreign_kind(write_hf_folder(tmp_path / "checkpoint")) is None
    assert foreign_kind(write_tiny_artifact(tmp_path / "artifact")) is None
    assert foreign_kind(tmp_path / "nowhere") is None
    assert foreign_kind(made[GENAI] / "model.onnx") is None


def test_a_checkpoint_with_a_graph_beside_its_weights_stays_a_checkpoint(tmp_path: Path) -> None:
    folder = write_hf_folder(tmp_path / "checkpoint")
    (folder / "model.onnx").write_bytes(b"")
    assert foreign_kind(folder) is None


def test_an_artifact_that_another_tool_reads_too_is_an_artifact(tmp_path: Path) -> None:
    folder = write_tiny_artifact(tmp_path / "artifact")
    (folder / "genai_config.json").write_text("{}")
    model = load_model(folder)
    assert isinstance(model, Artifact)
    assert model.kind is ModelKind.LLORCH


@pytest.mark.parametrize(
    ("settings", "flag"),
    [
        ({"kv_dtype": "float32"}, "--kv-dtype"),
        ({"single_graph": True}, "--single-graph"),
        ({"batch_invariant": True}, "--batch-invariant"),
        ({"provider": ProviderChoice(library=Path("lib.so"))}, "--ep-library"),
        ({"provider": ProviderChoice(options=("use_arena=0",))}, "--provider-option"),
        ({"provider": ProviderChoice(allow_cpu_nodes=True)}, "--allow-cpu-nodes"),
    ],
)
def test_settings_of_our_own_graphs_are_refused(genai: Path, settings: dict[str, Any], flag: str) -> None:
    with pytest.raises(UsageError, match=f"{flag} has no effect on .*leave it out"):
        open_model(load_model(genai), SessionConfig(**settings), lambda _report: None)


def test_it_runs_on_no_other_provider(genai: Path) -> None:
    chosen = SessionConfig(provider=ProviderChoice("ov"))
    with pytest.raises(ProviderError, match="--provider openvino is for llorch's own artifacts"):
        open_model(load_model(genai), chosen, lambda _report: None)


# What is read.


def test_a_genai_folder_is_described(genai: Path) -> None:
    model = described(genai)
    info = model.manifest
    assert (model.kind, info.model_id, model.shared_cache) == (GENAI, "model", True)
    assert (info.context_length, info.model.vocab_size) == (SHAPE.max_position_embeddings, SHAPE.vocab_size)
    assert (info.bos_token_id, info.eos_token_id) == (BOS_ID, EOS_ID)
    assert info.stop_token_ids == (EOS_ID, TURN_END_ID)
    assert info.generation == GenerationDefaults(temperature=0.0, repetition_penalty=1.0)
    assert model.chat_templates() == {"default": CHAT_TEMPLATE}
    assert model.graph_path == genai / "model.onnx"


def test_an_optimum_folder_is_described(optimum: Path) -> None:
    model = described(optimum)
    info = model.manifest
    assert (model.kind, model.shared_cache) == (OPTIMUM, False)
    assert (info.context_length, info.model.kv_heads) == (
        SHAPE.max_position_embeddings,
        SHAPE.num_key_value_heads,
    )
    assert (info.bos_token_id, info.eos_token_id) == (BOS_ID, EOS_ID)
    assert info.stop_token_ids == (EOS_ID, TURN_END_ID)
    assert info.generation == GenerationDefaults(temperature=0.6, top_p=0.9, typical_p=0.9)
    assert model.chat_templates() == {"default": CHAT_TEMPLATE}


def test_sampling_that_genai_recommends_is_taken_over(tmp_path: Path) -> None:
    folder = write_genai_folder(tmp_path / "model", edit={"search.do_sample": True})
    wanted = GenerationDefaults(temperature=0.7, top_k=50, top_p=0.9, repetition_penalty=1.0)
    assert described(folder).manifest.generation == wanted


def test_sampling_out_of_range_is_refused(tmp_path: Path) -> None:
    folder = write_genai_folder(tmp_path / "model", edit={"search.repetition_penalty": -1.0})
    with pytest.raises(ArtifactError, match="repetition_penalty"):
        check_defaults(described(folder).manifest.generation)


def test_the_default_of_several_chat_templates_counts(optimum: Path) -> None:
    path = optimum / "tokenizer_config.json"
    named = [{"name": "tool_use", "template": "a"}, {"name": "default", "template": "b"}]
    path.write_text(json.dumps({"chat_template": named}))
    assert described(optimum).chat_templates() == {"tool_use": "a", "default": "b"}
    path.write_text(json.dumps({"chat_template": named[:1]}))
    with pytest.raises(ArtifactError, match="tool_use"):
        load_model(optimum)
    path.unlink()
    assert described(optimum).chat_templates() == {}


def test_template_files_come_before_the_setting(optimum: Path) -> None:
    named = [{"name": "tool_use", "template": "a"}, {"name": "default", "template": "b"}]
    (optimum / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}))
    (optimum / "chat_template.jinja").write_text("c")
    (optimum / "additional_chat_templates").mkdir()
    (optimum / "additional_chat_templates" / "rag.jinja").write_text("d")
    (optimum / "additional_chat_templates" / "notes.txt").write_text("e")
    assert described(optimum).chat_templates() == {"tool_use": "a", "default": "c", "rag": "d"}


def test_a_link_to_templates_outside_the_folder_is_refused(optimum: Path, tmp_path: Path) -> None:
    (tmp_path / "outside.jinja").write_text("x")
    (optimum / "additional_chat_templates").mkdir()
    (optimum / "additional_chat_templates" / "rag.jinja").symlink_to(tmp_path / "outside.jinja")
    with pytest.raises(ArtifactError, match="outside the model's folder"):
        load_model(optimum)


def test_the_fingerprint_follows_every_file(optimum: Path) -> None:
    before = described(optimum).manifest.fingerprint
    assert described(optimum).manifest.fingerprint == before
    data = bytearray((optimum / "model.onnx").read_bytes())
    data[-100] ^= 1
    (optimum / "model.onnx").write_bytes(data)
    assert described(optimum).manifest.fingerprint != before


@pytest.mark.parametrize("layout", [as_hub_snapshot, as_volume])
@pytest.mark.parametrize("kind", [GENAI, OPTIMUM])
def test_folders_of_links_are_those_of_files(
    made: dict[ModelKind, Path], tmp_path: Path, layout: Callable[..., Path], kind: ModelKind
) -> None:
    before = described(made[kind])
    shutil.copytree(made[kind], tmp_path / "model")
    folder = layout(tmp_path / "model", tmp_path / "links")
    found = described(folder)
    assert found.manifest.fingerprint == before.manifest.fingerprint
    assert found.total_bytes == before.total_bytes
    opened(folder)


def test_a_newer_graph_than_the_runtimes_is_named_with_both_versions(optimum: Path) -> None:
    model = onnx.load(optimum / "model.onnx")
    model.ir_version = 99
    (optimum / "model.onnx").write_bytes(model.SerializeToString())
    with pytest.raises(ArtifactError, match=r"IR version 99, and onnxruntime \S+ goes up to \d+; upgrade"):
        opened(optimum)


# What is refused while reading.


def write(name: str, content: str | bytes) -> Edit:
    return lambda folder: (folder / name).write_bytes(
        content if isinstance(content, bytes) else content.encode()
    )


def remove(name: str) -> Edit:
    return lambda folder: (folder / name).unlink()


def rename(name: str, other: str) -> Edit:
    return lambda folder: (folder / name).rename(folder / other)


def link_outside(name: str) -> Edit:
    def edit(folder: Path) -> None:
        (folder / name).rename(folder.parent / "outside")
        (folder / name).symlink_to(folder.parent / "outside")

    return edit


def set_json(name: str, dotted: str, value: Any) -> Edit:
    def edit(folder: Path) -> None:
        content = json.loads((folder / name).read_text())
        *parents, last = dotted.split(".")
        place = content
        for parent in parents:
            place = place[parent]
        place[last] = value
        (folder / name).write_text(json.dumps(content))

    return edit


def config(dotted: str, value: Any) -> Edit:
    return set_json("genai_config.json", dotted, value)


GENAI_REFUSALS: dict[str, tuple[Edit, str]] = {
    "not json": (write("genai_config.json", "{"), r"genai_config\.json"),
    "deeply nested": (write("genai_config.json", "[" * 100_000), r"genai_config\.json"),
    "no model": (write("genai_config.json", "{}"), "model"),
    "a text for a number": (config("model.vocab_size", "512"), "vocab_size"),
    "no layers": (config("model.decoder.num_hidden_layers", 0), "num_hidden_layers"),
    "graph above the folder": (config("model.decoder.filename", "../outside"), "outside"),
    "graph at an absolute place": (config("model.decoder.filename", "/etc/passwd"), "outside"),
    "graph with a NUL": (config("model.decoder.filename", "a\0b"), "usable file name"),
    "graph that is not there": (config("model.decoder.filename", "other.onnx"), r"other\.onnx is missing"),
    "graph through a link": (link_outside("model.onnx"), "outside"),
    "tokenizer through a link": (link_outside("tokenizer.json"), "outside"),
    "config through a link": (link_outside("genai_config.json"), "outside"),
    "no tokenizer": (remove("tokenizer.json"), r"tokenizer\.json is missing"),
    "names without a layer": (config("model.decoder.inputs.past_key_names", "past.key"), "past_key_names"),
    "names that format more": (config("model.decoder.inputs.past_key_names", "past.%d.%s"), "past_key_names"),
    "custom operators": (
        config("model.decoder.session_options.custom_ops_library", "evil.so"),
        r"custom operators 'evil\.so'",
    ),
    "a vision model": (config("model.vision", {"filename": "vision.onnx"}), "vision"),
    "an encoder": (config("model.encoder", {"filename": "encoder.onnx"}), "encoder"),
    "a pipeline": (config("model.decoder.pipeline", [{"embeddings": {}}]), r"decoder\.pipeline"),
    "a sliding cache": (
        config("model.decoder.sliding_window", {"window_size": 8}),
        r"decoder\.sliding_window",
    ),
    "a stop token outside the vocabulary": (config("model.eos_token_id", [1, 512]), "512"),
    "a template that is no text": (write("chat_template.jinja", b"\xff"), "UTF-8"),
    "a template that is too long": (write("chat_template.jinja", b"a" * (2**20 + 1)), "at most 1048576"),
}


@pytest.mark.parametrize(("edit", "message"), GENAI_REFUSALS.values(), ids=GENAI_REFUSALS)
def test_a_genai_folder_that_cannot_be_run_is_refused(genai: Path, edit: Edit, message: str) -> None:
    (genai.parent / "outside").write_bytes(b"x")
    edit(genai)
    with pytest.raises(ArtifactError, match=message) as caught:
        load_model(genai)
    assert "\n" not in str(caught.value)


OPTIMUM_REFUSALS: dict[str, tuple[Edit, str]] = {
    "merged decoder": (
        rename("model.onnx", "decoder_model_merged.onnx"),
        r"decoder_model_merged\.onnx.*optimum-cli",
    ),
    "two decoders": (rename("model.onnx", "decoder_with_past_model.onnx"), r"decoder_with_past_model\.onnx"),
    "an encoder-decoder": (set_json("config.json", "is_encoder_decoder", True), "encoder-decoder"),
    "a config of parts": (write("config.json", '{"text_config": {}}'), "vocab_size"),
    "no tokenizer": (remove("tokenizer.json"), r"tokenizer\.json is missing"),
    "graph through a link": (link_outside("model.onnx"), "outside"),
    "template of another type": (write("tokenizer_config.json", '{"chat_template": 3}'), "chat_template"),
}


@pytest.mark.parametrize(("edit", "message"), OPTIMUM_REFUSALS.values(), ids=OPTIMUM_REFUSALS)
def test_an_optimum_folder_that_cannot_be_run_is_refused(optimum: Path, edit: Edit, message: str) -> None:
    edit(optimum)
    with pytest.raises(ArtifactError, match=message) as caught:
        load_model(optimum)
    assert "\n" not in str(caught.value)


def test_a_folder_with_far_too_many_files_is_refused(optimum: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "MAX_FILES", 3)
    with pytest.raises(ArtifactError, match="more than 3"):
        load_model(optimum)


# What is refused once the graph is there.


def edit_graph(change: Callable[[onnx.ModelProto], object]) -> Edit:
    def edit(folder: Path) -> None:
        model = onnx.load(folder / "model.onnx")
        change(model)
        onnx.save(model, folder / "model.onnx")

    return edit


def add_input(name: str, kind: int) -> Edit:
    extra = helper.make_tensor_value_info(name, kind, [1])
    return edit_graph(lambda model: model.graph.input.append(extra))


def without_cache(folder: Path) -> None:
    names = ["input_ids", "attention_mask"]
    x = [helper.make_tensor_value_info(name, TensorProto.INT64, ["b", "t"]) for name in names]
    y = helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["b", "t", SHAPE.vocab_size])
    weight = tiny_weights(SHAPE)["lm_head.weight"]
    table = onnx.numpy_helper.from_array(weight @ weight.T, "table")
    node = helper.make_node("Gather", ["table", "input_ids"], ["logits"])
    graph = helper.make_graph([node], "g", x, [y], [table])
    onnx.save(
        helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=8),
        folder / "model.onnx",
    )


GRAPH_REFUSALS: dict[str, tuple[ModelKind, Edit, str]] = {
    "noise": (OPTIMUM, write("model.onnx", b"not a graph"), "cannot be loaded"),
    "no cache": (OPTIMUM, without_cache, "text-generation-with-past"),
    "merged under the new name": (OPTIMUM, add_input("use_cache_branch", TensorProto.BOOL), "merged decoder"),
    "an input that is not known": (OPTIMUM, add_input("token_type_ids", TensorProto.INT64), "token_type_ids"),
    "fewer layers": (
        OPTIMUM,
        set_json("config.json", "num_hidden_layers", LAYERS - 1),
        r"past_key_values\.1",
    ),
    "more layers": (OPTIMUM, set_json("config.json", "num_hidden_layers", LAYERS + 1), r"past_key_values\.2"),
    "far more layers": (OPTIMUM, set_json("config.json", "num_hidden_layers", 2**31 - 1), "two for each"),
    "other heads": (OPTIMUM, set_json("config.json", "num_key_value_heads", HEADS), "axis 1"),
    "other head size": (OPTIMUM, set_json("config.json", "head_dim", 8), "axis 3"),
    "another vocabulary": (OPTIMUM, set_json("config.json", "vocab_size", 600), "600"),
    "another number of layers in genai": (
        GENAI,
        config("model.decoder.num_hidden_layers", 3),
        "GroupQueryAttention",
    ),
}


@pytest.mark.parametrize(("kind", "edit", "message"), GRAPH_REFUSALS.values(), ids=GRAPH_REFUSALS)
def test_a_graph_that_is_not_what_its_folder_says_is_refused(
    made: dict[ModelKind, Path], tmp_path: Path, kind: ModelKind, edit: Edit, message: str
) -> None:
    folder = Path(shutil.copytree(made[kind], tmp_path / "model"))
    edit(folder)
    with pytest.raises(ArtifactError, match=message) as caught:
        opened(folder)
    assert "\n" not in str(caught.value)


def test_a_growing_graph_that_claims_to_append_in_place_is_refused(
    made: dict[ModelKind, Path], genai: Path
) -> None:
    shutil.copy(made[OPTIMUM] / "model.onnx", genai / "model.onnx")
    with pytest.raises(ArtifactError, match="has 0 GroupQueryAttention nodes"):
        opened(genai)


@pytest.mark.parametrize("location", ["../outside/w.data", "/etc/passwd", "link"])
def test_weights_outside_the_folder_are_never_read(optimum: Path, location: str) -> None:
    model = onnx.load(optimum / "model.onnx")
    onnx.save(
        model, optimum / "model.onnx", save_as_external_data=True, location="w.data", size_threshold=1024
    )
    opened(optimum)  # inside the folder it is fine
    (optimum.parent / "outside").mkdir()
    shutil.copy(optimum / "w.data", optimum.parent / "outside" / "w.data")
    model = onnx.load(optimum / "model.onnx", load_external_data=False)
    for tensor in model.graph.initializer:
        for entry in tensor.external_data:
            entry.value = location if entry.key == "location" else entry.value
    onnx.save(model, optimum / "model.onnx")
    if location == "link":
        (optimum / "link").symlink_to(optimum.parent / "outside" / "w.data")
    with pytest.raises(ArtifactError, match=r"outside|cannot be loaded"):
        opened(optimum)


# Memory.


def test_a_growing_cache_is_planned_with_what_a_whole_prompt_needs(optimum: Path) -> None:
    model, per_token = described(optimum), 2 * LAYERS * SHAPE.num_key_value_heads * SHAPE.head_dim * 4
    plan = plan_growing(model, 4, slots=2, max_context=None, free_bytes=2**30)
    assert (plan.slots, plan.context, plan.bytes_per_token) == (2, SHAPE.max_position_embeddings, per_token)
    assert not plan.limited_by_memory
    needed = 64 * (3 * per_token + 2 * SHAPE.vocab_size * 4) + 2 * HEADS * 64 * 64 * 4
    tight = plan_growing(model, 4, slots=2, max_context=None, free_bytes=int(needed / 0.8) + 8)
    assert (tight.context, tight.limited_by_memory) == (64, True)
    less = plan_growing(model, 4, slots=2, max_context=None, free_bytes=int(needed / 0.8) - 8)
    assert less.context == 63
    with pytest.raises(ResourceError, match="65 tokens"):
        plan_growing(model, 4, slots=2, max_context=65, free_bytes=int(needed / 0.8) + 8)
    with pytest.raises(ResourceError):
        plan_growing(model, 4, slots=2, max_context=None, free_bytes=100)


@pytest.mark.parametrize(("slots", "context"), [(0, None), (1, 1), (1, 129)])
def test_slots_and_context_out_of_range_are_usage_errors(
    optimum: Path, slots: int, context: int | None
) -> None:
    with pytest.raises(UsageError):
        plan_growing(described(optimum), 4, slots=slots, max_context=context, free_bytes=2**30)
