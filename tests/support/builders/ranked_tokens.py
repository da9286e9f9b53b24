"""A vocabulary as tiktoken and Mistral's ``tekken.json`` hold it, small enough to read."""

from __future__ import annotations

import base64

from llorch_export.tokenizer.splitting import SPLITTING_RULES

WORDS = (
    b"th",
    b"he",
    b"the",
    b" t",
    b" the",
    b"er",
    b"ther",
    b"wea",
    b"weather",
    b"ll",
    b"\xd0\xbf",
    b"12",
    b"\n\n",
)
# Bytes, and what they merge to; "ther" has no two halves but "the" and "r", and "wea" none at all.
TOKENS = [*(bytes([byte]) for byte in range(256)), *WORDS]
SPECIAL = 20


def tekken_document(**changes: object) -> dict[str, object]:
    """Return a small ``tekken.json`` without a list of its special tokens."""
    spare = [b"never", b"used"]
    document: dict[str, object] = {
        "config": {
            "pattern": SPLITTING_RULES["tekken"].patterns[0],
            "num_vocab_tokens": len(TOKENS) + len(spare),
            "default_vocab_size": len(TOKENS) + SPECIAL,
            "default_num_special_tokens": SPECIAL,
            "version": "v3",
        },
        "vocab": [
            {"rank": rank, "token_bytes": base64.b64encode(token).decode(), "token_str": None}
            for rank, token in enumerate([*TOKENS, *spare])
        ],
    }
    return document | changes
