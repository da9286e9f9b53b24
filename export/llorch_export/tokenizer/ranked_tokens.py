"""Byte-level BPE out of tokens in bytes, best first: what tiktoken works with.

Input are the tokens of a ``tekken.json`` or of a tiktoken file; output are the texts and merges of a
:class:`Vocabulary`, which a tokenizer.json states in their place.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from llorch_serve.errors import ArtifactError
from llorch_serve.text.token_bytes import byte_level_alphabet
from llorch_serve.text.tokenizer_library import MAX_MERGES, MAX_VOCABULARY_CHARS

MAX_TOKEN_BYTES: Final = 256
"""Longest token; looking for its halves costs by the square. Published vocabularies have up to 128."""

_CHARACTERS: Final = str.maketrans({chr(byte): char for char, byte in byte_level_alphabet().items()})


def check_ranked(tokens: Sequence[bytes], *, origin: str) -> None:
    """Raise ArtifactError for tokens that are empty or there twice, too long, alone or together, or if a byte
    has none.
    """
    for rank, token in enumerate(tokens):
        if not 0 < len(token) <= MAX_TOKEN_BYTES:
            raise ArtifactError(
                f"{origin}: token {rank} has {len(token)} bytes, expected 1 to {MAX_TOKEN_BYTES}; fetch the "
                f"file again"
            )
    if (total := sum(map(len, tokens))) > MAX_VOCABULARY_CHARS:
        raise ArtifactError(
            f"{origin} has tokens of {total} bytes together, expected at most {MAX_VOCABULARY_CHARS}; fetch "
            f"the file again"
        )
    known = set(tokens)
    if len(known) < len(tokens):
        raise ArtifactError(
            f"{origin} has {len(tokens) - len(known)} tokens twice, expected distinct ones; fetch the file "
            f"again"
        )
    missing = next((byte for byte in range(256) if bytes([byte]) not in known), None)
    if missing is not None:
        raise ArtifactError(
            f"{origin} has no token for the byte 0x{missing:02x}, so it cannot take every text; fetch the "
            f"file again"
        )


def byte_level_text(token: bytes) -> str:
    """Return a token as byte-level vocabularies write it, one character for each byte."""
    return token.decode("latin-1").translate(_CHARACTERS)


def merges_by_rank(tokens: Sequence[bytes], *, origin: str) -> list[str]:
    """Return all ways to make a token out of two others, best token first.

    tiktoken always joins the neighbours whose union ranks first; a table of all ways, ordered by the rank of
    what they make, does the same. Raises ArtifactError for more ways than any trained vocabulary has.
    """
    ranks = {token: rank for rank, token in enumerate(tokens)}
    texts = {token: byte_level_text(token) for token in tokens}
    merges: list[str] = []
    for token in tokens:
        ways = [
            (ranks[left], ranks[right], left, right)
            for cut in range(1, len(token))
            if (left := token[:cut]) in ranks and (right := token[cut:]) in ranks
        ]
        merges += [f"{texts[left]} {texts[right]}" for _, _, left, right in sorted(ways)]
        if len(merges) > MAX_MERGES:
            raise ArtifactError(
                f"{origin}: its tokens are made of others in more than {MAX_MERGES} ways, which no trained "
                f"vocabulary needs; fetch the file again"
            )
    return merges
