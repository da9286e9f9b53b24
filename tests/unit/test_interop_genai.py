"""What ``--interop genai`` adds to an artifact, what it leaves alone, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import onnx
import pytest
import tokenizers

from llorch_export.options import ExportOptions, Rule
from llorch_export.pipeline import export
from llorch_serve.artifact.folder import load_artifact
from llorch_serve.errors import UsageError
from llorch_serve.providers import EXACT_BYTES
from support.builders.checkpoints import BOS, BOS_ID, EOS, EOS_ID, of_family, write_hf_folder
from support.builders.tiny_exports import contents, export_tiny, silent


def settings(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "genai_config.json").read_text())
    return found


def test_files_are_added_listed_and_hashed_and_the_others_stay_as_they_were(tmp_path: Path) -> None:
    source = write_hf_folder(tmp_path / "model")
    plain = export_tiny(source, tmp_path / "plain")
    both = export_tiny(source, tmp_path / "both", interop="genai")
    before, after = contents(plain.folder), contents(both.folder)
    added = {"genai.onnx", "genai_config.json", "tokenizer_config.json"}
    assert set(after) - set(before) == added
    assert {name for name in before if before[name] != after[name]} == {"llorch.json"}
    assert added <= {entry.path for entry in both.manifest.files}
    load_artifact(both.folder, verify_hashes=True)
    assert plain.manifest.interop == ()
    assert both.manifest.interop == ("genai",)


def test_the_graph_has_no_weights_of_its_own(tmp_path: Path) -> None:
    folder = export_tiny(write_hf_folder(tmp_path / "model"), tmp_path / "out", interop="genai").folder
    graphs = [
        onnx.load(folder / name, load_external_data=False).graph for name in ("model.onnx", "genai.onnx")
    ]
    own, guest = (
        {t.name: str(t.external_data) for t in graph.initializer if t.external_data} for graph in graphs
    )
    assert own == guest
    assert sum(t.ByteSize() for t in graphs[1].initializer if not t.external_data) < 2**12


def test_settings_are_the_models(tmp_path: Path) -> None:
    source = write_hf_folder(
        tmp_path / "model",
        of_family("qwen3", num_key_value_heads=1),
        generation_config={"eos_token_id": [2, 5]},
    )
    found = settings(export_tiny(source, tmp_path / "out", interop="genai", max_context=96).folder)
    model, decoder = found["model"], found["model"]["decoder"]
    assert (model["type"], model["context_length"], model["vocab_size"]) == ("qwen3", 96, 512)
    assert model["bos_token_id"] == BOS_ID
    assert set(model["eos_token_id"]) == {EOS_ID, 2, 5}
    assert model["pad_token_id"] in model["eos_token_id"]
    assert (decoder["num_hidden_layers"], decoder["num_key_value_heads"], decoder["head_size"]) == (2, 1, 16)
    assert (decoder["num_attention_heads"], decoder["hidden_size"]) == (4, 64)
    assert found["search"] == {"max_length": 96, "past_present_share_buffer": True, "do_sample": False}
    special = json.loads((tmp_path / "out" / "tokenizer_config.json").read_text())
    assert special == {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_bos_token": True,
        "bos_token": BOS,
        "eos_token": EOS,
    }


def test_layers_in_whole_bytes_ask_for_exact_products_as_llorchs_sessions_do(tmp_path: Path) -> None:
    source = write_hf_folder(tmp_path / "model")
    one_layer = (Rule(("model.layers.0.mlp.down_proj",), activations="row"),)
    asked: dict[str, dict[str, Any]] = {
        "blocks": {},
        "rows": {"activations": "row"},
        "a rule's rows": {"rules": one_layer},
    }
    key, value = EXACT_BYTES
    for name, options in asked.items():
        folder = export_tiny(source, tmp_path / name, precision="int8", interop="genai", **options).folder
        found = settings(folder)["model"]["decoder"]["session_options"]
        assert found.get(key) == (None if name == "blocks" else value)


def test_recommended_sampling_is_carried_over(tmp_path: Path) -> None:
    recommended = {
        "do_sample": True,
        "temperature": 0.7,
        "top_k": 20,
        "top_p": 0.8,
        "repetition_penalty": 1.1,
    }
    source = write_hf_folder(tmp_path / "model", generation_config=recommended)
    search = settings(export_tiny(source, tmp_path / "out", interop="genai").folder)["search"]
    assert {key: search[key] for key in recommended} == recommended


def test_an_export_without_it_is_not_up_to_date(tmp_path: Path) -> None:
    source = str(write_hf_folder(tmp_path / "model"))
    plain = ExportOptions(source=source, output=tmp_path / "out", if_changed=True)
    both = ExportOptions(source=source, output=tmp_path / "out", if_changed=True, interop="genai")
    assert [export(options, silent).changed for options in (plain, both, both, plain)] == [
        True,
        True,
        False,
        True,
    ]


def test_a_tokenizer_that_is_not_bpe_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    source = write_hf_folder(tmp_path / "model")
    words = {EOS: EOS_ID, BOS: BOS_ID, "?": 3}
    other = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="?"))
    (source / "tokenizer.json").write_text(other.to_str())
    with pytest.raises(UsageError, match=r"tokenizer of .* is of type WordLevel.*Leave the option out"):
        export_tiny(source, tmp_path / "out", interop="genai")
    assert not (tmp_path / "out").exists()
