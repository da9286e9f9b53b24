"""Read ``tekken.json``, the file in which Mistral's models since Nemo keep their vocabulary.

Input is the untrusted content of the file; output is a :class:`Vocabulary`. Special tokens have the lowest
ids, the ids of all others follow.
"""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Mapping
from typing import Final, TypeGuard

from tokenizers import Regex

from llorch_export.config.fields import Fields
from llorch_export.tokenizer.ranked_tokens import byte_level_text, check_ranked, merges_by_rank
from llorch_export.tokenizer.splitting import SplittingRules
from llorch_export.tokenizer.vocabulary import TokenKind, Vocabulary
from llorch_serve.errors import ArtifactError
from llorch_serve.text.tokenizer_library import MAX_PATTERN_CHARS, MAX_TOKENS, rust_call

_BOS, _EOS, _UNKNOWN = "<s>", "</s>", "<unk>"
# Of files that list none, the first to come; they are of versions up to v7.
_SPECIAL: Final = (
    _UNKNOWN,
    _BOS,
    _EOS,
    "[INST]",
    "[/INST]",
    "[AVAILABLE_TOOLS]",
    "[/AVAILABLE_TOOLS]",
    "[TOOL_RESULTS]",
    "[/TOOL_RESULTS]",
    "[TOOL_CALLS]",
    "[IMG]",
    "<pad>",
    "[IMG_BREAK]",
    "[IMG_END]",
    "[PREFIX]",
    "[MIDDLE]",
    "[SUFFIX]",
    "[SYSTEM_PROMPT]",
    "[/SYSTEM_PROMPT]",
    "[TOOL_CONTENT]",
)
_WITHOUT_LIST: Final = ("v1", "v2", "v3", "v7")


def read_tekken(data: bytes, *, add_bos: bool, add_eos: bool, vocab_size: int, origin: str) -> Vocabulary:
    """Parse the content of a ``tekken.json``.

    add_bos, add_eos: the file itself does not say; ``tokenizer_config.json`` does.
    Raises ArtifactError if it is damaged, or has more tokens than the embedding has rows.
    """
    try:
        document = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise ArtifactError(f"{origin} is not valid JSON: {error}; fetch it again") from error
    if not isinstance(document, dict):
        raise ArtifactError(f"{origin} holds {type(document).__name__}, expected a JSON object")
    fields = Fields(document, origin=origin)
    config = Fields(fields.mapping("config"), origin=f"{origin}: config")
    size = config.integer("default_vocab_size", low=1, high=min(vocab_size, MAX_TOKENS))
    count = config.integer("default_num_special_tokens", low=3, high=size)
    pattern = _pattern(config, origin)
    special = _special(fields, str(config.get("version")), count, origin)
    tokens = _tokens(fields, size - count, origin)
    check_ranked(tokens, origin=origin)
    return Vocabulary(
        tokens=[*special, *map(byte_level_text, tokens)],
        kinds=[*[TokenKind.CONTROL] * count, *[TokenKind.NORMAL] * len(tokens)],
        bos=special.index(_BOS) if _BOS in special else None,
        eos=special.index(_EOS) if _EOS in special else None,
        unknown=None,
        add_bos=add_bos,
        add_eos=add_eos,
        merges=merges_by_rank(tokens, origin=origin),
        rules=SplittingRules((pattern,), whole_words_first=True),
        origin=origin,
    )


def _pattern(config: Fields, origin: str) -> str:
    """Return the regular expression that cuts a text."""
    pattern = config.get("pattern")
    if not _is_text(pattern) or len(pattern) > MAX_PATTERN_CHARS:
        raise config.wrong("pattern", f"a regular expression of at most {MAX_PATTERN_CHARS} characters")
    try:
        with rust_call:
            Regex(pattern)
    except Exception as error:  # the library raises nothing more precise
        raise ArtifactError(
            f"{origin}: pattern is no regular expression: {str(error)[:200]}; fetch the file again"
        ) from error
    return pattern


def _special(fields: Fields, version: str, count: int, origin: str) -> list[str]:
    """Return the texts of the special tokens by id, those without a meaning too."""
    if fields.get("special_tokens") is None:
        if version not in _WITHOUT_LIST:
            raise ArtifactError(
                f"{origin} is of version {version!r} and lists no special_tokens, which only "
                f"{', '.join(_WITHOUT_LIST)} may leave out; fetch the file again"
            )
        named = list(_SPECIAL[:count])
    else:
        entries = _entries(fields, "special_tokens")
        named = [
            text
            for place, entry in enumerate(entries)
            if entry.get("rank") == place and _is_text(text := entry.get("token_str"))
        ]
        if not len(named) == len(entries) <= count:
            raise ArtifactError(
                f"{origin}: special_tokens has {len(entries)} entries, {len(named)} of them with their place "
                f"as rank and a text, expected at most {count} and all such; fetch the file again"
            )
    return [*named, *(f"<SPECIAL_{token_id}>" for token_id in range(len(named), count))]


def _is_text(value: object) -> TypeGuard[str]:
    """Return whether a value is text that is not empty; half a surrogate pair, which JSON can escape, is
    none.
    """
    return isinstance(value, str) and value != "" and not any("\ud800" <= char <= "\udfff" for char in value)


def _tokens(fields: Fields, count: int, origin: str) -> list[bytes]:
    """Return the first tokens by rank. Those behind them are spare ones, which the model never saw."""
    entries = _entries(fields, "vocab")
    if len(entries) < count:
        raise ArtifactError(
            f"{origin}: vocab has {len(entries)} tokens, expected at least {count}; fetch the file again"
        )
    return [_token(entry, rank, origin) for rank, entry in enumerate(entries[:count])]


def _entries(fields: Fields, key: str) -> list[dict[str, object]]:
    value = fields.get(key)
    if not isinstance(value, list) or not all(isinstance(entry, dict) for entry in value):
        raise fields.wrong(key, "a list of objects")
    return value


def _token(entry: Mapping[str, object], rank: int, origin: str) -> bytes:
    text = entry.get("token_bytes")
    try:
        if entry.get("rank") != rank or not isinstance(text, str):
            raise ValueError("its rank is another, or it has no token_bytes")
        return base64.b64decode(text, validate=True)
    except (ValueError, binascii.Error) as error:
        raise ArtifactError(
            f"{origin}: token {rank} of vocab is broken: {error}; fetch the file again"
        ) from error
