"""Tokens that the settings beside a tokenizer.json add to it, or mark as special there.

transformers hands them to the tokenizers library in this order, and so does this module: those of
``added_tokens_decoder``, or, where a folder has none, those of ``added_tokens.json``; then those with a role;
then further ones. Input and output are contents of a tokenizer.json.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from tokenizers import AddedToken, Tokenizer

from llorch_export.config.fields import Fields, quoted
from llorch_serve.errors import ArtifactError
from llorch_serve.text.tokenizer_library import MAX_TOKEN_CHARS, check_token_sizes, rust_call

ROLES: Final = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
DECODER: Final = "added_tokens_decoder"
_FURTHER: Final = "extra_special_tokens"
_FURTHER_BEFORE_5: Final = "additional_special_tokens"
FURTHER: Final = (_FURTHER, _FURTHER_BEFORE_5)
_FLAGS: Final = ("lstrip", "rstrip", "single_word", "normalized")


@dataclass(frozen=True, slots=True)
class OlderFiles:
    """What counts only where tokenizer_config.json has no ``added_tokens_decoder``.

    special: content of special_tokens_map.json. added: content of added_tokens.json, ids by text.
    """

    special: Mapping[str, object] = field(default_factory=dict)
    added: Mapping[str, object] = field(default_factory=dict)


def decoder_tokens(settings: Mapping[str, object], *, origin: str) -> dict[int, AddedToken]:
    """Return ``added_tokens_decoder`` by id. Raises ArtifactError for what is no token."""
    flags = Fields(settings, origin=origin)
    added: dict[int, AddedToken] = {}
    for key, entry in flags.mapping(DECODER).items():
        content = entry.get("content") if isinstance(entry, Mapping) else None
        if (
            not (key.isdecimal() and len(key) < 10)
            or not isinstance(entry, Mapping)
            or not isinstance(content, str)
            or not content
        ):
            raise flags.wrong(DECODER, "an object of ids and tokens with content")
        added[int(key)] = _token(entry)
    check_token_sizes([token.content for token in added.values()], longest=MAX_TOKEN_CHARS, origin=origin)
    return added


def with_added_tokens(
    data: bytes,
    tokenizer: Tokenizer,
    settings: Mapping[str, object],
    named: Mapping[str, str],
    *,
    older: OlderFiles,
    origin: str,
) -> bytes:
    """Return a tokenizer.json with the tokens that the settings add; ``data`` itself where they add none.

    tokenizer: of ``data``; it is changed. named: token texts by role. origin: names the settings.
    Raises ArtifactError if a token would get another id than the settings say.
    """
    with rust_call:
        present = tokenizer.get_added_tokens_decoder()
    stated = decoder_tokens(settings, origin=origin)
    further = [*_further(settings, older, origin)]
    if DECODER not in settings:
        stated = _from_file(older.added, _special_by_then(settings, older, named, origin), origin)
    placed = stated if DECODER in settings else stated | present
    tokens = [placed[id_] for id_ in sorted(placed)]
    known = {token.content for token in (*present.values(), *tokens)}
    for token in (*_with_roles(settings, older, named), *further):
        if token.content not in known:
            known.add(token.content)
            tokens.append(token)
    for token in tokens:
        token.special = token.special or token.content in named.values()
    check_token_sizes([token.content for token in tokens], longest=MAX_TOKEN_CHARS, origin=origin)
    with rust_call:
        before = {id_: repr(token) for id_, token in tokenizer.get_added_tokens_decoder().items()}
        same = set(before.values())
        tokenizer.add_tokens([token for token in tokens if repr(token) not in same])
        after = {id_: repr(token) for id_, token in tokenizer.get_added_tokens_decoder().items()}
        moved = next((id_ for id_, t in stated.items() if tokenizer.token_to_id(t.content) != id_), None)
    if moved is not None:
        raise ArtifactError(
            f"{origin}: {DECODER if DECODER in settings else 'added_tokens.json'} gives "
            f"{stated[moved].content!r} the id {moved}, expected "
            f"{tokenizer.token_to_id(stated[moved].content)}, as in tokenizer.json; the two files belong to "
            f"different models"
        )
    return data if before == after else tokenizer.to_str().encode()


def _token(entry: Mapping[str, Any], *, special: bool = False) -> AddedToken:
    """Return the token that a file writes out.

    Where ``normalized`` is absent the library takes it from ``special``, also where that changes later.
    """
    flags = {name: bool(entry[name]) for name in _FLAGS if entry.get(name) is not None}
    return AddedToken(entry["content"], special=special or bool(entry.get("special", False)), **flags)


def _from_file(added: Mapping[str, object], special: set[str], origin: str) -> dict[int, AddedToken]:
    """Return the tokens of added_tokens.json by id."""
    found: dict[int, AddedToken] = {}
    for text, token_id in added.items():
        if type(token_id) is not int or not text:
            raise ArtifactError(
                f"{origin}: added_tokens.json beside it gives {quoted(text)} the id {quoted(token_id)}, "
                f"expected a text and an integer; correct it"
            )
        found[token_id] = AddedToken(text, special=text in special, normalized=text not in special)
    return found


def _special_by_then(
    settings: Mapping[str, object], older: OlderFiles, named: Mapping[str, str], origin: str
) -> set[str]:
    """Return the texts that transformers holds for special when it reads added_tokens.json."""
    known = {_FURTHER: older.special.get(_FURTHER)}
    further = _further(settings, OlderFiles(special=known), origin)
    return {*(named[role] for role in ROLES if role in named), *(token.content for token in further)}


def _with_roles(
    settings: Mapping[str, object], older: OlderFiles, named: Mapping[str, str]
) -> Iterator[AddedToken]:
    """Yield the token of every role, the usual roles first, with what the files say of spaces around it."""
    for role in (*(role for role in ROLES if role in named), *(role for role in named if role not in ROLES)):
        text = named[role]
        if not text:
            continue
        mapped = role in older.special
        entry = older.special[role] if mapped else settings.get(role)
        if isinstance(entry, Mapping) and entry.get("content") == text:
            yield _token(entry, special=mapped)
        else:
            yield AddedToken(text, special=True)


def _further(settings: Mapping[str, object], older: OlderFiles, origin: str) -> Iterator[AddedToken]:
    """Yield the special tokens without a role.

    Of the two keys the newer one counts, unless it is empty or names roles. Raises ArtifactError for what is
    no token.
    """
    newer, before_5 = settings.get(_FURTHER), settings.get(_FURTHER_BEFORE_5)
    has_newer = _FURTHER in settings and not isinstance(newer, Mapping)
    if _FURTHER_BEFORE_5 in settings and not newer:
        newer, has_newer = before_5, True
    if isinstance(more := older.special.get(_FURTHER), list):
        newer, has_newer = [*(newer if isinstance(newer, list) else ()), *more], True
    before_5 = older.special.get(_FURTHER_BEFORE_5, before_5)
    found = newer if has_newer else before_5
    if found is not None and not isinstance(found, list):
        raise ArtifactError(f"{origin}: {_FURTHER} is {quoted(found)}, expected a list of tokens; correct it")
    for entry in found or ():
        text = entry.get("content") if isinstance(entry, Mapping) else entry
        if not isinstance(text, str):
            raise ArtifactError(
                f"{origin}: {_FURTHER} holds {quoted(entry)}, expected texts of tokens; correct it"
            )
        if text:
            yield _token(entry) if isinstance(entry, Mapping) else AddedToken(text, special=True)
