"""How a checkpoint is found to embed texts: by its user, or by the files of sentence-transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llorch_export.options import ExportOptions
from llorch_export.preview import preview
from llorch_export.source.open import open_checkpoint, open_settings
from llorch_serve.artifact.manifest import EmbeddingForm
from llorch_serve.errors import ArtifactError, UsageError
from support.builders.checkpoints import of_family, write_gguf, write_hf_folder
from support.builders.packed_checkpoints import write_gptq
from support.builders.tiny_exports import export_tiny

LAST = {"word_embedding_dimension": 64, "pooling_mode_lasttoken": True, "pooling_mode_mean_tokens": False}
MEAN = {"embedding_dimension": 64, "pooling_mode": "mean", "include_prompt": True}


def write_modules(folder: Path, pooling: Any = LAST, kinds: tuple[str, ...] = ("Normalize",)) -> Path:
    """Write what sentence-transformers writes beside a model."""
    paths = {"Transformer": "", "Pooling": "1_Pooling"}
    modules = [
        {
            "idx": index,
            "name": str(index),
            "path": paths.get(kind, f"{index}_{kind}"),
            "type": f"a.models.{kind}",
        }
        for index, kind in enumerate(("Transformer", "Pooling", *kinds))
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    if pooling is not None:
        (folder / "1_Pooling").mkdir(exist_ok=True)
        (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    return folder


def write_headless(path: Path, **overrides: object) -> Path:
    """Write a folder as sentence-transformers saves a model: without an output layer or ``model.`` in
    names.
    """

    def edit(weights: dict[str, Any]) -> None:
        weights.pop("lm_head.weight")
        for name in list(weights):
            weights[name.removeprefix("model.")] = weights.pop(name)

    folder = write_hf_folder(path, edit=edit)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "architectures": ["LlamaModel"], **overrides}))
    return folder


def test_modules_say_how_states_are_pooled(tmp_path: Path) -> None:
    folder = write_modules(write_hf_folder(tmp_path / "m"))
    assert form(folder) == EmbeddingForm(pooling="last", normalised=True)
    assert form(write_modules(folder, MEAN, ())) == EmbeddingForm(pooling="mean", normalised=False)
    assert form(folder, "last") == EmbeddingForm(pooling="last")  # which is left aside for what is asked
    (notice,) = open_checkpoint(str(folder), "last").embedding.notices  # type: ignore[union-attr]
    assert "Transformer, Pooling" in notice
    assert form(folder, "none") is None
    assert form(write_hf_folder(tmp_path / "plain")) is None


def form(folder: Path, embed: Any = None) -> EmbeddingForm | None:
    found = open_checkpoint(str(folder), embed).embedding
    assert found == open_settings(str(folder), embed).embedding
    return None if found is None else found.form


def test_a_model_without_an_output_layer_embeds(tmp_path: Path) -> None:
    folder = write_headless(tmp_path / "m")
    with pytest.raises(ArtifactError, match=r"without an output layer.*--embed last or --embed mean"):
        open_checkpoint(str(folder))
    found = open_checkpoint(str(folder), "mean")
    assert "lm_head.weight" not in found.tensors
    whole = open_checkpoint(str(write_hf_folder(tmp_path / "whole")))
    name = "model.layers.1.mlp.down_proj.weight"
    np.testing.assert_array_equal(found.tensors[name].load(), whole.tensors[name].load())
    assert export_tiny(folder, tmp_path / "artifact", embed="mean").manifest.embeds is not None
    assert form(write_modules(folder)) == EmbeddingForm(pooling="last")


def test_a_head_of_its_own_is_left_out(tmp_path: Path) -> None:
    folder = write_hf_folder(tmp_path / "m", of_family("phi"))
    found = open_checkpoint(str(folder), "last")
    assert not {"lm_head.weight", "lm_head.bias"} & set(found.tensors)


@pytest.mark.parametrize(
    ("pooling", "kinds", "found"),
    [
        (
            LAST,
            ("Dense", "Normalize"),
            "Transformer, Pooling, Dense, Normalize; expected Transformer and Pool",
        ),
        ({"pooling_mode_cls_token": True}, (), "pools by cls, expected one of lasttoken and mean"),
        ({**LAST, "pooling_mode_max_tokens": True}, (), "pools by max and lasttoken, expected"),
        ({"pooling_mode": ["mean"]}, (), "pools by"),
        ({}, (), "pools by nothing"),
        (None, (), "missing or no JSON object"),
        ([], (), "missing or no JSON object"),
        ({**MEAN, "include_prompt": False}, (), "include_prompt"),
    ],
)
def test_modules_that_cannot_be_had_are_named(
    tmp_path: Path, pooling: Any, kinds: tuple[str, ...], found: str
) -> None:
    folder = write_modules(write_hf_folder(tmp_path / "m"), pooling, kinds)
    with pytest.raises(ArtifactError, match=found) as error:
        open_checkpoint(str(folder))
    assert "\n" not in str(error.value)
    assert form(folder, "mean") == EmbeddingForm(pooling="mean")


@pytest.mark.parametrize(
    "modules",
    [
        "{}",
        "[]",
        "[1]",
        '[{"type": 1, "path": ""}]',
        '[{"type": "Pooling"}]',
        "[" * 5000,
        json.dumps([{"type": "Pooling", "path": ""}] * 17),
        "not JSON",
    ],
)
def test_a_list_of_modules_that_is_none_is_refused(tmp_path: Path, modules: str) -> None:
    folder = write_hf_folder(tmp_path / "m")
    (folder / "modules.json").write_text(modules)
    with pytest.raises(ArtifactError, match=r"modules\.json"):
        open_checkpoint(str(folder))


@pytest.mark.parametrize("path", ["", ".", "..", "../other", "/etc", "a\\b"])
def test_a_pooling_outside_of_the_folder_is_refused(tmp_path: Path, path: str) -> None:
    folder = write_modules(write_hf_folder(tmp_path / "m"))
    modules = json.loads((folder / "modules.json").read_text())
    modules[1]["path"] = path
    (folder / "modules.json").write_text(json.dumps(modules))
    with pytest.raises(ArtifactError, match="expected a folder's plain name"):
        open_checkpoint(str(folder))


def test_a_pooling_behind_a_link_that_leads_out_is_refused(tmp_path: Path) -> None:
    folder = write_modules(write_hf_folder(tmp_path / "m"))
    (folder / "1_Pooling" / "config.json").rename(tmp_path / "config.json")
    (folder / "1_Pooling").rmdir()
    (folder / "1_Pooling").symlink_to(tmp_path)
    with pytest.raises(ArtifactError, match="1_Pooling"):
        open_checkpoint(str(folder))


def test_half_a_pair_of_surrogates_is_refused_where_it_is_read(tmp_path: Path) -> None:
    folder = write_modules(write_hf_folder(tmp_path / "m"))
    (folder / "config_sentence_transformers.json").write_text('{"prompts": {"\\ud800": "search: "}}')
    with pytest.raises(ArtifactError, match=r"config_sentence_transformers\.json is not valid JSON"):
        open_checkpoint(str(folder))


def test_lengths_and_prompts_beside_the_modules(tmp_path: Path) -> None:
    folder = write_modules(write_hf_folder(tmp_path / "m"))
    length = folder / "sentence_bert_config.json"
    length.write_text('{"max_seq_length": 32, "do_lower_case": false}')
    (folder / "config_sentence_transformers.json").write_text(
        '{"prompts": {"query": "Ask: ", "document": ""}}'
    )
    artifact = export_tiny(folder, tmp_path / "artifact")
    assert artifact.manifest.context_length == 32
    longer = export_tiny(folder, tmp_path / "longer", max_context=64).manifest
    assert longer.context_length == 64
    (notice,) = open_checkpoint(str(folder)).embedding.notices  # type: ignore[union-attr]
    assert "query: 'Ask: '" in notice
    assert "document" not in notice
    for bad, found in (('{"max_seq_length": "all"}', "max_seq_length"), ('{"do_lower_case": true}', "lower")):
        length.write_text(bad)
        with pytest.raises(ArtifactError, match=found):
            open_checkpoint(str(folder))


@pytest.mark.parametrize(("number", "found"), [(0, None), (1, "mean"), (3, "last")])
def test_a_gguf_file_says_it_by_a_number(tmp_path: Path, number: int, found: str | None) -> None:
    path = write_gguf(tmp_path / "m.gguf", metadata={"llama.pooling_type": number})
    known = form(path)
    assert (None if known is None else known.pooling) == found
    assert form(path, "none") is None


def test_a_gguf_pooling_that_cannot_be_had_is_named(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", metadata={"llama.pooling_type": 2})
    with pytest.raises(ArtifactError, match=r"pooling_type is 2, expected 1 \(mean\) or 3"):
        open_checkpoint(str(path))
    assert form(path, "mean") == EmbeddingForm(pooling="mean")


def test_a_model_that_looks_both_ways_is_refused(tmp_path: Path) -> None:
    folder = write_headless(tmp_path / "m", is_causal=False)
    with pytest.raises(ArtifactError, match="is_causal"):
        open_checkpoint(str(folder), "mean")


def test_what_does_not_go_with_vectors_is_refused_where_only_the_checkpoint_asks_for_them(
    tmp_path: Path,
) -> None:
    folder = write_modules(write_hf_folder(tmp_path / "m"))
    with pytest.raises(UsageError, match=r"--interop genai with --embed last.*--embed none"):
        export_tiny(folder, tmp_path / "artifact", interop="genai")
    assert not (tmp_path / "artifact").exists()


def test_a_preview_is_of_the_graph_that_an_export_makes(tmp_path: Path) -> None:
    folder = write_modules(write_hf_folder(tmp_path / "m"))
    shown = preview(ExportOptions(str(folder), tmp_path / "artifact", precision="fp32"))
    inputs = [value["name"] for value in shown["inputs"]]  # type: ignore[attr-defined]
    assert inputs == ["input_ids", "seqlens_k", "total_sequence_length"]
    artifact = export_tiny(folder, tmp_path / "artifact")
    assert inputs == [spec.name for spec in artifact.manifest.inputs]
    size = next(e.bytes for e in artifact.manifest.files if e.path.endswith(".data"))
    assert shown["data_bytes"] == size


def test_equal_exports_have_equal_fingerprints_and_others_have_not(tmp_path: Path) -> None:
    folder = write_hf_folder(tmp_path / "m")
    prints = [
        export_tiny(folder, tmp_path / str(index), embed=embed).manifest.fingerprint
        for index, embed in enumerate(("last", "mean", "none", None, "last"))
    ]
    assert prints[2] == prints[3]
    assert prints[0] == prints[4]
    assert len(set(prints)) == 3


def test_packed_weights_are_kept_in_a_graph_that_embeds(tmp_path: Path) -> None:
    folder = write_modules(write_gptq(tmp_path / "m", {}).folder)
    manifest = export_tiny(folder, tmp_path / "artifact", precision="source").manifest
    assert manifest.embeds == EmbeddingForm(pooling="last")
    assert manifest.source_forms


PUBLISHED: dict[str, tuple[str, ...]] = {
    "Qwen3-Embedding-8B": ("1_Pooling/config.json", "config_sentence_transformers.json"),
    "gte-Qwen2-7B-instruct": (
        "1_Pooling/config.json",
        "config_sentence_transformers.json",
        "sentence_bert_config.json",
    ),
}
"""What lies beside modules.json in repositories whose config.json names a language model."""


@pytest.mark.parametrize(("name", "file"), [(name, file) for name in PUBLISHED for file in PUBLISHED[name]])
def test_other_files_of_sentence_transformers_without_its_modules_are_no_language_model(
    tmp_path: Path, name: str, file: str
) -> None:
    folder = write_hf_folder(tmp_path / name)
    (folder / file).parent.mkdir(exist_ok=True)
    (folder / file).write_text(json.dumps(LAST))
    for opens in (open_checkpoint, open_settings):
        with pytest.raises(ArtifactError, match=rf"{file.split('/')[0]}.*no modules\.json.*--embed none"):
            opens(str(folder))
    assert form(folder, "last") == EmbeddingForm(pooling="last")
    assert form(folder, "none") is None


def test_a_name_that_says_embedding_is_a_notice(tmp_path: Path) -> None:
    folder = write_hf_folder(tmp_path / "Qwen3-Embedding-8B")
    (notice,) = (said for said in open_checkpoint(str(folder)).notices if "--embed" in said)
    assert "Qwen3-Embedding-8B" in notice
    assert "no modules.json" in notice
    for embed in ("none", "last"):
        assert not any("modules.json" in said for said in open_checkpoint(str(folder), embed).notices)
    assert open_checkpoint(str(write_hf_folder(tmp_path / "m"))).notices == ()
