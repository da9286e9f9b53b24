"""Rebuilt tokenizers give the ids that llama.cpp ships as test vectors, and texts id by id as at once.

The vectors come with vocabulary files of several megabytes, which are not part of this project. They lie in
``vendor/llama.cpp/models`` of the llama-cpp-python 0.3.16 source package; ``LLORCH_LLAMA_CPP_MODELS`` names
that folder.
"""

from __future__ import annotations

import base64
import json
import os
from pathlib import Path

import pytest
import tokenizers

from llorch_export.checkpoint.gguf_header import read_header
from llorch_export.tokenizer.bpe import byte_level_bpe
from llorch_export.tokenizer.gguf_tokenizer import tokenizer_from_gguf
from llorch_export.tokenizer.splitting import SPLITTING_RULES
from llorch_export.tokenizer.tekken import read_tekken
from llorch_export.tokenizer.tiktoken_file import read_tiktoken
from llorch_serve.text.token_bytes import byte_level_alphabet
from llorch_serve.text.tokenizer import TextStream, Tokenizer
from support.builders.multilingual import multilingual_texts

MODELS = os.environ.get("LLORCH_LLAMA_CPP_MODELS")

pytestmark = pytest.mark.skipif(
    not MODELS, reason="LLORCH_LLAMA_CPP_MODELS does not name llama.cpp's models folder"
)


NAMES = (
    "llama-spm",
    "llama-bpe",
    "gpt-2",
    "phi-3",
    "refact",
    "starcoder",
    "command-r",
    "qwen2",
    "deepseek-llm",
    "deepseek-coder",
    "falcon",
    "mpt",
)


@pytest.mark.parametrize("name", NAMES)
def test_ids_are_those_of_llama_cpp(name: str) -> None:
    path = _path(name)
    assets = tokenizer_from_gguf(read_header(path).metadata, vocab_size=2**20, origin=path.name)
    tokenizer = Tokenizer.from_json(assets.tokenizer_json, origin=path.name)
    for text, ids in _vectors(name):
        assert tokenizer.encode(text, add_special_tokens=False) == ids, repr(text)
    for text in [*multilingual_texts(100), *(text for text, _ in _vectors(name))]:
        ids = tokenizer.encode(text, add_special_tokens=False)
        stream = TextStream(tokenizer)
        streamed = "".join(stream.push(token_id)[0] for token_id in ids) + stream.finish()
        assert streamed == tokenizer.decode(ids, keep_special_tokens=False), repr(text)


def test_a_tiktoken_file_of_llama_3_gives_them_too() -> None:
    tokens = _token_bytes("llama-bpe")
    lines = (base64.b64encode(token) + f" {rank}\n".encode() for rank, token in enumerate(tokens[:128000]))
    vocabulary = read_tiktoken(
        b"".join(lines), {}, since_3_1=False, add_bos=False, add_eos=False, vocab_size=128256, origin="x"
    )
    _compare(byte_level_bpe(vocabulary), "llama-bpe", first=0)


def test_a_tekken_file_of_gpt_2_gives_them_too() -> None:
    # No tekken.json is part of these files, but GPT-2's vocabulary is one of the kind.
    tokens = _token_bytes("gpt-2")[:50256]
    document = {
        "config": {
            "pattern": SPLITTING_RULES["gpt-2"].patterns[0],
            "default_vocab_size": len(tokens) + 20,
            "default_num_special_tokens": 20,
            "version": "v3",
        },
        "vocab": [
            {"rank": rank, "token_bytes": base64.b64encode(token).decode(), "token_str": None}
            for rank, token in enumerate(tokens)
        ],
    }
    data = json.dumps(document).encode()
    vocabulary = read_tekken(data, add_bos=False, add_eos=False, vocab_size=2**20, origin="tekken.json")
    _compare(byte_level_bpe(vocabulary), "gpt-2", first=20)


def _compare(tokenizer: tokenizers.Tokenizer, name: str, *, first: int) -> None:
    for text, ids in _vectors(name):
        assert tokenizer.encode(text).ids == [first + token_id for token_id in ids], repr(text)


def _path(name: str) -> Path:
    return Path(MODELS or "") / f"ggml-vocab-{name}.gguf"


def _vectors(name: str) -> list[tuple[str, tuple[int, ...]]]:
    path = _path(name)
    texts = path.with_name(f"{path.name}.inp").read_bytes().decode().split("\n__ggml_vocab_test__\n")
    lines = path.with_name(f"{path.name}.out").read_text().split("\n")
    assert len(texts) == len(lines) == 47
    return [
        (text, tuple(int(token) for token in line.split())) for text, line in zip(texts, lines, strict=True)
    ]


def _token_bytes(name: str) -> list[bytes]:
    alphabet = byte_level_alphabet()
    tokens = read_header(_path(name)).metadata["tokenizer.ggml.tokens"]
    assert isinstance(tokens, (list, tuple))
    return [bytes(alphabet[char] for char in token) for token in tokens if set(token) <= alphabet.keys()]


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
    path = _path(name)
    metadata = read_header(path).metadata
    assert tokenizer_from_gguf(metadata, vocab_size=2**20, origin=path.name).stop_token_ids == stops
