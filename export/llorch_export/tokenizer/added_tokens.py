"""Tokens that tokenizer_config.json adds to a tokenizer.json, or marks as special there.

transformers hands them to the tokenizers library in this order, and so does this module: those of
``added_tokens_decoder``, then those with a role. Input and output are contents of a tokenizer.json.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from tokenizers import AddedToken, Tokenizer

from llorch_export.config.fields import Fields
from llorch_serve.errors import ArtifactError
from llorch_serve.text.tokenizer_library import MAX_TOKEN_CHARS, check_token_sizes, rust_call

_SPACE_FLAGS: Final = ("lstrip", "rstrip", "single_word", "normalized")


def decoder_tokens(settings: Mapping[str, object], *, origin: str) -> dict[int, AddedToken]:
    """Return ``added_tokens_decoder`` by id. Raises ArtifactError for what is no token."""
    flags = Fields(settings, origin=origin)
    added: dict[int, AddedToken] = {}
    for key, entry in flags.mapping("added_tokens_decoder").items():
        content = entry.get("content") if isinstance(entry, Mapping) else None
        if (
            not (key.isdecimal() and len(key) < 10)
            or not isinstance(entry, Mapping)
            or not isinstance(content, str)
            or not content
        ):
            raise flags.wrong("added_tokens_decoder", "an object of ids and tokens with content")
        token_flags = {name: bool(entry.get(name, False)) for name in ("special", *_SPACE_FLAGS)}
        added[int(key)] = AddedToken(content, **token_flags)
    check_token_sizes([token.content for token in added.values()], longest=MAX_TOKEN_CHARS, origin=origin)
    return added


def _role_tokens(settings: Mapping[str, object]) -> dict[str, AddedToken]:
    """Return by text the tokens that the settings write out for a role, with what they do to spaces."""
    return {
        entry["content"]: AddedToken(
            entry["content"], special=True, **{name: bool(entry.get(name, False)) for name in _SPACE_FLAGS}
        )
        for role, entry in settings.items()
        if role.endswith("_token") and isinstance(entry, Mapping) and entry.get("__type") == "AddedToken"
        if isinstance(entry.get("content"), str)
    }


def with_added_tokens(
    data: bytes,
    tokenizer: Tokenizer,
    settings: Mapping[str, object],
    named: Mapping[str, str],
    *,
    origin: str,
) -> bytes:
    """Return a tokenizer.json with the tokens that the settings add; ``data`` itself where they add none.

    tokenizer: of ``data``; it is changed. named: token texts by role. origin: names the settings.
    Raises ArtifactError if a token would get another id than the settings say.
    """
    decoder = decoder_tokens(settings, origin=origin)
    roles = _role_tokens(settings)
    new = {text: token for text, token in roles.items() if tokenizer.token_to_id(text) is None}
    known = {token.content: token for token in decoder.values()} | new
    extra = settings.get("extra_special_tokens") or settings.get("additional_special_tokens")
    texts = [*named.values(), *(extra if isinstance(extra, list) else ())]
    special = [
        known.get(text, AddedToken(text, special=True, normalized=False))
        for text in texts
        if isinstance(text, str) and text
    ]
    check_token_sizes([token.content for token in special], longest=MAX_TOKEN_CHARS, origin=origin)
    with rust_call:
        before = {id_: repr(token) for id_, token in tokenizer.get_added_tokens_decoder().items()}
        present = set(before.values())
        tokenizer.add_tokens([token for _, token in sorted(decoder.items()) if repr(token) not in present])
        tokenizer.add_special_tokens(special)
        after = {id_: repr(token) for id_, token in tokenizer.get_added_tokens_decoder().items()}
        moved = next((id_ for id_, t in decoder.items() if tokenizer.token_to_id(t.content) != id_), None)
    if moved is not None:
        raise ArtifactError(
            f"{origin}: added_tokens_decoder gives {decoder[moved].content!r} the id {moved}, expected "
            f"{tokenizer.token_to_id(decoder[moved].content)}, as in tokenizer.json; the two files belong to "
            f"different models"
        )
    return data if before == after else tokenizer.to_str().encode()
