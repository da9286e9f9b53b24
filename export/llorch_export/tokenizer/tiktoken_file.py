"""Read a ``tokenizer.model`` of Llama 3: a file of tiktoken, each line a token in base64 and its rank.

Input is the untrusted content of the file; output is a :class:`Vocabulary`. The file has neither splitting
rules nor special tokens: Meta's code has them for Llama 3, and no other model is known by such a file.
"""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Mapping
from typing import Final

from tokenizers import AddedToken

from llorch_export.tokenizer.ranked_tokens import byte_level_text, check_ranked, merges_by_rank
from llorch_export.tokenizer.splitting import splitting_rules
from llorch_export.tokenizer.vocabulary import TokenKind, Vocabulary
from llorch_serve.errors import ArtifactError

_FIRST_LINE: Final = re.compile(rb"[A-Za-z0-9+/]+=* [0-9]+\r?\n")
_TOKENS: Final = 128000
_SPECIAL: Final = 256
_BOS: Final = "<|begin_of_text|>"
_EOS: Final = "<|end_of_text|>"
# Places of special tokens with a meaning, counted from the first; the others are reserved.
_LLAMA_3: Final = {0: _BOS, 1: _EOS, 6: "<|start_header_id|>", 7: "<|end_header_id|>", 9: "<|eot_id|>"}
_LLAMA_3_1: Final = _LLAMA_3 | {4: "<|finetune_right_pad_id|>", 8: "<|eom_id|>", 10: "<|python_tag|>"}


def is_tiktoken(data: bytes) -> bool:
    """Return whether a ``tokenizer.model`` is a file of tiktoken and not of SentencePiece."""
    return _FIRST_LINE.match(data) is not None


def read_tiktoken(
    data: bytes,
    added: Mapping[int, AddedToken],
    *,
    since_3_1: bool,
    add_bos: bool,
    add_eos: bool,
    vocab_size: int,
    origin: str,
) -> Vocabulary:
    """Parse the content of a tiktoken file of Llama 3.

    added: the special tokens by id, as ``tokenizer_config.json`` names them; where it names none, they are
        those of Llama 3, or with ``since_3_1`` those of Llama 3.1 to 3.3.
    add_bos, add_eos: the file itself does not say; ``tokenizer_config.json`` does.
    Raises ArtifactError if the file is damaged or another model's.
    """
    count = data.count(b"\n") + (not data.endswith(b"\n"))
    if count != _TOKENS:
        raise ArtifactError(
            f"{origin} is a tiktoken file of {count} tokens, expected {_TOKENS}, those of Llama 3: of "
            f"other models the splitting rules are not known; make a tokenizer.json with transformers: "
            f"AutoTokenizer.from_pretrained(FOLDER).save_pretrained(FOLDER), then export again"
        )
    tokens = _tokens(data, origin)
    check_ranked(tokens, origin=origin)
    special = _added_texts(added, origin) if added else _reserved(_LLAMA_3_1 if since_3_1 else _LLAMA_3)
    if _TOKENS + len(special) > vocab_size:
        raise ArtifactError(
            f"{origin} has {_TOKENS} tokens and {len(special)} special ones, expected at most {vocab_size}, "
            f"the rows of the embedding"
        )
    return Vocabulary(
        tokens=[*map(byte_level_text, tokens), *special],
        kinds=[*[TokenKind.NORMAL] * _TOKENS, *[TokenKind.CONTROL] * len(special)],
        bos=_TOKENS + special.index(_BOS) if _BOS in special else None,
        eos=_TOKENS + special.index(_EOS) if _EOS in special else None,
        unknown=None,
        add_bos=add_bos,
        add_eos=add_eos,
        merges=merges_by_rank(tokens, origin=origin),
        rules=splitting_rules("llama-bpe", origin=origin),
        origin=origin,
    )


def _tokens(data: bytes, origin: str) -> list[bytes]:
    tokens: list[bytes] = []
    for rank, line in enumerate(data.removesuffix(b"\n").split(b"\n")):
        text, _, number = line.removesuffix(b"\r").partition(b" ")
        try:
            if number != str(rank).encode():
                raise ValueError(f"its rank is {number[:20]!r}")
            tokens.append(base64.b64decode(text, validate=True))
        except (ValueError, binascii.Error) as error:
            raise ArtifactError(
                f"{origin}: line {rank + 1} is broken: {error}, expected a token in base64 and the rank "
                f"{rank}; fetch the file again"
            ) from error
    return tokens


def _reserved(named: Mapping[int, str]) -> list[str]:
    """Return Meta's special tokens; those without a meaning are numbered among themselves."""
    rest = iter(range(_SPECIAL))
    return [named.get(place) or f"<|reserved_special_token_{next(rest)}|>" for place in range(_SPECIAL)]


def _added_texts(added: Mapping[int, AddedToken], origin: str) -> list[str]:
    """Return the texts of special tokens whose ids follow the vocabulary's without a gap."""
    texts: list[str] = []
    for token_id, token in sorted(added.items()):
        if token_id != _TOKENS + len(texts):
            raise ArtifactError(
                f"{origin}: added token {token.content!r} has id {token_id}, expected "
                f"{_TOKENS + len(texts)}, the next free one"
            )
        if not token.special or token.lstrip or token.rstrip or token.single_word or token.normalized:
            raise ArtifactError(
                f"{origin}: added token {token.content!r} is not special, or takes spaces around it, which "
                f"is not converted here; make a tokenizer.json with transformers: "
                f"AutoTokenizer.from_pretrained(FOLDER).save_pretrained(FOLDER), then export again"
            )
        texts.append(token.content)
    return texts
