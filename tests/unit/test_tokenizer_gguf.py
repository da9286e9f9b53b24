"""Tokenizers rebuilt from GGUF metadata."""

from __future__ import annotations

from typing import Any

import pytest
from tokenizers import Tokenizer

from llorch_export.checkpoint.base import TokenizerAssets
from llorch_export.tokenizer.gguf_tokenizer import tokenizer_from_gguf
from llorch_serve.artifact.manifest import GenerationDefaults
from llorch_serve.errors import ArtifactError
from support.builders.checkpoints import (
    BOS_ID,
    CHAT_TEMPLATE,
    EOS_ID,
    TURN,
    TURN_END,
    VOCAB_SIZE,
    gguf_tokenizer_metadata,
    tiny_tokenizer_json,
)

TEXTS = (
    "The quick brown fox",
    "  runs   of\n\n\tspace \r\n",
    "digits 1234567 and 3.14",
    "I've seen WE'LL",
    "🙂🚀 東京 naïve Привет",
    "<|turn|>user\nhi<|turn_end|>\n<|eos|>",
    "",
)


def _assets(
    changes: dict[str, object] | None = None, *, base: dict[str, object] | None = None
) -> TokenizerAssets:
    metadata = {**(base or gguf_tokenizer_metadata()), **(changes or {})}
    present = {key: value for key, value in metadata.items() if value is not None}
    return tokenizer_from_gguf(present, vocab_size=VOCAB_SIZE, origin="m.gguf")


def _tokenizer(
    changes: dict[str, object] | None = None, *, base: dict[str, object] | None = None
) -> Tokenizer:
    return Tokenizer.from_buffer(_assets(changes, base=base).tokenizer_json)


def _spm(**changes: object) -> dict[str, object]:
    """Return a SentencePiece vocabulary: specials, 256 bytes, and pieces that spell a few words."""
    pieces = ["▁", "a", "b", "c", "ab", "▁ab", "bc", "▁▁", "tool"]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *pieces]
    kinds = [2, 3, 3, *[6] * 256, *[1] * len(pieces)]
    kinds[tokens.index("tool")] = 4  # user-defined
    scores = [0.0] * 259 + [-9.0, -9.0, -9.0, -9.0, -2.0, -3.0, -1.0, -4.0, 0.0]
    metadata: dict[str, object] = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.scores": scores,
    }
    return metadata | {f"tokenizer.ggml.{key}": value for key, value in changes.items()}


def _spell(tokenizer: Tokenizer, text: str) -> list[str]:
    return [str(tokenizer.id_to_token(token)) for token in tokenizer.encode(text).ids]


def test_the_rebuilt_tokenizer_equals_the_one_it_was_written_from() -> None:
    original, rebuilt = Tokenizer.from_str(tiny_tokenizer_json()), _tokenizer()
    for text in TEXTS:
        ids = original.encode(text).ids
        assert rebuilt.encode(text).ids == ids
        assert rebuilt.decode(ids) == original.decode(ids)
        assert rebuilt.encode(text, "pair").ids == original.encode(text, "pair").ids


def test_assets_come_from_the_metadata() -> None:
    assets = _assets()
    assert (assets.bos_token_id, assets.stop_token_ids) == (BOS_ID, (EOS_ID,))
    assert assets.chat_templates == {"default": CHAT_TEMPLATE}
    assert assets.generation == GenerationDefaults()


def test_every_kind_of_end_token_stops() -> None:
    changes: dict[str, object] = {
        f"tokenizer.ggml.{name}_token_id": value for name, value in (("eos", 7), ("eot", 9), ("eom", 8))
    }
    assert _assets(changes).stop_token_ids == (7, 8, 9)


@pytest.mark.parametrize(
    ("token", "kind", "stops"),
    [
        *((name, 3, True) for name in ("<|eot_id|>", "<|end|>", "<|endoftext|>", "<|end_of_text|>")),
        *((name, 3, True) for name in ("<EOT>", "<end_of_turn>", "<|im_end|>", "<|eom_id|>", "</s>")),
        *((name, 3, True) for name in ("<|fim_pad|>", "<|repo_name|>", "<|file_sep|>")),
        *((name, 1, True) for name in ("<|eot_id|>", "<|im_end|>")),
        *((name, 1, False) for name in ("</s>", "<EOT>", "<|file_sep|>", "[PAD]")),
        ("<|im_start|>", 3, False),
    ],
)
def test_tokens_that_end_turns_by_their_name_stop(token: str, kind: int, stops: bool) -> None:
    metadata: dict[str, Any] = gguf_tokenizer_metadata()
    metadata["tokenizer.ggml.tokens"][3] = token
    metadata["tokenizer.ggml.token_type"][3] = kind
    assert _assets(base=metadata).stop_token_ids == ((EOS_ID, 3) if stops else (EOS_ID,))


def test_a_token_that_ends_turns_is_a_control_token_whatever_the_file_says() -> None:
    metadata: dict[str, Any] = gguf_tokenizer_metadata()
    metadata["tokenizer.ggml.tokens"][3] = "<|im_end|>"
    metadata["tokenizer.ggml.token_type"][3] = 1
    tokenizer = _tokenizer(base=metadata)
    assert tokenizer.encode("a<|im_end|>", add_special_tokens=False).ids[-1] == 3
    assert tokenizer.decode([3]) == ""


def test_the_end_of_a_message_does_not_end_an_answer_that_ends_with_return_or_call() -> None:
    metadata: dict[str, Any] = gguf_tokenizer_metadata()
    for index, token in ((3, "<|end|>"), (500, "<|return|>"), (501, "<|call|>")):
        metadata["tokenizer.ggml.tokens"][index] = token
        metadata["tokenizer.ggml.token_type"][index] = 3
    metadata["tokenizer.ggml.merges"] = []
    assert _assets(base=metadata).stop_token_ids == (EOS_ID, 500, 501)


def test_templates_see_the_padding_and_unknown_token_that_they_mention() -> None:
    changes: dict[str, object] = {
        "tokenizer.chat_template": "{% if pad_token %}{{ pad_token }}{% endif %}{{ unk_token }}",
        "tokenizer.ggml.padding_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 3,
    }
    assert _assets(changes).template_tokens == {"pad_token": TURN, "unk_token": TURN_END}
    assert _assets().template_tokens is None


def test_a_file_without_end_token_has_none() -> None:
    assert _assets({"tokenizer.ggml.eos_token_id": None}).stop_token_ids == ()


@pytest.mark.parametrize("bos", [True, False])
@pytest.mark.parametrize("eos", [True, False])
@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_bos_and_eos_are_added_as_the_file_says(family: str, bos: bool, eos: bool) -> None:
    changes: dict[str, object] = {"tokenizer.ggml.add_bos_token": bos, "tokenizer.ggml.add_eos_token": eos}
    tokenizer = _tokenizer(changes, base=_spm() if family == "llama" else None)
    plain = tokenizer.encode("ab", add_special_tokens=False).ids
    first, last = ([1], [2]) if family == "llama" else ([BOS_ID], [EOS_ID])
    once = (first if bos else []) + plain + (last if eos else [])
    assert tokenizer.encode("ab").ids == once
    assert tokenizer.encode("ab", "ab").ids == once + once


@pytest.mark.parametrize(
    ("pre", "added"),
    [("gpt-2", False), ("llama-bpe", True), ("falcon3", True), ("tekken", True), ("smollm", False)],
)
def test_whether_bos_is_added_by_default_depends_on_the_kind(pre: str, added: bool) -> None:
    tokenizer = _tokenizer({"tokenizer.ggml.add_bos_token": None, "tokenizer.ggml.pre": pre})
    assert (tokenizer.encode("x").ids[0] == BOS_ID) is added
    assert _tokenizer(base=_spm()).encode("x").ids[0] == 1


@pytest.mark.parametrize(
    ("pre", "pieces"),
    [
        ("gpt-2", ["ab", " 12345", "'s", " ", " x", "!", "\n"]),
        ("smollm", ["ab", " ", "1", "2", "3", "4", "5", "'s", " ", " x", "!", "\n"]),
        ("llama-bpe", ["ab", " ", "123", "45", "'s", " ", " x", "!\n"]),
        ("default", ["ab", " ", "123", "45", "'", "s", " ", " x", "!", "\n"]),
        (None, ["ab", " ", "123", "45", "'", "s", " ", " x", "!", "\n"]),
    ],
)
def test_text_is_cut_as_the_kind_says(pre: str | None, pieces: list[str]) -> None:
    tokenizer = _tokenizer({"tokenizer.ggml.pre": pre})
    cut = tokenizer.pre_tokenizer.pre_tokenize_str("ab 12345's  x!\n")
    back = "".join(piece for piece, _ in cut)
    assert back.replace("Ġ", " ").replace("Ċ", "\n") == "ab 12345's  x!\n"
    assert [piece.replace("Ġ", " ").replace("Ċ", "\n") for piece, _ in cut] == pieces


def test_whole_words_come_before_merges_for_llama_3_only() -> None:
    metadata: dict[str, Any] = gguf_tokenizer_metadata()
    tokens = metadata["tokenizer.ggml.tokens"]
    tokens[511] = "zqx"  # no merge leads to it
    metadata["tokenizer.ggml.merges"] = [
        m for m in metadata["tokenizer.ggml.merges"] if m.replace(" ", "") in tokens
    ]
    assert _tokenizer({"tokenizer.ggml.pre": "llama-bpe"}, base=metadata).encode(
        "zqx", add_special_tokens=False
    ).ids == [511]
    assert len(_tokenizer(base=metadata).encode("zqx", add_special_tokens=False).ids) == 3


def test_of_a_merge_that_is_there_twice_the_first_counts() -> None:
    metadata: dict[str, Any] = gguf_tokenizer_metadata()
    once = _tokenizer(base=metadata)
    merges = metadata["tokenizer.ggml.merges"]
    twice = _tokenizer(base=metadata | {"tokenizer.ggml.merges": [*merges, *merges[:50]]})
    assert [twice.encode(text).ids for text in TEXTS] == [once.encode(text).ids for text in TEXTS]


def test_pieces_merge_by_score_not_by_order() -> None:
    tokenizer = _tokenizer(
        {"tokenizer.ggml.add_bos_token": False, "tokenizer.ggml.add_space_prefix": False}, base=_spm()
    )
    assert _spell(tokenizer, "abc") == ["a", "bc"]  # "bc" scores higher than "ab"
    assert _spell(tokenizer, "ab") == ["ab"]
    assert _spell(tokenizer, "é") == ["<0xC3>", "<0xA9>"]


def test_a_space_is_put_before_text_and_after_special_tokens_if_the_file_says_so() -> None:
    base = _spm(add_bos_token=False)
    with_prefix = _tokenizer(base=base)
    assert _spell(with_prefix, "ab</s>ab") == ["▁ab", "</s>", "▁ab"]
    assert with_prefix.decode(with_prefix.encode("ab").ids) == "ab"
    without = _tokenizer({"tokenizer.ggml.add_space_prefix": False}, base=base)
    assert _spell(without, "ab</s>ab") == ["ab", "</s>", "ab"]
    assert without.decode(without.encode(" ab").ids) == " ab"


def test_byte_tokens_are_not_found_in_text_but_user_defined_ones_are() -> None:
    tokenizer = _tokenizer(
        {"tokenizer.ggml.add_bos_token": False, "tokenizer.ggml.add_space_prefix": False}, base=_spm()
    )
    assert "<0x41>" not in _spell(tokenizer, "<0x41>")[:1]
    assert _spell(tokenizer, "atoolb") == ["a", "tool", "b"]
    ids = tokenizer.encode("atoolb</s>").ids
    assert tokenizer.decode(ids) == "atoolb"  # special tokens are left out, user-defined ones are text


def test_special_tokens_of_phi_3_take_the_white_space_after_them() -> None:
    base = _spm(add_bos_token=False, add_space_prefix=False)
    tokens, kinds = base["tokenizer.ggml.tokens"], base["tokenizer.ggml.token_type"]
    assert isinstance(tokens, list)
    assert isinstance(kinds, list)
    tokens[-2:] = ["<|end|>", "<|endoftext|>"]
    kinds[-2:] = [3, 3]
    for named in ({"general.architecture": "phi3"}, {"general.name": "My Phi-3 chat"}):
        tokenizer = _tokenizer(named, base=base)
        assert _spell(tokenizer, "ab<|end|> \n\u3000ab</s>\n") == ["ab", "<|end|>", "ab", "</s>"]
        assert _spell(tokenizer, "<s> <|endoftext|> ") == ["<s>", "▁", "<|endoftext|>", "▁"]
    assert _spell(_tokenizer(base=base), "<|end|> ab") == ["<|end|>", "▁ab"]


def _beyond(count: int, role: str | None = None) -> dict[str, object]:
    """Return a vocabulary with so many more tokens than the embedding has rows; the last may have a role."""
    tokens = gguf_tokenizer_metadata()["tokenizer.ggml.tokens"]
    kinds = gguf_tokenizer_metadata()["tokenizer.ggml.token_type"]
    assert isinstance(tokens, list)
    assert isinstance(kinds, list)
    more = [f"<|more_{index}|>" for index in range(count - 2)] + ["<|im_end|>", "[PAD]"]
    changes: dict[str, object] = {
        "tokenizer.ggml.tokens": [*tokens, *more],
        "tokenizer.ggml.token_type": [*kinds, *[3] * count],
    }
    if role:
        changes[f"tokenizer.ggml.{role}"] = len(tokens) + count - 2
    return gguf_tokenizer_metadata() | changes


def test_tokens_without_a_row_of_the_embedding_are_told_and_stop_nothing() -> None:
    assets = _assets(base=_beyond(5, "padding_token_id"))
    assert assets.notices == (
        "5 tokens of the tokenizer have ids of 512 and more, for which the model has no embedding; texts "
        "with them are refused",
    )
    assert max(assets.stop_token_ids) < VOCAB_SIZE
    inner = Tokenizer.from_buffer(assets.tokenizer_json)
    assert inner.encode("<|im_end|>").ids[-1] == VOCAB_SIZE + 3
    assert inner.get_vocab_size() == VOCAB_SIZE + 5
    assert not _assets().notices


@pytest.mark.parametrize(
    ("model", "kind"),
    [("bert", "WordPiece"), ("t5", "Unigram"), ("rwkv", "longest match"), ("none", "no tokenizer")],
)
def test_a_tokenizer_of_another_kind_is_refused_by_name(model: str, kind: str) -> None:
    with pytest.raises(ArtifactError, match=f"model is '{model}'.*{kind}.*supported are gpt2 and llama"):
        _assets({"tokenizer.ggml.model": model})


def test_sampling_values_of_the_file_are_read() -> None:
    changes: dict[str, object] = {
        "general.sampling.temp": 0.5,
        "general.sampling.top_k": 20,
        "general.sampling.penalty_repeat": 1.25,
        "general.sampling.penalty_last_n": 64,
    }
    assert _assets(changes).generation == GenerationDefaults(
        temperature=0.5, top_k=20, repetition_penalty=1.25, repeat_last_n=64
    )


def _changed(key: str, change: Any) -> dict[str, object]:
    metadata: dict[str, Any] = gguf_tokenizer_metadata()
    change(metadata[f"tokenizer.ggml.{key}"])
    return metadata


def _assign(index: int, value: object) -> Any:
    return lambda items: items.__setitem__(index, value)


@pytest.mark.parametrize(
    ("metadata", "found"),
    [
        ({}, r"tokenizer.ggml.model is None; supported are gpt2 and llama"),
        (gguf_tokenizer_metadata() | {"tokenizer.ggml.model": "t5"}, r"tokenizer.ggml.model is 't5'"),
        (gguf_tokenizer_metadata() | {"tokenizer.ggml.pre": "gemma4"}, r"pre-tokenizer 'gemma4' is not "
            r"supported; supported "
            r"are"),
        (gguf_tokenizer_metadata() | {"tokenizer.ggml.tokens": []}, r"has 0 tokens"),
        (_beyond(5, "eos_token_id"), r"eos_token_id is 515, expected .*511"),
        (gguf_tokenizer_metadata() | {"tokenizer.ggml.tokens": [1, 2]}, r"tokens is \[1, 2\], expected a "
            r"list of "
            r"str"),
        (gguf_tokenizer_metadata() | {"tokenizer.ggml.token_type": [1]}, r"token_type has 1 items, expected 512"),
        (gguf_tokenizer_metadata() | {"tokenizer.ggml.eos_token_id": 512}, r"eos_token_id is 512, expected "
            r"an integer from 0 to "
            r"511"),
        (gguf_tokenizer_metadata() | {"tokenizer.ggml.bos_token_id": None}, r"asks for a bos token around "
            r"text but names "
            r"none"),
        (gguf_tokenizer_metadata() | {"tokenizer.chat_template": 5}, r"chat_template is int"),
        (_changed("tokens", _assign(300, "a")), r"tokens \d+ and 300 are both 'a'"),
        (_changed("tokens", _assign(0, "b os:1")), r"bos token is 'b os:1'"),
        (_changed("token_type", _assign(5, 99)), r"token_type holds 99"),
        (_changed("merges", _assign(0, "nospace")), r"merge 0 is 'nospace'"),
        (_changed("merges", _assign(0, "zzzz y")), r"merge \('zzzz', 'y'\) uses a token that the vocabulary "
            r"lacks"),
        (_spm(scores=[1.0]), r"scores has 1 items, expected 268"),
        (_spm(scores=None), r"lacks scores"),
        (gguf_tokenizer_metadata() | {"tokenizer.ggml.pre": [1] * 999}, r"pre is list of 999 items, expected a name"),
        (gguf_tokenizer_metadata() | {"tokenizer.ggml.pre": "x" * 999}, r"pre-tokenizer 'x{100}' is not"),
        (gguf_tokenizer_metadata() | {"tokenizer.ggml.model": "x" * 999}, r"model is 'x{99}; supported"),
        (_spm(remove_extra_whitespaces=True), r"remove_extra_whitespaces is True, expected false"),
        (_spm(scores=[float("nan")] * 268), r"score of token 0 is nan"),
        (_changed("tokens", _assign(300, "a" * 2049)), r"token of 2049 characters"),
    ],
)  # fmt: skip
def test_unusable_tokenizers_are_refused_by_name(metadata: dict[str, object], found: str) -> None:
    with pytest.raises(ArtifactError, match=found) as caught:
        tokenizer_from_gguf(
            {k: v for k, v in metadata.items() if v is not None}, vocab_size=VOCAB_SIZE, origin="m.gguf"
        )
    assert "\n" not in str(caught.value)


def test_a_token_without_text_does_no_harm() -> None:
    tokenizer = _tokenizer(base=_changed("tokens", _assign(511, "")) | {"tokenizer.ggml.merges": []})
    assert tokenizer.encode("ab", add_special_tokens=False).tokens == ["a", "b"]
    assert tokenizer.get_vocab_size() == VOCAB_SIZE
