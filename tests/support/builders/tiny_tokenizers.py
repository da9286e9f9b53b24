"""Tokenizers small enough to read: a byte-level one as Llama 3 and SmolLM2 have, and byte-fallback ones as
Llama 2.
"""

from __future__ import annotations

from typing import Any

import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors

WORDS = ("hello", "world", "user", "system", "assistant", "the", "im", "end", "inst", "start")


def _merges(space: str, vocab: dict[str, int]) -> list[tuple[str, str]]:
    """Merges that build each word from its left, then put a space before it; entered into the vocabulary."""
    merges = [(word[:cut], word[cut]) for word in WORDS for cut in range(1, len(word))]
    merges = list(dict.fromkeys([*merges, *((space, word) for word in WORDS)]))
    for left, right in merges:
        vocab.setdefault(left + right, len(vocab))
    return merges


def byte_level(specials: tuple[str, ...] = ("<|im_start|>", "<|im_end|>")) -> tokenizers.Tokenizer:
    """Byte-level BPE; specials beyond the vocabulary, and one added token that is ordinary text."""
    vocab = {char: index for index, char in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    merges = _merges("\u0120", vocab)
    # Tokens that end inside a character: the first and last two bytes of an emoji, and of two Chinese
    # characters.
    for piece in ("\u00f0\u0141", "\u013a\u0122", "\u00e4\u00bd", "\u0142\u00e5\u00a5"):
        vocab.setdefault(piece, len(vocab))
    inner = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=merges))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in specials])
    inner.add_tokens([AddedToken(" tool ", special=False)])
    return inner


def byte_fallback(*, metaspace: bool = False) -> tokenizers.Tokenizer:
    """SentencePiece-like BPE with ``<0x..>`` tokens; specials are part of the vocabulary, BOS is added.

    metaspace: prefix space before the first section only, else before each one (Llama 2's older files).
    """
    names = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    names += ["\u2581", *"abcdefghijklmnopqrstuvwxyz<>/|_[]", "\u4f60", "\ufffd", "\u2581\u2581"]
    vocab = {name: index for index, name in enumerate(names)}
    merges = [("\u2581", "\u2581"), *_merges("\u2581", vocab)]
    inner = tokenizers.Tokenizer(
        models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    )
    tail: list[Any]
    if metaspace:
        inner.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
        tail = [decoders.ByteFallback(), decoders.Metaspace(prepend_scheme="first", split=False)]
    else:
        inner.normalizer = normalizers.Sequence(
            [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
        )
        tail = [
            decoders.Replace("\u2581", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    inner.decoder = decoders.Sequence(tail)
    inner.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in names[:3]])
    inner.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return inner


def unigram() -> tokenizers.Tokenizer:
    """SentencePiece unigram with ``<0x..>`` tokens, as T5's and Llama-like models trained with it; BOS is
    added.
    """
    names = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    words = [*WORDS, *(f"\u2581{word}" for word in WORDS)]
    names += ["\u2581", *"abcdefghijklmnopqrstuvwxyz<>/|_[]", "\u4f60", "\ufffd", "\u2581\u2581", *words]
    vocab = [
        (name, 0.0 if index < 3 else -10.0 + len(name)) for index, name in enumerate(dict.fromkeys(names))
    ]
    inner = tokenizers.Tokenizer(models.Unigram(vocab, unk_id=0, byte_fallback=True))
    inner.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=True)
    inner.decoder = decoders.Sequence(
        [decoders.ByteFallback(), decoders.Metaspace(prepend_scheme="first", split=True)]
    )
    inner.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in names[:3]])
    inner.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return inner


BUILDERS = {
    "byte_level": byte_level,
    "byte_fallback": byte_fallback,
    "metaspace": lambda: byte_fallback(metaspace=True),
    "unigram": unigram,
}
