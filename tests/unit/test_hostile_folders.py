"""Folders that a stranger filled: what is there and cannot be read is named, and every refusal is short."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llorch_export.adapter.apply import adapt
from llorch_export.adapter.choice import AdapterChoice
from llorch_export.checkpoint import safetensors_file
from llorch_export.checkpoint.base import Checkpoint
from llorch_export.checkpoint.folder import MAX_JSON_BYTES
from llorch_export.checkpoint.safetensors_file import MAX_HEADER_BYTES, MAX_TENSORS
from llorch_export.config.families import FAMILIES
from llorch_export.config.hf import config_from_hf
from llorch_export.source.open import open_checkpoint
from llorch_serve.errors import ArtifactError
from support.builders import adapters, tiny_tokenizers
from support.builders.checkpoints import (
    EOS_ID,
    TURN_END_ID,
    of_family,
    tiny_config,
    write_gguf,
    write_hf_folder,
)

LONGEST_REFUSAL = 1000
FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "model.safetensors",
    "model.safetensors.index.json",
)


def _refusal(source: Path, act: Callable[[str], object] = open_checkpoint) -> str:
    with pytest.raises(ArtifactError) as caught:
        act(str(source))
    message = str(caught.value)
    assert "\n" not in message
    assert len(message) < LONGEST_REFUSAL
    return message


def _folder(path: Path) -> Path:
    return write_hf_folder(path, generation_config={"eos_token_id": [EOS_ID, TURN_END_ID]})


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("kind", ["nothing", "itself", "a device", "a pipe", "a folder"])
def test_what_stands_in_place_of_a_file_does_not_count_as_absent(
    tmp_path: Path, name: str, kind: str
) -> None:
    folder = _folder(tmp_path / "m")
    place = folder / name
    place.unlink(missing_ok=True)
    if kind == "a pipe":
        os.mkfifo(place)
    elif kind == "a folder":
        place.mkdir()
    else:
        place.symlink_to({"nothing": "../../blobs/gone", "itself": name, "a device": "/dev/zero"}[kind])
    message = _refusal(folder)
    assert f"{name} is " in message
    assert "expected a file" in message


def test_folders_with_the_name_of_a_licence_are_left_alone(tmp_path: Path) -> None:
    folder = _folder(tmp_path / "m")
    (folder / "LICENSES").mkdir()
    (folder / "LICENSE").write_text("terms")
    assert open_checkpoint(str(folder)).licence_files == (folder / "LICENSE",)


@pytest.mark.parametrize("name", ["config.json", "tokenizer_config.json", "generation_config.json"])
def test_settings_larger_than_any_are_refused_before_they_are_parsed(tmp_path: Path, name: str) -> None:
    folder = _folder(tmp_path / "m")
    (folder / name).write_bytes(b"[" * (MAX_JSON_BYTES + 1))
    assert f"more than {MAX_JSON_BYTES} bytes" in _refusal(folder)


def test_more_settings_than_any_model_has_are_counted_and_not_listed(tmp_path: Path) -> None:
    folder = _folder(tmp_path / "m")
    config = tiny_config(**{f"setting_{number}": number for number in range(10_000)})
    (folder / "config.json").write_text(json.dumps(config))
    assert "has 10018 settings" in _refusal(folder)


def _header(path: Path, header: bytes) -> Path:
    folder = _folder(path)
    (folder / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    return folder


def test_a_header_of_weights_larger_than_any_is_refused_before_it_is_parsed(tmp_path: Path) -> None:
    message = _refusal(_header(tmp_path / "m", b"[" * (MAX_HEADER_BYTES + 1)))
    assert f"has a header of {MAX_HEADER_BYTES + 1} bytes" in message


def test_more_tensors_than_any_model_has_are_refused(tmp_path: Path) -> None:
    empty = {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}
    header = json.dumps({f"t{number}": empty for number in range(MAX_TENSORS + 1)}).encode()
    assert f"holds {MAX_TENSORS + 1} tensors" in _refusal(_header(tmp_path / "m", header))


def test_a_header_that_changes_while_it_is_checked_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = _folder(tmp_path / "m")
    weights = folder / "model.safetensors"
    check = safetensors_file.safe_open

    def checked_then_changed(*arguments: Any, **options: Any) -> Any:
        found = check(*arguments, **options)
        data = weights.read_bytes()
        weights.write_bytes(data.replace(b"data_offsets", b"data_offsetz"))
        return found

    monkeypatch.setattr(safetensors_file, "safe_open", checked_then_changed)
    assert "changed while it was read" in _refusal(folder)


def _long_settings() -> Iterable[tuple[str, Mapping[str, Any]]]:
    for what, value in (("text", "x" * 10_000), ("list", ["x"] * 10_000), ("object", {"x" * 10_000: 1})):
        yield f"model_type {what}", {"model_type": value}
        yield f"rope_type {what}", {"rope_scaling": {"rope_type": value}}
        yield f"eos_token_id {what}", {"eos_token_id": value}
        yield f"hidden_size {what}", {"hidden_size": value}
    yield "architectures", {"architectures": ["x" * 10_000]}
    yield "auto_map", {"auto_map": {"x": [["x"] * 10_000]}}
    yield "quant_method", {"quantization_config": {"quant_method": "x" * 10_000}}


@pytest.mark.parametrize(("name", "changes"), [*_long_settings()], ids=lambda value: str(value)[:30])
def test_a_refusal_never_repeats_a_long_value(tmp_path: Path, name: str, changes: Mapping[str, Any]) -> None:
    folder = _folder(tmp_path / "m")
    (folder / "config.json").write_text(json.dumps({**tiny_config(), **changes}))
    _refusal(folder)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("general.type", "x" * 10_000),
        ("general.type", ["x"] * 5000),
        ("llama.rope.scaling.type", "x" * 10_000),
        ("llama.rope.scaling.type", ["x"] * 5000),
        ("llama.block_count", "x" * 10_000),
        ("tokenizer.ggml.model", "x" * 10_000),
        ("tokenizer.ggml.pre", "x" * 10_000),
        ("tokenizer.ggml.merges", ["x" * 10_000]),
        ("x" * 10_000, 1),
        ("llama." + "x" * 10_000, 1),
    ],
    ids=lambda value: str(value)[:30],
)
def test_a_refusal_never_repeats_a_long_value_of_a_gguf_file(tmp_path: Path, key: str, value: object) -> None:
    path = write_gguf(tmp_path / "m.gguf", metadata={key: value})
    if key.startswith("x"):  # a key that nobody reads
        open_checkpoint(str(path))
    else:
        _refusal(path)


def _with_tokenizer(folder: Path, content: str, settings: Mapping[str, object]) -> Checkpoint:
    (folder / "tokenizer.json").write_text(content, encoding="utf-8")
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return open_checkpoint(str(folder))


def _without_letters(kind: str) -> str:
    """Return a tokenizer.json that has no token for most texts, and none for what it does not know."""
    inner = json.loads(tiny_tokenizers.unigram().to_str())
    inner |= {"added_tokens": [], "post_processor": None, "pre_tokenizer": None, "decoder": None}
    inner["model"] = {
        "words": {"type": "WordLevel", "vocab": {"x": 0}, "unk_token": "[UNK]"},
        "pieces": {"type": "Unigram", "vocab": [["x", 0.0]], "unk_id": None, "byte_fallback": False},
    }[kind]
    return json.dumps(inner)


@pytest.mark.parametrize("kind", ["words", "pieces"])
@pytest.mark.parametrize("name", ["PreTrainedTokenizerFast", "GPT2Tokenizer", "SomeTokenizer"])
def test_a_tokenizer_without_tokens_for_usual_texts_is_taken(tmp_path: Path, kind: str, name: str) -> None:
    checkpoint = _with_tokenizer(
        _folder(tmp_path / "m"), _without_letters(kind), {"tokenizer_class": name, "add_bos_token": True}
    )
    assert any(notice.startswith("add_bos_token") for notice in checkpoint.tokenizer.notices)


@pytest.mark.parametrize("place", ["a token", "another key"])
@pytest.mark.parametrize("name", ["LlamaTokenizer", "PreTrainedTokenizerFast"])
def test_half_a_surrogate_pair_in_a_tokenizer_is_refused(tmp_path: Path, place: str, name: str) -> None:
    inner = tiny_tokenizers.byte_fallback().to_str()
    content = (
        inner.replace('"hello"', '"\\ud800"')
        if place == "a token"
        else '{"more": "\\ud800",' + inner.lstrip()[1:]
    )
    with pytest.raises(ArtifactError, match=r"tokenizer\.json"):
        _with_tokenizer(_folder(tmp_path / "m"), content, {"tokenizer_class": name})


@pytest.mark.parametrize("family", FAMILIES)
def test_settings_so_small_that_a_frequency_would_be_infinite_are_refused(family: str) -> None:
    tiny = 5e-324
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
    longrope = {"rope_type": "longrope", "short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
    ropes: list[dict[str, object]] = [
        *({**yarn, key: tiny} for key in ("factor", "beta_fast", "beta_slow")),
        {"rope_type": "linear", "factor": tiny},
        {**longrope, "short_factor": [tiny] * 8},
    ]
    base = tiny_config(**of_family(family))
    for changes in ({"rope_theta": tiny}, *({"rope_scaling": rope} for rope in ropes)):
        with pytest.raises(ArtifactError):
            config_from_hf({**base, **changes})


@pytest.mark.parametrize(
    "changes",
    [
        {"peft_type": "x" * 10_000},
        {"modules_to_save": [f"m{number}" for number in range(100_000)]},
        {"target_modules": [["x" * 10_000]]},
        {"base_model_name_or_path": "x" * 10_000, "peft_type": None},
        {"rank_pattern": {"(" * 10_000: 4}},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_a_refusal_of_an_adapter_never_repeats_a_long_value(
    tmp_path: Path, changes: Mapping[str, object]
) -> None:
    folder = _folder(tmp_path / "m")
    base = open_checkpoint(str(folder))
    adapters.write_adapter(tmp_path / "a", base.config, **changes)
    choices = (AdapterChoice(tmp_path / "a"),)
    _refusal(tmp_path / "a", lambda _: adapt(base.config, base.tensors, choices, source="m"))


@pytest.mark.parametrize(
    ("template", "found"),
    [
        ("{% for %}", "default: the chat template cannot be compiled"),
        ("{{ 1 }}" * 20_000, "default: the chat template has 140000 bytes"),
        ([{"name": "default", "template": "a"}, {"name": "rag", "template": "{{"}], "rag: the chat template"),
        ([{"name": "default", "template": "a"}, 5], "chat_template holds 5"),
        ([{"template": "a"}], "chat_template holds {'template': 'a'}"),
    ],
)
def test_a_template_that_no_worker_would_load_is_refused_before_an_export(
    tmp_path: Path, template: object, found: str
) -> None:
    folder = write_hf_folder(tmp_path / "m", tokenizer_config={"chat_template": template})
    assert found in _refusal(folder)


def test_a_template_of_a_gguf_file_that_no_worker_would_load_is_refused(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", metadata={"tokenizer.chat_template": "{% for %}"})
    assert "default: the chat template cannot be compiled" in _refusal(path)


def _with_long_tensor(path: Path) -> Path:
    return write_hf_folder(path / "m", edit=lambda weights: weights.update({LONG: np.zeros(4, np.float32)}))


def _with_index_entry(path: Path, name: str) -> Path:
    folder = write_hf_folder(path / "m", shards=2)
    index = folder / "model.safetensors.index.json"
    found = json.loads(index.read_text())
    found["weight_map"][LONG] = name
    index.write_text(json.dumps(found))
    return folder


LONG = "x" * 10_000
LONG_NAMES: dict[str, Callable[[Path], Path]] = {
    "tensor": _with_long_tensor,
    "shard": lambda path: _with_index_entry(path, f"{LONG}.safetensors"),
    "pickled shard": lambda path: _with_index_entry(path, f"{LONG}.bin"),
    "shard outside": lambda path: _with_index_entry(path, f"../{LONG}.safetensors"),
    "GGUF tensor": lambda path: write_gguf(path / "m.gguf", extra={LONG: np.zeros(4, np.float32)}),
    "GGUF tensor twice": lambda path: _renamed(
        write_gguf(path / "m.gguf", extra={LONG: ZEROS, OTHER: ZEROS})
    ),
    "packing": lambda path: _with_packing(path / "m", {"quant_method": "fp8", LONG: 1}),
}
ZEROS = np.zeros(4, np.float32)
OTHER = "y" * 10_000


def _renamed(path: Path) -> Path:
    path.write_bytes(path.read_bytes().replace(OTHER.encode(), LONG.encode()))
    return path


def _with_packing(path: Path, packing: Mapping[str, object]) -> Path:
    folder = write_hf_folder(path)
    (folder / "config.json").write_text(json.dumps(tiny_config(quantization_config=packing)))
    return folder


@pytest.mark.parametrize("kind", LONG_NAMES)
def test_a_refusal_never_repeats_a_long_name(tmp_path: Path, kind: str) -> None:
    source = LONG_NAMES[kind](tmp_path)
    with pytest.raises(ArtifactError) as caught:
        open_checkpoint(str(source))
    assert "xxx" in str(caught.value)
    assert LONG[: LONGEST_REFUSAL // 2] not in str(caught.value)


@pytest.mark.parametrize(
    "key", ["embedding_multiplier", "residual_multiplier", "attention_multiplier", "logits_scaling"]
)
def test_multipliers_whose_inverse_would_be_infinite_are_refused(key: str) -> None:
    with pytest.raises(ArtifactError, match=f"{key} is 1e-45, expected a number above 1e-06"):
        config_from_hf({**tiny_config(**of_family("granite")), key: 1e-45})


@pytest.mark.parametrize(
    ("family", "key"),
    [
        *(
            ("granite", key)
            for key in ("embedding_scale", "residual_scale", "logit_scale", "attention.scale")
        ),
        *(("llama", f"rope.{key}") for key in ("freq_base", "scaling.factor", "scaling.attn_factor")),
    ],
)
def test_numbers_of_a_gguf_file_whose_inverse_would_be_infinite_are_refused(
    tmp_path: Path, family: str, key: str
) -> None:
    overrides = of_family(family) if family != "llama" else {}
    path = write_gguf(tmp_path / "m.gguf", overrides, metadata={f"{family}.{key}": 1e-45})
    assert "above 1e-06" in _refusal(path)


def test_more_shards_than_any_model_has_are_counted_and_not_looked_for(tmp_path: Path) -> None:
    folder = write_hf_folder(tmp_path / "m", shards=2)
    found = {f"t{number}": f"s{number}.safetensors" for number in range(5000)}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": found}))
    assert "names 5000 files, expected at most 4096" in _refusal(folder)
