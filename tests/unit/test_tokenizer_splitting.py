"""Text is cut as llama.cpp cuts it, for every pre-tokenizer that GGUF files of byte-level BPE name."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from llorch_export.tokenizer.bpe import pre_tokenizer
from llorch_export.tokenizer.gguf_tokenizer import tokenizer_from_gguf
from llorch_export.tokenizer.splitting import SPLITTING_RULES, SplittingRules
from llorch_serve.errors import ArtifactError
from support.builders.checkpoints import gguf_tokenizer_metadata
from support.builders.paired_bytes import paired_bytes

PUBLISHED = Path(__file__).parents[1] / "data" / "published" / "llama_cpp_splitting.jsonl"
# Texts, by their place, of which llama.cpp makes something else, since it has simpler rules in place of the
# models' own: no capital letters beyond ASCII and no marks in words (8), or no capitals at all (2, 3).
OTHERWISE = {
    **{name: {8} for name in ("tekken", "gpt-4o", "llama4", "kanana2", "talkie", "minimax-m2")},
    "youtu": {2, 3},
    "kimi-k2": {2, 3, 8},
}


def _lines() -> list[dict[str, Any]]:
    return [json.loads(line) for line in PUBLISHED.read_text().splitlines()]


TEXTS, *EXPECTED = _lines()


def _first_name(rules: SplittingRules) -> str:
    return next(name for name, others in SPLITTING_RULES.items() if others == rules)


def _tokenizer(metadata: Mapping[str, object], pre: str) -> Tokenizer:
    metadata = {**metadata, "tokenizer.ggml.pre": pre, "tokenizer.ggml.add_bos_token": None}
    present = {key: value for key, value in metadata.items() if value is not None}
    assets = tokenizer_from_gguf(present, vocab_size=2**17, origin="m.gguf")
    return Tokenizer.from_buffer(assets.tokenizer_json)


@pytest.fixture(scope="module")
def pairs() -> Tokenizer:
    return _tokenizer(paired_bytes(), "gpt-2")


@pytest.mark.parametrize("line", EXPECTED, ids=lambda line: line["pre"][0])
def test_ids_are_those_of_llama_cpp(pairs: Tokenizer, line: dict[str, Any]) -> None:
    for name in line["pre"]:
        rules = SPLITTING_RULES[name]
        assert rules.adds_bos == line["adds_bos"], name
        pairs.pre_tokenizer = pre_tokenizer(rules)
        pairs.model.ignore_merges = rules.whole_words_first
        both = zip(TEXTS["texts"], line["ids"], strict=True)
        other = {place for place, (text, ids) in enumerate(both) if pairs.encode(text).ids != ids}
        assert other == OTHERWISE.get(name, set()), name


def test_every_name_is_compared() -> None:
    assert sorted(name for line in EXPECTED for name in line["pre"]) == sorted(SPLITTING_RULES)


def test_the_rules_of_a_file_are_those_of_its_name() -> None:
    for name in ("deepseek-coder", "tekken"):
        rules = SPLITTING_RULES[name]
        description = json.loads(_tokenizer(gguf_tokenizer_metadata(), name).to_str())
        assert description["pre_tokenizer"] == json.loads(pre_tokenizer(rules).__getstate__())
        assert description["model"]["ignore_merges"] is rules.whole_words_first
        assert (description["post_processor"] is not None) is rules.adds_bos


@pytest.mark.parametrize("name", ["gemma4", "superbpe", "afmoe", "jina-v2-en", "nonsense"])
def test_an_unknown_name_is_refused_with_those_that_are_known(name: str) -> None:
    with pytest.raises(
        ArtifactError, match=f"pre-tokenizer '{name}' is not supported.*deepseek-coder.*tekken"
    ):
        _tokenizer(gguf_tokenizer_metadata(), name)


@pytest.mark.slow
@pytest.mark.parametrize("rules", dict.fromkeys(SPLITTING_RULES.values()), ids=_first_name)
def test_time_grows_with_the_text_and_not_by_its_square(rules: SplittingRules) -> None:
    cut = pre_tokenizer(rules)
    for part in (
        " ",
        "\n",
        "\n ",
        "a",
        "A",
        "Aa",
        "1",
        "a ",
        "'",
        "\u0301",
        "\u4e2d",
        ".",
        " .",
        "a\u0301",
        "1a",
    ):
        text = part * (20_000 // len(part))
        start = time.process_time()
        for end in ("", "x", " ", "1"):
            cut.pre_tokenize_str(text + end)
        assert time.process_time() - start < 1, part
