"""Tokenizer and TextStream: pieces always join to the whole decode, and nothing breaks on bad bytes or bad
files.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from llorch_serve.errors import ArtifactError, InvalidRequestError
from llorch_serve.text import tokenizer as text_module
from llorch_serve.text.tokenizer import TextStream, Tokenizer
from support.builders.tiny_tokenizers import BUILDERS, byte_fallback, byte_level

TOKENIZERS = {name: Tokenizer(build()) for name, build in BUILDERS.items()}
KINDS = pytest.mark.parametrize("kind", list(TOKENIZERS))


def byte_ids(kind: str, data: bytes) -> list[int]:
    inner = BUILDERS[kind]()
    if kind == "byte_level":
        # The standard byte-to-character table of byte-level BPE, from its definition.
        printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
        others = [byte for byte in range(256) if byte not in printable]
        names = [chr(byte) if byte in printable else chr(256 + others.index(byte)) for byte in data]
    else:
        names = [f"<0x{byte:02X}>" for byte in data]
    ids = [inner.token_to_id(name) for name in names]
    assert None not in ids
    return [id_ for id_ in ids if id_ is not None]


def id_lists(tokenizer: Tokenizer) -> st.SearchStrategy[list[int]]:
    tokens = range(tokenizer.vocab_size + 3)  # a padded model can choose ids that the tokenizer lacks
    tail = st.integers(tokenizer.vocab_size - 14, tokenizer.vocab_size + 2)
    lead_bytes = st.sampled_from(byte_ids("byte_fallback", bytes([0xF0, 0x9F, 0x98, 0x80, 0xE4, 0x0A, 0x41])))
    return st.lists(st.one_of(st.sampled_from(tokens), tail, lead_bytes), max_size=24)


@KINDS
@pytest.mark.parametrize("keep", [False, True])
@settings(max_examples=400, deadline=None)
@given(data=st.data())
def test_pieces_join_to_the_whole_decode_at_every_cut(kind: str, keep: bool, data: st.DataObject) -> None:
    tokenizer = TOKENIZERS[kind]
    ids = data.draw(id_lists(tokenizer))
    for cut in range(len(ids) + 1):
        stream = TextStream(tokenizer, keep_special_tokens=keep)
        pieces = [stream.push(id_)[0] for id_ in ids[:cut]]
        assert "".join(pieces) + stream.finish() == tokenizer._inner.decode(
            ids[:cut], skip_special_tokens=not keep
        )


@KINDS
@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_special_tokens_can_be_kept_one_by_one(kind: str, data: st.DataObject) -> None:
    tokenizer = TOKENIZERS[kind]
    ids = data.draw(id_lists(tokenizer))
    [kept, *_] = tokenizer.special_tokens
    stream = TextStream(tokenizer, kept=frozenset({kept}))
    shown = "".join(stream.push(id_)[0] for id_ in ids) + stream.finish()
    left = [id_ for id_ in ids if id_ == kept or id_ not in tokenizer.special_tokens]
    assert shown == tokenizer._inner.decode(left, skip_special_tokens=False)


@KINDS
@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_stop_strings_cut_the_stream_where_they_cut_the_text(kind: str, data: st.DataObject) -> None:
    tokenizer = TOKENIZERS[kind]
    ids = data.draw(id_lists(tokenizer))
    stop = data.draw(st.sampled_from(["\n", "A", "wo", "  ", "A\n", "a b", "😀"]))
    stream = TextStream(tokenizer, [stop])
    shown = ""
    for count, id_ in enumerate(ids, 1):
        piece, matched = stream.push(id_)
        shown += piece
        whole = tokenizer._inner.decode(ids[:count], skip_special_tokens=True)
        assert stop not in shown
        assert (matched is None) == (stop not in whole)
        if matched:
            assert shown == whole[: whole.index(stop)]
            return
    assert shown + stream.finish() == tokenizer._inner.decode(ids, skip_special_tokens=True)


@KINDS
@pytest.mark.parametrize("text", ["😀", "你好", "é", "👩‍👩‍👧", "x😀y你z"])
def test_characters_never_break_while_streaming(kind: str, text: str) -> None:
    stream = TextStream(TOKENIZERS[kind])
    pieces = [stream.push(id_)[0] for id_ in byte_ids(kind, text.encode())]
    assert not any("\ufffd" in piece for piece in pieces)
    assert "".join(pieces) + stream.finish() == text


@KINDS
@pytest.mark.parametrize(
    "data", [b"\xff\xfeA", b"\xf0\x9f\x98", b"A\xe4\xbd", b"\xed\xa0\x80", b"\xff" * 50 + b"A"]
)
def test_invalid_bytes_become_what_the_whole_decode_makes_of_them(kind: str, data: bytes) -> None:
    ids = byte_ids(kind, data)
    stream = TextStream(TOKENIZERS[kind])
    shown = "".join(stream.push(id_)[0] for id_ in ids) + stream.finish()
    assert shown == TOKENIZERS[kind].decode(ids, keep_special_tokens=False)
    assert "\ufffd" in shown


def test_endless_invalid_bytes_are_shown_as_they_come() -> None:
    [bad] = byte_ids("byte_level", b"\xff")
    stream = TextStream(TOKENIZERS["byte_level"])
    shown = "".join(stream.push(bad)[0] for _ in range(1000))
    assert len(shown) == 999
    assert len(stream._window) <= 4


def test_a_stop_string_inside_a_run_of_byte_tokens_ends_it_at_once() -> None:
    stream = TextStream(TOKENIZERS["byte_fallback"], ["\n"])
    newline = byte_ids("byte_fallback", b"\n")[0]
    assert stream.push(newline) == ("", "\n")


@KINDS
@pytest.mark.parametrize(
    "data", [b"a" * 2000, "\u4f60".encode() * 700, b"\xff" * 2000, b"a" * 1000 + b"\xff" * 1000]
)
@pytest.mark.parametrize("stops", [(), ("\n", "zz", "\ufffd\n")])
def test_each_token_costs_the_same_however_long_the_answer(
    kind: str, data: bytes, stops: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = Tokenizer(BUILDERS[kind]())
    decoded = 0
    decode = tokenizer.decode

    def counted(ids: Sequence[int], keep_special_tokens: bool) -> str:
        nonlocal decoded
        decoded += len(ids)
        return decode(ids, keep_special_tokens)

    monkeypatch.setattr(tokenizer, "decode", counted)
    ids = byte_ids(kind, data)
    stream = TextStream(tokenizer, stops)
    shown = "".join(stream.push(id_)[0] for id_ in ids) + stream.finish()
    assert decoded <= 12 * len(ids)
    assert shown == decode(ids, False)


@settings(max_examples=300, deadline=None)
@given(data=st.data())
@pytest.mark.parametrize("kind", ["byte_fallback", "metaspace", "unigram"])
def test_a_run_of_byte_tokens_ends_at_the_token_that_completes_a_stop_string(
    kind: str, data: st.DataObject
) -> None:
    tokenizer = TOKENIZERS[kind]
    pieces = st.sampled_from(["a", " ", "\n", "\u4f60", "\u2581", "\U0001f600"])
    characters = st.lists(pieces.map(str.encode), max_size=6)
    content = b"".join(data.draw(characters)) + data.draw(st.binary(max_size=3))
    content += b"".join(data.draw(characters))
    stops = data.draw(st.lists(st.text("a \n\u4f60\ufffd", min_size=1, max_size=3), min_size=1, max_size=3))
    before = data.draw(st.sampled_from(["", "hello", "user end"]))
    ids = [*tokenizer.encode(before, add_special_tokens=False), *byte_ids(kind, content)]
    stream = TextStream(tokenizer, stops)
    shown = ""
    for count, id_ in enumerate(ids, 1):
        piece, matched = stream.push(id_)
        shown += piece
        whole = tokenizer.decode(ids[:count], keep_special_tokens=False)
        assert (matched is None) == all(stop not in whole for stop in stops)
        if matched:
            return
    assert shown + stream.finish() == tokenizer.decode(ids, keep_special_tokens=False)


@pytest.mark.parametrize(
    ("name", "byte"), [("<0x0A>", 10), ("<0x0a>", 10), ("<0x+A>", 10), ("<0x 1>", None), ("<0x-0>", None)]
)
def test_byte_tokens_are_those_that_the_decoder_takes_for_bytes(name: str, byte: int | None) -> None:
    inner = tokenizers.Tokenizer(tokenizers.models.BPE({name: 0}, []))
    inner.decoder = tokenizers.decoders.ByteFallback()
    tokenizer = Tokenizer(inner)
    assert tokenizer.byte_values.get(0) == byte
    text = name if byte is None else chr(byte)
    assert inner.decode([0]) == text
    assert tokenizer.token_bytes(0) == text.encode()


@KINDS
def test_the_first_word_has_the_space_that_the_whole_decode_gives_it(kind: str) -> None:
    tokenizer = TOKENIZERS[kind]
    ids = tokenizer.encode("hello world", add_special_tokens=False)
    stream = TextStream(tokenizer)
    assert [piece for id_ in ids if (piece := stream.push(id_)[0])] == ["hello", " world"]


def test_the_post_processor_decides_about_bos() -> None:
    tokenizer = TOKENIZERS["byte_fallback"]
    with_bos = tokenizer.encode("hello", add_special_tokens=True)
    assert with_bos == (1, *tokenizer.encode("hello", add_special_tokens=False))
    assert tokenizer.decode(with_bos, keep_special_tokens=False) == "hello"
    assert tokenizer.decode(with_bos, keep_special_tokens=True).startswith("<s>")


def test_lone_surrogates_are_refused_with_the_field_named() -> None:
    with pytest.raises(InvalidRequestError) as caught:
        TOKENIZERS["byte_level"].encode("a\ud800", add_special_tokens=True)
    assert [v.field for v in caught.value.violations] == ["input.text"]


@pytest.mark.parametrize("bad", [-1, 10**6, 2**40])
def test_decode_refuses_ids_outside_the_vocabulary(bad: int) -> None:
    with pytest.raises(InvalidRequestError, match="expected ids of the vocabulary"):
        TOKENIZERS["byte_level"].decode([1, bad], keep_special_tokens=False)


def test_token_text_is_the_token_as_it_is_written() -> None:
    tokenizer = TOKENIZERS["byte_level"]
    [end] = tokenizer.encode("<|im_end|>", add_special_tokens=False)
    assert tokenizer.token_text(end) == "<|im_end|>"
    assert tokenizer.token_text(tokenizer.encode(" world", add_special_tokens=False)[0]) == " world"
    assert tokenizer.token_text(10**6) is None


def test_truncation_and_padding_of_the_file_are_ignored(tmp_path: Path) -> None:
    inner = byte_level()
    inner.enable_truncation(2)
    inner.enable_padding(length=50)
    inner.save(str(tmp_path / "tokenizer.json"))
    tokenizer = Tokenizer.load(tmp_path / "tokenizer.json")
    assert len(tokenizer.encode("hello world hello world", add_special_tokens=True)) == 4


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"\xff\xfe",
        b"null",
        json.dumps(
            {"version": "1.0", "model": {"type": "BPE", "vocab": {"a": 0}, "merges": ["a b"]}}
        ).encode(),
        json.dumps({"version": "1.0", "model": {"type": "BPE", "vocab": {}, "merges": []}}).encode(),
    ],
)
def test_a_damaged_file_is_refused_in_one_line(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_bytes(content)
    with pytest.raises(ArtifactError) as caught:
        Tokenizer.load(path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_missing_or_huge_file_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "tokenizer.json"
    with pytest.raises(ArtifactError, match="No such file"):
        Tokenizer.load(path)
    byte_fallback().save(str(path))
    monkeypatch.setattr(text_module, "MAX_TOKENIZER_BYTES", 100)
    with pytest.raises(ArtifactError, match="at most 100"):
        Tokenizer.load(path)
