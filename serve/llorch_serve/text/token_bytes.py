"""The bytes that single tokens stand for, read off the vocabulary by the rules of tokenizer.json's decoder.

The decoder itself gives text: of a token that ends inside a character it shows replacement characters.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final

import msgspec
import tokenizers

# What Rust's u8::from_str_radix takes of two characters; published vocabularies have <0x00>..<0xFF>.
_FALLBACK: Final = re.compile(r"<0x([0-9A-Fa-f]{2}|\+[0-9A-Fa-f])>")


class TokenBytes:
    """Bytes by token id, for one tokenizer. Safe to use from many threads."""

    def __init__(self, inner: tokenizers.Tokenizer) -> None:
        self._inner = inner
        rules = decoder_rules(inner)
        kinds = {rule.get("type") for rule in rules}
        self._byte_level = byte_level_alphabet() if "ByteLevel" in kinds else {}
        self._fallback = "ByteFallback" in kinds
        self._replaced = [pair for rule in rules if (pair := _replacement(rule)) is not None]
        # Of a decoder with none of these rules (WordPiece, say) tokens are what it shows of each alone.
        self._plain = bool(self._byte_level or self._fallback or self._replaced)

    def of(self, token_id: int) -> bytes:
        """Return the bytes of a token; none for an id without a token."""
        token = self._inner.id_to_token(token_id)
        if token is None:
            return b""
        if not self._plain:
            return self._inner.decode([token_id], skip_special_tokens=False).encode()
        if self._byte_level:
            values = [self._byte_level.get(char) for char in token]
            # Added tokens may hold what is no byte's character; those are text.
            return token.encode() if None in values else bytes(value for value in values if value is not None)
        if self._fallback and (byte := fallback_byte(token)) is not None:
            return bytes([byte])
        for pattern, content in self._replaced:
            token = token.replace(pattern, content)
        return token.encode()


def fallback_byte(token: str) -> int | None:
    """Return the byte that a token is to the rule ByteFallback, or None if it is text."""
    found = _FALLBACK.fullmatch(token)
    return None if found is None else int(found[1], 16)


def decoder_rules(inner: tokenizers.Tokenizer) -> list[dict[str, object]]:
    """Return the rules of a tokenizer's decoder in their order, those inside sequences too."""
    return [] if inner.decoder is None else list(_flat(msgspec.json.decode(inner.decoder.__getstate__())))


def _flat(rule: object) -> Iterator[dict[str, object]]:
    if not isinstance(rule, dict):
        return
    yield rule
    inner = rule.get("decoders")
    for part in inner if isinstance(inner, list) else ():
        yield from _flat(part)


def _replacement(rule: dict[str, object]) -> tuple[str, str] | None:
    """Return what a rule writes for what, if it does that for every occurrence of a text."""
    if rule.get("type") == "Metaspace":
        return str(rule.get("replacement")), " "
    pattern = rule.get("pattern")
    if rule.get("type") == "Replace" and isinstance(pattern, dict) and isinstance(pattern.get("String"), str):
        return pattern["String"], str(rule.get("content"))
    return None


def byte_level_alphabet() -> dict[str, int]:
    """Return the byte that each character of byte-level vocabularies stands for.

    Bytes that are printable in Latin-1 are written as themselves, the others, in their order, as the
    characters from U+0100 on (the alphabet of GPT-2).
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = sorted(set(range(256)) - set(printable))
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}
