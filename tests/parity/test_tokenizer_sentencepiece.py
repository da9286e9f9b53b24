"""Converted SentencePiece models give the ids of SentencePiece itself."""

from __future__ import annotations

import io
import random

import pytest
import sentencepiece
from tokenizers import Tokenizer

from llorch_export.tokenizer.bpe import sentencepiece_bpe
from llorch_export.tokenizer.sentencepiece_model import read_sentencepiece

CORPUS = (
    "Whether the weather is fine or whether the weather is not, we weather the weather whatever the weather.",
    "Tokens are generated one by one; every step reads all weights once, so bandwidth sets the pace.",
    "def decode(tokens):  # 1234567890",
    "Größe, naïve café, Привет мир, 3.14159 and 2,718 are also text.",
)
FRAGMENTS = [
    *map(chr, range(32, 127)),
    "\t",
    "\n",
    "é",
    "и",
    "中",
    "🙂",
    "▁",
    "   ",
    "the ",
    " weather",
    "token",
    "1234",
]
SPECIALS = {"<unk>": 0, "<s>": 1, "</s>": 2}


@pytest.fixture(scope="module", params=[True, False], ids=["space prefix", "no space prefix"])
def pair(request: pytest.FixtureRequest) -> tuple[sentencepiece.SentencePieceProcessor, Tokenizer]:
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(CORPUS * 3),
        model_writer=model,
        model_type="bpe",
        vocab_size=400,
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        add_dummy_prefix=request.param,
        minloglevel=2,
    )
    data = model.getvalue()
    vocabulary = read_sentencepiece(
        data, add_bos=False, add_eos=False, vocab_size=400, origin="tokenizer.model"
    )
    return sentencepiece.SentencePieceProcessor(model_proto=data), sentencepiece_bpe(vocabulary)


def _texts() -> list[str]:
    rng = random.Random(7)
    return [*CORPUS, "", *("".join(rng.choices(FRAGMENTS, k=rng.randint(1, 60))) for _ in range(1500))]


def test_ids_and_text_are_equal(pair: tuple[sentencepiece.SentencePieceProcessor, Tokenizer]) -> None:
    reference, converted = pair
    for text in _texts():
        ids = reference.encode(text)
        assert converted.encode(text).ids == ids, text
        assert converted.decode(ids) == reference.decode(ids), text


def test_special_tokens_have_their_ids(pair: tuple[sentencepiece.SentencePieceProcessor, Tokenizer]) -> None:
    reference, converted = pair
    assert {token: converted.token_to_id(token) for token in SPECIALS} == SPECIALS
    assert {token: reference.piece_to_id(token) for token in SPECIALS} == SPECIALS
