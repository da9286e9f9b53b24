"""Lines that begin alike are answered together, so that a worker computes their beginnings once."""

from __future__ import annotations

import itertools
import json
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llorch_serve.batch.prefixes import ENDS, beginning_of, look, prefix_key


def body(**fields: object) -> bytes:
    return json.dumps(fields).encode()


def shared(beginnings: list[bytes]) -> int:
    """Return how many bytes each text shares with the one before it, in all."""
    return sum(
        sum(1 for _ in itertools.takewhile(lambda two: two[0] == two[1], zip(*pair, strict=False)))
        for pair in itertools.pairwise(beginnings)
    )


def text(drawn: random.Random, length: int) -> str:
    return "".join(drawn.choices("abcdefgh ", k=length))


@pytest.mark.parametrize("length", [150, 1000, 5000])
@pytest.mark.parametrize("common", [0, 300])
def test_questions_about_one_text_lie_together(length: int, common: int) -> None:
    drawn = random.Random(7)
    boilerplate = text(drawn, common)
    texts = [boilerplate + text(drawn, length) for _ in range(50)]
    lines = [
        (number, body(messages=[{"role": "user", "content": f"{one}\n{text(drawn, 30)}"}]))
        for number, one in enumerate(texts)
        for _ in range(10)
    ]
    drawn.shuffle(lines)
    lines.sort(key=lambda line: prefix_key(beginning_of(line[1])))
    assert len(list(itertools.groupby(number for number, _ in lines))) == 50


@pytest.mark.parametrize("seed", range(2))
def test_nearly_all_that_could_be_shared_is(seed: int) -> None:
    drawn = random.Random(seed)
    tree = [""]
    for _ in range(200):
        tree.append(drawn.choice(tree) + text(drawn, drawn.choice([20, 100, 400, 2000])))
    beginnings = [one.encode() for one in tree]
    drawn.shuffle(beginnings)
    by_key = sorted(beginnings, key=prefix_key)
    assert shared(by_key) >= 0.8 * shared(sorted(beginnings))
    assert shared(by_key) > 1.5 * shared(beginnings)


@given(one=st.binary(max_size=400), other=st.binary(max_size=400), common=st.binary(max_size=400))
def test_equal_beginnings_have_equal_beginnings_of_keys(one: bytes, other: bytes, common: bytes) -> None:
    keys = prefix_key(common + one), prefix_key(common + other)
    same = prefix_key(common)
    assert all(key.startswith(same) for key in keys)


def test_ends_grow_by_a_quarter_to_a_mebibyte() -> None:
    assert all(1.2 < after / before <= 1.25 for before, after in itertools.pairwise(ENDS))
    assert (ENDS[0], ENDS[-1] >= 2**20) == (64, True)


@pytest.mark.parametrize(
    ("raw", "beginning"),
    [
        (body(prompt="abc"), b"abc"),
        (body(prompt=["abc", "d"]), b"abc\nd"),
        (body(prompt=[1, 22]), b"1\n22"),
        (body(input="abc", instructions="do"), b"do\nabc"),
        (body(input=[{"role": "user", "content": [{"type": "input_text", "text": "x"}]}]), b"user\nx"),
        (
            body(messages=[{"content": "x", "role": "user"}, {"role": "tool", "content": None}]),
            b"user\nx\ntool",
        ),
        (b'{"messages": [{"role": "user", "content": "x"}], "tools": [1, {}]}', b"[1, {}]\nuser\nx"),
        (body(messages="x", prompt=None), b"x"),
        (b'{"prompt": "\\ud800"}', b""),
        (b'{"prompt": ' + b"[" * 900 + b"]" * 900 + b"}", b""),
        (b'{"prompt": ' + b"[" * 9000 + b"]" * 9000 + b"}", b""),
        (b"{}", b""),
    ],
)
def test_the_beginning_is_what_the_model_sees_first(raw: bytes, beginning: bytes) -> None:
    assert beginning_of(raw) == beginning


@pytest.mark.parametrize(
    ("fields", "tokens"),
    [
        ({}, 256),
        ({"max_tokens": 7}, 7),
        ({"max_completion_tokens": 9, "max_tokens": 7}, 9),
        ({"max_output_tokens": 3, "n": 4}, 12),
        ({"max_tokens": -1}, 256),
        ({"max_tokens": True}, 256),
        ({"max_tokens": "7"}, 256),
        ({"max_tokens": 2**32, "n": 2**32}, 256),
        ({"max_tokens": 2**31 - 1, "n": 1000}, 2**31),
    ],
)
def test_an_answer_is_as_long_as_it_may_be(fields: dict[str, object], tokens: int) -> None:
    raw = body(**fields)
    assert look(raw).tokens in (tokens, tokens + len(raw) // 4)
    assert look(body(prompt="x" * 4000, **fields)).tokens >= min(tokens + 1000, 2**31)


@pytest.mark.parametrize(
    ("value", "is_stream"), [(True, True), (False, False), (None, False), ("True", False)]
)
def test_streams_are_seen(value: object, is_stream: bool) -> None:
    assert look(body(stream=value)).is_stream is is_stream
