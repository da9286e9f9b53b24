"""A byte-level vocabulary that shows where a text was cut: any two bytes merge that no cut parts."""

from __future__ import annotations

from typing import Final

from llorch_serve.text.token_bytes import byte_level_alphabet

# Odd, so that all pairs have a place of their own. Mixed like that, a pair that reaches over a place where
# nothing is cut is as likely as any other to merge first.
_MIXED: Final = 40503


def paired_bytes() -> dict[str, object]:
    """Return it as metadata of a GGUF file, without a pre-tokenizer. Ids below 256 are bytes; above stand all
    pairs, those that merge first before others, and last the word zqxj, to which no merge leads.
    """
    characters = sorted(byte_level_alphabet(), key=byte_level_alphabet().__getitem__)
    pairs = sorted(range(2**16), key=lambda pair: pair * _MIXED % 2**16)
    merges = [(characters[pair // 256], characters[pair % 256]) for pair in pairs]
    tokens = [*characters, *(left + right for left, right in merges), "zqxj"]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [1] * len(tokens),
        "tokenizer.ggml.merges": [f"{left} {right}" for left, right in merges],
        "tokenizer.ggml.bos_token_id": 0,
    }
