"""Tokenizers that compose characters first (Unicode's NFC), which GGUF files do not say, do so as in
transformers.
"""

from __future__ import annotations

import unicodedata
from typing import Any

import pytest

from llorch_export.tokenizer.gguf_tokenizer import tokenizer_from_gguf
from llorch_serve.text.tokenizer import Tokenizer
from support.builders.checkpoints import gguf_tokenizer_metadata
from support.builders.multilingual import multilingual_texts

pytestmark = pytest.mark.reference

TEXTS = (
    "e\u0301",
    "Vie\u0323\u0302t Nam",
    "\u1112\u1161\u11ab\u1100\u1173\u11af",
    "\u212b \ufb01",
    *multilingual_texts(300),
)


@pytest.mark.parametrize(
    ("pre", "module", "name"),
    [
        ("qwen2", "qwen2", "Qwen2Tokenizer"),
        ("qwen35", "qwen3_5", "Qwen3_5Tokenizer"),
        ("command-r", "cohere", "CohereTokenizer"),
    ],
)
def test_ids_are_those_of_transformers(pre: str, module: str, name: str) -> None:
    import importlib

    metadata: dict[str, Any] = gguf_tokenizer_metadata() | {"tokenizer.ggml.pre": pre}
    merges = [tuple(merge.split(" ")) for merge in metadata["tokenizer.ggml.merges"]]
    vocabulary = {token: place for place, token in enumerate(metadata["tokenizer.ggml.tokens"])}
    kind = getattr(importlib.import_module(f"transformers.models.{module}.tokenization_{module}"), name)
    reference = kind(vocab=vocabulary, merges=merges)._tokenizer
    assets = tokenizer_from_gguf(metadata, vocab_size=512, origin="m.gguf")
    tokenizer = Tokenizer.from_json(assets.tokenizer_json, origin="m.gguf")
    for text in TEXTS:
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert list(ids) == reference.encode(text, add_special_tokens=False).ids, ascii(text)
    assert sum(unicodedata.normalize("NFC", text) != text for text in TEXTS) > 20


@pytest.mark.parametrize("pre", ["llama-bpe", "deepseek-r1-qwen", "gpt-2"])
def test_others_take_characters_as_they_are(pre: str) -> None:
    metadata = gguf_tokenizer_metadata() | {"tokenizer.ggml.pre": pre}
    assets = tokenizer_from_gguf(metadata, vocab_size=512, origin="m.gguf")
    tokenizer = Tokenizer.from_json(assets.tokenizer_json, origin="m.gguf")
    assert (
        tokenizer.decode(tokenizer.encode("e\u0301", add_special_tokens=False), keep_special_tokens=False)
        == "e\u0301"
    )
