"""Rebuilt tokenizers give the ids that llama.cpp ships as test vectors.

The vectors come with vocabulary files of several megabytes, which are not part of this project. They lie in
``vendor/llama.cpp/models`` of the llama-cpp-python 0.3.16 source package; ``LLORCH_LLAMA_CPP_MODELS`` names
that folder.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from llorch_export.checkpoint.gguf_header import read_header
from llorch_export.tokenizer.gguf_tokenizer import tokenizer_from_gguf
from llorch_serve.text.tokenizer import Tokenizer

MODELS = os.environ.get("LLORCH_LLAMA_CPP_MODELS")

pytestmark = pytest.mark.skipif(
    not MODELS, reason="LLORCH_LLAMA_CPP_MODELS does not name llama.cpp's models folder"
)


@pytest.mark.parametrize(
    "name", ["llama-spm", "llama-bpe", "gpt-2", "phi-3", "refact", "starcoder", "command-r", "qwen2"]
)
def test_ids_are_those_of_llama_cpp(name: str) -> None:
    path = Path(MODELS or "") / f"ggml-vocab-{name}.gguf"
    metadata = read_header(path).metadata
    assets = tokenizer_from_gguf(metadata, vocab_size=2**20, origin=path.name)
    tokenizer = Tokenizer.from_json(assets.tokenizer_json, origin=path.name)
    texts = path.with_name(f"{path.name}.inp").read_bytes().decode().split("\n__ggml_vocab_test__\n")
    lines = path.with_name(f"{path.name}.out").read_text().split("\n")
    assert len(texts) == len(lines) == 47
    for text, line in zip(texts, lines, strict=True):
        assert tokenizer.encode(text, add_special_tokens=False) == tuple(
            int(token) for token in line.split()
        ), repr(text)


@pytest.mark.parametrize(
    ("name", "stops"),
    [
        ("llama-spm", (2,)),
        ("llama-bpe", (128001, 128009)),  # <|end_of_text|>, <|eot_id|>
        ("phi-3", (32000, 32007)),  # <|endoftext|>, <|end|>
        ("qwen2", (151643, 151645)),  # <|endoftext|>, <|im_end|>
        ("gpt-2", (50256,)),
        ("refact", (0, 4, 18)),  # <|endoftext|>, <fim_pad>, <reponame>
        ("command-r", (0, 255001)),  # <PAD>, <|END_OF_TURN_TOKEN|>
    ],
)
def test_what_ends_an_answer_is_what_llama_cpp_takes_for_it(name: str, stops: tuple[int, ...]) -> None:
    path = Path(MODELS or "") / f"ggml-vocab-{name}.gguf"
    metadata = read_header(path).metadata
    assert tokenizer_from_gguf(metadata, vocab_size=2**20, origin=path.name).stop_token_ids == stops
