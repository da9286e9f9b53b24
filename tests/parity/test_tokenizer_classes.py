"""Ids of folders that name a tokenizer class are those of transformers, or a notice says where not."""

from __future__ import annotations

import ast
import json
import logging
import re
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Regex, Tokenizer, normalizers, pre_tokenizers, processors

from llorch_export.checkpoint.base import TokenizerAssets
from llorch_export.checkpoint.folder import ModelFolder
from llorch_export.tokenizer.reading import tokenizer_from_folder
from llorch_export.tokenizer.splitting import splitting_rules
from support.builders.tiny_tokenizers import byte_fallback, byte_level

transformers = pytest.importorskip("transformers")

FLAGS = [
    {},
    {"add_bos_token": False},
    {"add_bos_token": True},
    {"add_bos_token": None, "add_eos_token": True},
    {"add_bos_token": True, "add_eos_token": True},
]
NAMES = (
    None,
    "LlamaTokenizer",
    "LlamaTokenizerFast",
    "PreTrainedTokenizerFast",
    "TokenizersBackend",
    "GPT2Tokenizer",
    "Qwen2Tokenizer",
    "GemmaTokenizer",
    "GPTNeoXTokenizer",
)
TEXTS = ("hello world", "", " the  world", "it's 1234 世界 e\u0301", "<s>user</s> end", "\n\nthe end\n")
NAMED = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}


def _kinds() -> dict[str, Tokenizer]:
    special = ("<unk>", "<s>", "</s>", "<pad>", "<mask>", "<|endoftext|>", "<|padding|>")
    found = {"sentencepiece": byte_fallback(), "gpt2": byte_level(special), "qwen2": byte_level(special)}
    with_numbers = json.loads(byte_level(special).to_str())
    with_numbers["model"]["vocab"]["20"] = 1000
    with_numbers["model"]["merges"].append(["2", "0"])
    found["digits"] = Tokenizer.from_str(json.dumps(with_numbers))
    found["digits"].pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    (pattern,) = splitting_rules("qwen2", origin="test").patterns
    found["qwen2"].normalizer = normalizers.NFC()
    found["qwen2"].pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    return found


KINDS = _kinds()


def _write(path: Path, kind: str, settings: dict[str, Any], model_type: str, *, bos: bool) -> Path:
    inner = Tokenizer.from_str(KINDS[kind].to_str())
    single = "<s> $A" if bos else "$A"
    inner.post_processor = processors.TemplateProcessing(
        single=single, special_tokens=[("<s>", inner.token_to_id("<s>"))] if bos else []
    )
    path.mkdir()
    inner.save(str(path / "tokenizer.json"))
    (path / "config.json").write_text(json.dumps({"model_type": model_type}))
    (path / "tokenizer_config.json").write_text(json.dumps(settings))
    return path


def _ours(folder: Path) -> TokenizerAssets:
    config = json.loads((folder / "config.json").read_text())
    return tokenizer_from_folder(ModelFolder(folder), config, vocab_size=1024)


def _reference(folder: Path) -> Any:
    logging.getLogger("transformers").setLevel(logging.ERROR)
    return transformers.AutoTokenizer.from_pretrained(folder)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("model_type", ["llama", "qwen2", "qwen3"])
def test_ids_are_those_of_transformers_or_a_notice_tells_of_the_class(
    tmp_path: Path, name: str | None, kind: str, model_type: str
) -> None:
    settings = NAMED | ({"tokenizer_class": name} if name else {})
    folder = _write(tmp_path / "m", kind, settings, model_type, bos=True)
    assets = _ours(folder)
    notices = [notice for notice in assets.notices if notice.startswith("tokenizer_class is ")]
    if notices:
        assert len(notices) == 1
        assert "; tokenizer.json counts here" in notices[0]
        return
    inner, reference = Tokenizer.from_buffer(assets.tokenizer_json), _reference(folder)
    for text in TEXTS:
        assert inner.encode(text).ids == reference(text).input_ids, repr(text)


@pytest.mark.parametrize("bos", [True, False], ids=["adds", "adds none"])
@pytest.mark.parametrize("flags", FLAGS)
@pytest.mark.parametrize(
    ("name", "kind"),
    [
        (None, "gpt2"),
        ("LlamaTokenizer", "sentencepiece"),
        ("PreTrainedTokenizerFast", "gpt2"),
        ("GPT2Tokenizer", "gpt2"),
        ("Qwen2Tokenizer", "qwen2"),
    ],
)
def test_flags_beside_tokenizer_json_have_no_effect_in_any_class_and_a_notice_says_so(
    tmp_path: Path, name: str | None, kind: str, flags: dict[str, Any], bos: bool
) -> None:
    settings = NAMED | flags | ({"tokenizer_class": name} if name else {})
    folder = _write(tmp_path / "m", kind, settings, "llama", bos=bos)
    assets, reference = _ours(folder), _reference(folder)
    inner = Tokenizer.from_buffer(assets.tokenizer_json)
    for text in TEXTS:
        assert inner.encode(text).ids == reference(text).input_ids, repr(text)
    told = {notice.split()[0] for notice in assets.notices if "its rules count" in notice}
    adds = {"add_bos_token": bos, "add_eos_token": False}
    assert told == {key for key, value in flags.items() if isinstance(value, bool) and value is not adds[key]}


@pytest.mark.parametrize(("name", "kind"), [("GPT2Tokenizer", "digits"), ("Qwen2Tokenizer", "gpt2")])
def test_a_notice_of_other_rules_shows_the_ids_that_transformers_gives(
    tmp_path: Path, name: str, kind: str
) -> None:
    folder = _write(tmp_path / "m", kind, NAMED | {"tokenizer_class": name}, "llama", bos=True)
    (notice,) = _ours(folder).notices
    found = re.search(r"makes the ids (\[.*?\]) of ('.*'), and tokenizer.json", notice)
    assert found
    assert _reference(folder)(ast.literal_eval(found[2])).input_ids == json.loads(found[1])


@pytest.mark.parametrize(("name", "kind"), [("GPT2Tokenizer", "gpt2"), ("Qwen2Tokenizer", "qwen2")])
def test_a_notice_tells_of_added_tokens_that_the_class_drops(tmp_path: Path, name: str, kind: str) -> None:
    inner = Tokenizer.from_str(KINDS[kind].to_str())
    decoder = {
        str(id_): {"content": token.content, "special": token.special}
        for id_, token in inner.get_added_tokens_decoder().items()
    }
    inner.add_tokens([AddedToken("<dropped>", special=True)])
    settings = NAMED | {
        "pad_token": "<pad>",
        "mask_token": "<mask>",
        "tokenizer_class": name,
        "added_tokens_decoder": decoder,
    }
    folder = _write(tmp_path / "m", kind, settings, "llama", bos=True)
    inner.save(str(folder / "tokenizer.json"))
    text = "a <dropped> b"
    assert (
        Tokenizer.from_buffer(_ours(folder).tokenizer_json).encode(text).ids
        != _reference(folder)(text).input_ids
    )
    (notice,) = [notice for notice in _ours(folder).notices if notice.startswith("tokenizer_class is ")]
    assert "does not know '<dropped>' as a token" in notice
    decoder[str(inner.token_to_id("<dropped>"))] = {"content": "<dropped>", "special": True}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    assert not [notice for notice in _ours(folder).notices if notice.startswith("tokenizer_class is ")]
