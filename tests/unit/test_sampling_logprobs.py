"""Log-probabilities equal the definition, stay finite whatever the logits, and name tokens by their exact
bytes.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models

from llorch_serve.sampling.logprobs import (
    LOWEST_LOGPROB,
    TokenLogprob,
    TokenLogprobs,
    TokenScores,
    name_tokens,
    score_token,
)
from llorch_serve.text.token_bytes import TokenBytes
from llorch_serve.text.tokenizer import Tokenizer
from support.builders.tiny_tokenizers import BUILDERS

CHARACTERS = "hello world 你好 🎉é\n\t end"


@pytest.mark.parametrize("scale", [0.0, 1.0, 30.0])
@pytest.mark.parametrize("size", [2, 50, 5000])
def test_scores_are_the_log_softmax(size: int, scale: float) -> None:
    logits = (np.random.default_rng(size).normal(0, 1, size) * scale).astype(np.float32)
    exact = logits.astype(np.float64)
    exact -= exact.max()
    exact -= math.log(np.exp(exact).sum())
    for token in (0, size - 1, int(logits.argmax())):
        found = score_token(logits, token, top=20)
        assert found.token_id == token
        assert found.logprob == pytest.approx(exact[token], rel=1e-6, abs=1e-6)
        order = np.argsort(-logits, kind="stable")[:20]
        assert [index for index, _ in found.top] == order.tolist()
        assert [value for _, value in found.top] == pytest.approx(exact[order], rel=1e-6, abs=1e-6)


def test_no_top_means_the_token_alone() -> None:
    assert score_token(np.zeros(4, np.float32), 2, top=0) == TokenScores(2, pytest.approx(-math.log(4)), ())


@pytest.mark.parametrize("big", [1e4, 1e38, float(np.finfo(np.float32).max)])
def test_what_is_hopeless_is_told_as_the_floor(big: float) -> None:
    found = score_token(np.array([big, -big, -big], dtype=np.float32), 1, top=20)
    assert found == TokenScores(1, LOWEST_LOGPROB, ((0, 0.0), (1, LOWEST_LOGPROB), (2, LOWEST_LOGPROB)))


def test_a_certain_token_is_never_above_certain() -> None:
    logits = np.full(1000, -40, dtype=np.float32)
    logits[3] = 40
    assert score_token(logits, 3, top=1) == TokenScores(3, 0.0, ((3, 0.0),))


@pytest.mark.parametrize("kind", BUILDERS)
@settings(max_examples=100, deadline=None)
@given(text=st.text(st.sampled_from(CHARACTERS), max_size=30))
def test_bytes_of_tokens_make_up_the_text(kind: str, text: str) -> None:
    inner = BUILDERS[kind]()
    naming = TokenBytes(inner)
    ids = inner.encode(text, add_special_tokens=False).ids
    joined = b"".join(map(naming.of, ids)).decode()
    decoded = inner.decode(ids)
    if (
        kind != "byte_level"
    ):  # SentencePiece's decoders drop the space before a text, some every space of its first token
        joined, decoded = joined.lstrip(" "), decoded.lstrip(" ")
    assert joined == decoded


def test_part_of_a_character_is_bytes_and_a_replacement_character() -> None:
    tokenizer = Tokenizer(BUILDERS["byte_level"]())
    (first, *_) = tokenizer.encode("🎉", add_special_tokens=False)
    assert tokenizer.token_bytes(first) == b"\xf0"
    places = name_tokens(TokenScores(first, -0.5, ((first, -0.5), (9999, -3.0))), tokenizer)
    assert places == TokenLogprobs(
        TokenLogprob(first, -0.5, "\ufffd", b"\xf0"),
        (TokenLogprob(first, -0.5, "\ufffd", b"\xf0"), TokenLogprob(9999, -3.0, "", b"")),
    )


@pytest.mark.parametrize(
    ("kind", "token", "expected"),
    [
        ("byte_level", "<|im_end|>", b"<|im_end|>"),
        ("byte_level", " tool ", b" tool "),
        ("byte_fallback", "<0xF0>", b"\xf0"),
        ("byte_fallback", "</s>", b"</s>"),
        ("metaspace", "\u2581hello", b" hello"),
    ],
)
def test_bytes_of_single_tokens(kind: str, token: str, expected: bytes) -> None:
    inner = BUILDERS[kind]()
    token_id = inner.token_to_id(token)
    assert token_id is not None
    assert TokenBytes(inner).of(token_id) == expected


def test_text_that_only_looks_like_a_byte_is_text() -> None:
    inner = tokenizers.Tokenizer(models.BPE(vocab={"<0xZZ>": 0, "a": 1}, merges=[]))
    inner.decoder = decoders.ByteFallback()
    assert TokenBytes(inner).of(0) == b"<0xZZ>"


@pytest.mark.parametrize(
    ("decoder", "token", "expected"), [(decoders.WordPiece(), "##ing", b"##ing"), (None, "x", b"x")]
)
def test_other_decoders_show_a_token_alone(decoder: Any, token: str, expected: bytes) -> None:
    inner = tokenizers.Tokenizer(models.WordLevel({token: 0}, unk_token=token))
    if decoder is not None:
        inner.decoder = decoder
    inner.add_special_tokens([AddedToken("<s>", special=True)])
    assert TokenBytes(inner).of(0) == expected
    assert TokenBytes(inner).of(1) == b"<s>"
    assert TokenBytes(inner).of(2) == b""
