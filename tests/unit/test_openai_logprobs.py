"""Log-probabilities in OpenAI's shapes, where tokens end inside characters."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from llorch_serve.engine.sequence import FinishReason
from llorch_serve.http.openai_logprobs import Columns, chat_logprobs
from llorch_serve.requests import Completion, GenerationUpdate, Timings
from llorch_serve.sampling.logprobs import TokenLogprob, TokenLogprobs


def token(raw: bytes, logprob: float = -1.0) -> TokenLogprob:
    return TokenLogprob(int.from_bytes(raw), logprob, raw.decode("utf-8", "replace"), raw)


def places(*raws: bytes) -> tuple[TokenLogprobs, ...]:
    return tuple(TokenLogprobs(token(raw)) for raw in raws)


def update(text: str, *raws: bytes, prompt: tuple[bytes, ...] = ()) -> GenerationUpdate:
    return GenerationUpdate("r", text, (), logprobs=places(*raws), prompt_logprobs=places(*prompt))


COMPLETION = Completion(FinishReason.LENGTH, None, 1, 2, 3, Timings(0, 0, 0))
SMILE = "😀".encode()


@pytest.mark.parametrize("cuts", [(1, 2, 3), (2,), (3,), ()])
def test_offsets_are_those_of_the_text(cuts: tuple[int, ...]) -> None:
    edges = (0, *cuts, 4)
    pieces = [SMILE[a:b] for a, b in itertools.pairwise(edges)]
    raws = [b"a", *pieces, b"bc", *pieces, b"d"]
    text = b"".join(raws).decode()
    columns = Columns().of(update(text, *raws))
    assert columns["text_offset"] == [0, *[1] * len(pieces), 2, *[4] * len(pieces), 5]
    assert "".join(columns["tokens"]) == text
    for name, offset in zip(columns["tokens"], columns["text_offset"], strict=True):
        assert text[offset:].startswith(name)


def test_parts_of_characters_are_named_by_their_bytes_in_chats() -> None:
    content = chat_logprobs(places(b"a", SMILE[:2], SMILE[2:], b""))["content"]
    assert [place["token"] for place in content] == ["a", r"\xf0\x9f", r"\x98\x80", ""]
    assert [place["bytes"] for place in content] == [[97], [240, 159], [152, 128], None]


def test_alternatives_that_look_alike_are_all_told() -> None:
    top = (token(b"\xf0", -0.5), token(b"\xe2", -1.5), token(b"a", -2.5))
    one = GenerationUpdate("r", "", (), logprobs=(TokenLogprobs(top[0], top),))
    (found,) = Columns().of(one)["top_logprobs"]
    assert found == {"": -0.5, r"bytes:\xe2": -1.5, "a": -2.5}


def test_alternatives_of_one_text_keep_the_likeliest() -> None:
    top = (token(b"a", -0.5), token(b"a", -1.5))
    one = GenerationUpdate("r", "", (), logprobs=(TokenLogprobs(top[0], top),))
    assert Columns().of(one)["top_logprobs"] == [{"a": -0.5}]


def test_offsets_go_on_from_chunk_to_chunk() -> None:
    columns, found = Columns(), []
    for text, raw in (("a", b"a"), ("", SMILE[:2]), ("😀", SMILE[2:]), ("b", b"b")):
        found += columns.of(update(text, raw))["text_offset"]
    assert found == [0, 1, 1, 2]


def test_bytes_that_are_no_character_count_as_their_replacements() -> None:
    columns = Columns().of(update("a\ufffdb", b"a", b"\xf0\x9f", b"b"))
    assert columns["tokens"] == ["a", "", "\ufffdb"]
    assert columns["text_offset"] == [0, 1, 1]


def test_an_answer_that_ends_inside_a_character_ends_with_a_replacement() -> None:
    ended = replace(update("a\ufffd", b"a", SMILE[:2]), completion=COMPLETION)
    assert Columns().of(ended)["tokens"] == ["a", "\ufffd"]


def test_the_prompts_first_token_is_what_is_left_of_the_text() -> None:
    columns = Columns()
    first = columns.of(update("Hé", prompt=("é".encode()[:1], "é".encode()[1:])))
    assert first["tokens"] == ["H", "", "é"]
    assert first["text_offset"] == [0, 1, 1]
    assert (first["token_logprobs"][0], first["top_logprobs"][0]) == (None, None)
    # Of a token that ends inside a character the text has nothing yet.
    whole = Columns().of(update("Hi", SMILE[:2], prompt=(b"i",)))
    assert whole["tokens"] == ["H", "i", ""]
    assert whole["text_offset"] == [0, 1, 2]


STOP = TokenLogprob(7, -0.25, "<|eos|>", b"<|eos|>")


def stopped(answer: GenerationUpdate, *top: TokenLogprob) -> GenerationUpdate:
    completion = replace(COMPLETION, reason=FinishReason.STOP, stop_logprobs=TokenLogprobs(STOP, top))
    return replace(answer, completion=completion)


def test_a_stop_token_stands_behind_the_text() -> None:
    columns = Columns().of(stopped(update("Hi!", b"!", prompt=(b"i",)), STOP, token(b"a", -1.5)))
    assert columns["tokens"] == ["H", "i", "!", "<|eos|>"]
    assert columns["token_logprobs"] == [None, -1.0, -1.0, -0.25]
    assert columns["top_logprobs"][-1] == {"<|eos|>": -0.25, "a": -1.5}
    assert columns["text_offset"] == [0, 1, 2, 3]


def test_a_stop_token_ends_a_stream_of_columns() -> None:
    columns = Columns()
    columns.of(update("a", b"a"))
    columns.of(update("", SMILE[:2]))
    # The text shows the part of a character as one replacement.
    assert columns.of(stopped(update("\ufffd"))) == {
        "tokens": ["<|eos|>"],
        "token_logprobs": [-0.25],
        "top_logprobs": [{}],
        "text_offset": [2],
    }


def test_a_stop_token_behind_a_part_of_a_character_stands_where_the_whole_text_ends() -> None:
    columns = Columns().of(stopped(update("a\ufffd", b"a", SMILE[:2])))
    assert columns["tokens"] == ["a", "\ufffd", "<|eos|>"]
    assert columns["text_offset"] == [0, 1, 2]
