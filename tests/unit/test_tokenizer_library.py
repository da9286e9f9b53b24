"""What the tokenizers library is given has been checked, and a panic of its Rust code is an error of one
request.
"""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest
import tokenizers

from llorch_serve.errors import ArtifactError, LibraryPanicError
from llorch_serve.text import tokenizer_library
from llorch_serve.text.tokenizer import TextStream, Tokenizer
from llorch_serve.text.tokenizer_library import (
    MAX_PIECE_CHARS,
    MAX_STEPS,
    MAX_TOKEN_CHARS,
    MAX_TOKENS,
    rust_call,
)

BPE = {"type": "BPE", "vocab": {"a": 0, "b": 1, "ab": 2}, "merges": [["a", "b"]]}
SPACE = {"type": "Replace", "pattern": {"String": " "}, "content": "a" * 100}
SPECIAL = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}


class Panic(BaseException):
    """As pyo3's PanicException is: beyond ``except Exception``."""


def file(model: dict[str, Any] | None = None, **parts: object) -> bytes:
    empty = dict.fromkeys(("normalizer", "pre_tokenizer", "post_processor", "decoder"))
    return json.dumps(
        {"version": "1.0", "added_tokens": [], "model": model or BPE, **empty, **parts}
    ).encode()


def read(data: bytes) -> Tokenizer:
    return Tokenizer.from_json(data, origin="t.json")


def test_a_panic_is_an_error_that_does_not_repeat_its_words() -> None:
    with pytest.raises(LibraryPanicError) as caught, rust_call:
        raise Panic("the text of a prompt")
    assert "prompt" not in str(caught.value)
    assert caught.value.__suppress_context__


@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit, ValueError])
def test_what_is_no_panic_passes(kind: type[BaseException]) -> None:
    with pytest.raises(kind), rust_call:
        raise kind


def test_a_panic_of_the_decoder_fails_one_call_of_the_tokenizer() -> None:
    tokenizer = read(file(decoder={"type": "Strip", "content": "b", "start": 0, "stop": 2}))
    assert tokenizer.decode([2], keep_special_tokens=True) == "a"
    with pytest.raises(LibraryPanicError):
        tokenizer.decode([1], keep_special_tokens=True)
    with pytest.raises(LibraryPanicError):
        tokenizer.token_text(1)


def test_an_id_between_others_that_no_token_has_stands_for_no_text() -> None:
    tokenizer = read(file({"type": "WordLevel", "unk_token": "a", "vocab": {"a": 1, "b": 4}}))
    assert tokenizer.unused_ids == {0, 2, 3}
    assert [tokenizer.token_text(id_) for id_ in range(6)] == [None, "a", None, None, "b", None]
    stream = TextStream(tokenizer)
    assert [stream.push(id_)[0] for id_ in range(6)] == ["", "a", "", "", " b", ""]


def test_both_ids_of_a_text_that_a_vocabulary_lists_twice_stand_for_it() -> None:
    twice = [["<unk>", 0.0], ["a", -1.0], ["a", -2.0], ["b", -3.0]]
    tokenizer = read(file({"type": "Unigram", "unk_id": 0, "vocab": twice}))
    assert tokenizer.unused_ids == set()
    assert [tokenizer.token_text(id_) for id_ in (1, 2)] == ["a", "a"]


def test_a_panic_of_a_pattern_fails_one_call_of_the_tokenizer() -> None:
    pattern = {"type": "Split", "pattern": {"Regex": "(b+b+)+a"}, "behavior": "Isolated", "invert": False}
    tokenizer = read(file(pre_tokenizer=pattern))
    assert tokenizer.encode("ab", add_special_tokens=False) == (2,)
    with pytest.raises(LibraryPanicError):
        tokenizer.encode("b" * 200, add_special_tokens=False)


TEMPLATE = {"type": "TemplateProcessing", "pair": [], "special_tokens": {}}


@pytest.mark.parametrize(
    ("data", "found"),
    [
        # Panics of the library while it reads, and whenever it is used.
        (file(normalizer={"type": "Precompiled", "precompiled_charsmap": "AAAA"}), "failed in its own code"),
        (
            file(normalizer={"type": "Precompiled", "precompiled_charsmap": "BAAAAP///38="}),
            "failed in its own code",
        ),
        (file(pre_tokenizer={"type": "FixedLength", "length": 0}), "failed in its own code"),
        (
            file(post_processor=TEMPLATE | {"single": [{"SpecialToken": {"id": "X", "type_id": 0}}]}),
            "failed in its",
        ),
        # What would end the process, or take memory without bound.
        (file(BPE | {"continuing_subword_prefix": "b"}), "continuing_subword_prefix"),
        (file(normalizer={"type": "Sequence", "normalizers": [SPACE] * 3}), "1000000 times as long"),
        (file(decoder={"type": "Replace", "pattern": {"String": ""}, "content": "a" * 100}), "101 times"),
        (file(decoder={"type": "Replace", "pattern": {"Regex": "a"}, "content": "b"}), "regular expression"),
        (file(pre_tokenizer={"type": "Split", "pattern": {"Regex": "a" * 10000}}), "10000 characters"),
        (file(normalizer={"type": "Sequence", "normalizers": [{"type": "NFC"}] * MAX_STEPS}), "steps"),
        (file(post_processor=TEMPLATE | {"single": [{}] * 1000}), "puts 1000 tokens"),
        (file(BPE | {"vocab": {"a": MAX_TOKENS}, "merges": []}), f"id {MAX_TOKENS}"),
        (file(BPE | {"vocab": {"a": -1}, "merges": []}), "id -1"),
        (file(BPE | {"vocab": {"a" * (MAX_TOKEN_CHARS + 1): 0}, "merges": []}), "2049 characters"),
        (file(BPE | {"vocab": {f"{i:02048}": i for i in range(8200)}, "merges": []}), "characters together"),
        (file({"type": "Unigram", "vocab": [["a" * (MAX_PIECE_CHARS + 1), 0.0]]}), "257 characters"),
        (file(added_tokens=[SPECIAL | {"id": 3, "content": "z" * 5000}]), "5000 characters"),
        (file(added_tokens=[SPECIAL | {"id": 2**32 - 1, "content": "z"}]), "id 4294967295"),
        (b"[" * 100_000, "t.json"),
        (b'{"model":' * 100_000, "t.json"),
    ],
)
def test_hostile_files_are_refused_in_one_line(data: bytes, found: str) -> None:
    with pytest.raises(ArtifactError) as caught:
        read(data)
    assert found in str(caught.value)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 500


def test_of_a_key_that_stands_twice_the_library_sees_the_checked_value() -> None:
    long = json.dumps(BPE | {"vocab": {"a" * 100_000: 0}, "merges": []})
    data = file().replace(b'"model"', b'"model": ' + long.encode() + b', "model"', 1)
    assert read(data).longest_token == 2


@pytest.mark.parametrize(
    ("vocab", "merges", "shorter"),
    [
        (("a", "b", "ab", "c", "abc"), [["a", "b"], ["ab", "c"]], True),
        (("a", "\t", "a\t", "\n", "a\t\n"), [["a", "\t"], ["a\t", "\n"]], True),
        (("a", " ", "a "), [["a", " "]], False),  # a space inside a half is no border
        (("a", " b", "a b"), [["a", " b"]], False),
        (("a", "b", "ab", "#version", "#versiona"), [["a", "b"], ["#version", "a"]], False),
        (("a", "b", "ab"), ["a b"], False),  # as older files have them
        (("a", "b"), [], False),
    ],
)
def test_merges_that_are_written_shorter_are_the_same_merges(
    vocab: tuple[str, ...], merges: list[Any], shorter: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = file({"type": "BPE", "vocab": {text: id_ for id_, text in enumerate(vocab)}, "merges": merges})
    given: list[str] = []
    made = tokenizers.Tokenizer.from_str

    def watched(text: str) -> tokenizers.Tokenizer:
        given.append(text)
        return made(text)

    monkeypatch.setattr(
        tokenizer_library, "tokenizers", SimpleNamespace(Tokenizer=SimpleNamespace(from_str=watched))
    )
    found = tokenizer_library.read_tokenizer(data, origin="t.json")
    assert found.to_str() == made(data.decode()).to_str()
    assert (json.loads(given[0])["model"]["merges"] != merges) is shorter


@pytest.mark.parametrize(
    "merges", [[["a", 1]], [["a"]], [["a", "b", "c"]], [["a", "b"], "ab"], [None], ["ab"]]
)
def test_merges_that_are_none_are_left_to_the_library(merges: list[Any]) -> None:
    with pytest.raises(ArtifactError, match=r"t\.json is not a usable tokenizer\.json"):
        read(file({**BPE, "merges": merges}))
