"""A bare vocabulary, the way GGUF files, SentencePiece models and files of tiktoken store one."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from llorch_export.tokenizer.splitting import UNCUT, SplittingRules


class TokenKind(enum.IntEnum):
    """What a token is for; the numbers are those of SentencePiece and GGUF."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


SPECIAL_KINDS: Final = frozenset({TokenKind.UNKNOWN, TokenKind.CONTROL, TokenKind.USER_DEFINED})
"""Tokens of these kinds are searched for in a text before anything else."""


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """Tokens by id, and the rules around them.

    scores: SentencePiece only; the higher, the earlier two pieces merge.
    merges: byte-level BPE only; pairs separated by a space, first merge first.
    rules: byte-level BPE only; how text is cut before merging.
    space_prefix: SentencePiece only; text gets a space in front, at its start and after every special token.
    strips_space: special tokens take the white space after them, as those of Phi-3 do.
    """

    tokens: Sequence[str]
    kinds: Sequence[TokenKind]
    bos: int | None
    eos: int | None
    unknown: int | None
    add_bos: bool
    add_eos: bool
    scores: Sequence[float] = ()
    merges: Sequence[str] = ()
    rules: SplittingRules = UNCUT
    space_prefix: bool = False
    strips_space: bool = False
    origin: str = "the vocabulary"
