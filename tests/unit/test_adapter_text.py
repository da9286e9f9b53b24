"""An adapter's own tokenizer and chat template are used where they fit the model, else named in a notice."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer

from llorch_export.adapter.apply import with_adapters
from llorch_export.adapter.choice import AdapterChoice
from llorch_export.checkpoint.base import Checkpoint
from llorch_export.source.open import fingerprint, open_checkpoint
from llorch_serve.errors import ArtifactError
from support.builders.adapters import Factors, write_adapter
from support.builders.checkpoints import EOS_ID, TURN_END, TURN_END_ID, tiny_llama_config, write_hf_folder
from support.builders.tiny_exports import export_tiny

CONFIG = tiny_llama_config()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_hf_folder(tmp_path / "m")


def adapter(
    tmp_path: Path, folder: Path, name: str = "lora", *, tokenizer: bool = True, **options: Any
) -> Path:
    """Write an adapter of this model, with a copy of the base model's tokenizer beside it."""
    write_adapter(tmp_path / name, CONFIG, base_model_name_or_path="m", **options)
    if tokenizer:
        for file in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(folder / file, tmp_path / name / file)
    return tmp_path / name


def merged(folder: Path, *paths: Path) -> Checkpoint:
    return with_adapters(open_checkpoint(str(folder)), [AdapterChoice(path) for path in paths])


def edit_json(path: Path, **changes: object) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_a_copy_of_the_base_models_is_no_news(tmp_path: Path, folder: Path) -> None:
    found = merged(folder, adapter(tmp_path, folder))
    assert found.tokenizer == open_checkpoint(str(folder)).tokenizer
    assert found.adapters[0].notices == ()
    assert len(found.adapters[0].content_files) == 2


@pytest.mark.parametrize("place", ["chat_template.jinja", "tokenizer_config.json"])
def test_a_template_of_its_own_is_used(tmp_path: Path, folder: Path, place: str) -> None:
    path = adapter(tmp_path, folder, tokenizer=place.endswith("json"))
    plain = fingerprint(merged(folder, path))
    if place.endswith("jinja"):
        (path / place).write_text("{{ messages[0].content }}")
    else:
        edit_json(path / place, chat_template="{{ messages[0].content }}")
    found = merged(folder, path)
    assert found.tokenizer.chat_templates == {"default": "{{ messages[0].content }}"}
    assert found.adapters[0].notices == ("its own chat template is used",)
    assert fingerprint(found) != plain
    artifact = export_tiny(folder, tmp_path / "out", lora=(AdapterChoice(path),))
    assert (artifact.folder / "chat_template.jinja").read_text() == "{{ messages[0].content }}"


def test_its_end_of_sequence_stops_answers_too(tmp_path: Path, folder: Path) -> None:
    path = adapter(tmp_path, folder)
    edit_json(path / "tokenizer_config.json", eos_token=TURN_END)
    found = merged(folder, path)
    assert found.tokenizer.eos_token_id == TURN_END_ID
    assert {EOS_ID, TURN_END_ID} <= set(found.tokenizer.stop_token_ids)
    assert found.adapters[0].notices == ("its own tokenizer is used",)


def grown(path: Path, *tokens: str) -> None:
    tokenizer = Tokenizer.from_file(str(path / "tokenizer.json"))
    tokenizer.add_special_tokens(list(tokens))
    tokenizer.save(str(path / "tokenizer.json"))


def tables(rows: int) -> Callable[[Factors], None]:
    def edit(factors: Factors) -> None:
        for name in ("model.embed_tokens", "lm_head"):
            factors[f"base_model.model.{name}.weight"] = np.full((rows, 64), len(name), np.float32)

    return edit


def test_new_tokens_come_with_the_rows_that_were_trained_for_them(tmp_path: Path, folder: Path) -> None:
    path = adapter(tmp_path, folder, edit=tables(515))
    grown(path, "<|a|>", "<|b|>", "<|c|>")
    found = merged(folder, path)
    assert found.config.vocab_size == 515
    assert found.tensors["lm_head.weight"].shape == (515, 64)
    assert found.tensors["model.embed_tokens.weight"].load()[514, 0] == len("model.embed_tokens")
    artifact = export_tiny(folder, tmp_path / "out", lora=(AdapterChoice(path),))
    assert artifact.manifest.model.vocab_size == 515
    assert Tokenizer.from_file(str(artifact.folder / "tokenizer.json")).token_to_id("<|c|>") == 514


def test_new_tokens_without_rows_leave_the_base_models_tokenizer(tmp_path: Path, folder: Path) -> None:
    path = adapter(tmp_path, folder)
    grown(path, "<|a|>")
    found = merged(folder, path)
    assert found.tokenizer == open_checkpoint(str(folder)).tokenizer
    (notice,) = found.adapters[0].notices
    assert "not used" in notice
    assert "token 512, expected ids below 512" in notice


def test_another_models_tokenizer_is_not_used(tmp_path: Path, folder: Path) -> None:
    path = adapter(tmp_path, folder)
    data = json.loads((path / "tokenizer.json").read_text())
    vocabulary = data["model"]["vocab"]
    first, second = sorted(vocabulary)[40:42]
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
    (path / "tokenizer.json").write_text(json.dumps(data))
    (path / "chat_template.jinja").write_text("other")
    found = merged(folder, path)
    assert found.tokenizer == open_checkpoint(str(folder)).tokenizer
    assert "belongs to another model" in found.adapters[0].notices[0]


def test_a_damaged_tokenizer_is_not_used(tmp_path: Path, folder: Path) -> None:
    path = adapter(tmp_path, folder)
    (path / "tokenizer.json").write_text("{")
    found = merged(folder, path)
    assert found.tokenizer == open_checkpoint(str(folder)).tokenizer
    assert "not used" in found.adapters[0].notices[0]


def test_of_several_the_first_that_has_one_is_used(tmp_path: Path, folder: Path) -> None:
    paths = [adapter(tmp_path, folder, name, tokenizer=False) for name in ("one", "two", "three")]
    for path, text in zip(paths[1:], ("second", "third"), strict=True):
        (path / "chat_template.jinja").write_text(text)
    found = merged(folder, *paths)
    assert found.tokenizer.chat_templates == {"default": "second"}
    assert found.adapters[2].notices == ("its chat template is not used, because that of two is",)


def test_one_table_alone_cannot_grow(tmp_path: Path, folder: Path) -> None:
    def edit(factors: Factors) -> None:
        factors["base_model.model.lm_head.weight"] = np.zeros((515, 64), np.float32)

    with pytest.raises(ArtifactError, match="resizes one table alone"):
        merged(folder, adapter(tmp_path, folder, edit=edit))


def test_a_table_with_too_few_rows_for_the_tokenizer_is_refused(tmp_path: Path, folder: Path) -> None:
    with pytest.raises(ArtifactError, match="leaves 500 rows of the embedding"):
        merged(folder, adapter(tmp_path, folder, edit=tables(500)))
    with pytest.raises(ArtifactError, match="tables of 0 rows"):
        merged(folder, adapter(tmp_path, folder, "none", edit=tables(0)))


ENDS = "{{ messages[0].content }}{{ eos_token }}{{ pad_token }}"


def template_tokens(folder: Path, *paths: Path) -> dict[str, str] | None:
    return merged(folder, *paths).tokenizer.template_tokens


def test_templates_see_the_tokens_of_the_tokenizer_that_is_used(tmp_path: Path) -> None:
    folder = write_hf_folder(tmp_path / "m", tokenizer_config={"chat_template": ENDS, "pad_token": TURN_END})
    assert template_tokens(folder) == {"eos_token": "<|eos|>", "pad_token": TURN_END}
    path = adapter(tmp_path, folder)
    edit_json(path / "tokenizer_config.json", eos_token=TURN_END, pad_token="<|eos|>")
    assert template_tokens(folder, path) == {"eos_token": TURN_END, "pad_token": "<|eos|>"}


def test_another_padding_token_alone_is_a_tokenizer_of_its_own(tmp_path: Path) -> None:
    folder = write_hf_folder(tmp_path / "m", tokenizer_config={"chat_template": ENDS, "pad_token": TURN_END})
    path = adapter(tmp_path, folder)
    edit_json(path / "tokenizer_config.json", pad_token="<|eos|>")
    assert template_tokens(folder, path) == {"eos_token": "<|eos|>", "pad_token": "<|eos|>"}
    assert merged(folder, path).adapters[0].notices == ("its own tokenizer is used",)


def test_a_template_of_its_own_sees_the_base_models_tokens(tmp_path: Path) -> None:
    folder = write_hf_folder(tmp_path / "m", tokenizer_config={"pad_token": TURN_END})
    path = adapter(tmp_path, folder, tokenizer=False)
    (path / "chat_template.jinja").write_text(ENDS)
    assert template_tokens(folder, path) == {"eos_token": "<|eos|>", "pad_token": TURN_END}


@pytest.mark.parametrize("name", ["special_tokens_map.json", "chat_template.json"])
def test_every_file_that_text_comes_from_counts_in_the_fingerprint(
    tmp_path: Path, folder: Path, name: str
) -> None:
    path = adapter(tmp_path, folder)
    edit_json(path / "tokenizer_config.json", eos_token=TURN_END)
    plain = fingerprint(merged(folder, path))
    (path / name).write_text("{}")
    assert fingerprint(merged(folder, path)) != plain
