"""Tells control tokens from text that only looks like them, and encodes text in which both occur.

A rendered conversation comes from the chat module; ids go back to it. The encoder is a copy of the tokenizer
whose special tokens have other, secret names. The text's control tokens are given these names before the one
and only pass over it, so that sections, prefix spaces and merges are those of an ordinary encoding.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import tokenizers

from llorch_serve.errors import FieldViolation, InvalidRequestError
from llorch_serve.text.stand_ins import StandIns
from llorch_serve.text.tokenizer_library import encoded, rust_call

# A private use area of Unicode: no normaliser, case mapping or trimming changes these characters.
_PRIVATE = 0xE000


@dataclass(frozen=True, slots=True)
class Spot:
    """A place where a text spells out a special token: characters ``start`` to ``end``, that one excluded.

    White space that the token takes in (``lstrip``, ``rstrip``) is among them.
    """

    token_id: int
    start: int
    end: int


def _secret_text() -> str:
    """Return 16 characters that nobody can guess (96 bits), and that no text holds by chance."""
    return "".join(chr(_PRIVATE + secrets.randbits(6)) for _ in range(16))


class ControlTokenGuard:
    """See the module. Safe to use from many threads; made while a model is loaded, since it takes the lock
    for long.

    inner: the tokenizer to guard.
    """

    def __init__(self, inner: tokenizers.Tokenizer) -> None:
        spec: dict[str, Any] = msgspec.json.decode(inner.to_str())
        self._added: list[dict[str, Any]] = spec["added_tokens"]
        self._special = {token["id"]: token for token in self._added if token["special"]}
        model = spec["model"]
        unknown = {model.get("unk_token"), *_unigram_unknown(model)}
        # Ids that plain text must not produce. The unknown token is what text without a token becomes: no
        # harm.
        self._control = {
            id_: token["content"] for id_, token in self._special.items() if token["content"] not in unknown
        }
        self._finder = self._made_finder(spec)
        self._encoder = self._made_encoder(spec)
        texts = (token["content"] for token in self._special.values())
        normaliser = inner.normalizer

        def normalised(text: str) -> str:
            if normaliser is None:
                return text
            with rust_call:
                return str(normaliser.normalize_str(text))

        self.stand_ins = StandIns(texts, normalised)

    def controls(self, ids: Sequence[int]) -> list[int]:
        """Return those ids that control the model, in their order."""
        return [id_ for id_ in ids if id_ in self._control]

    def spots(self, text: str) -> list[Spot]:
        """Return where the tokenizer finds special tokens in a text, in their order; whatever made the text
        spell them out.
        """
        tokens, ids = self._finder
        found = encoded(tokens, text, add_special_tokens=False, field="input.chat")
        pairs = zip(found.ids, found.offsets, strict=True)
        return [Spot(ids[id_], *place) for id_, place in pairs if id_ in ids]

    def stands_alone(self, spot: Spot) -> bool:
        """Whether a token is one only where no letter or digit touches it (``single_word``)."""
        return bool(self._special[spot.token_id]["single_word"])

    def encode(self, text: str, written: Sequence[Spot], field: str) -> tuple[int, ...]:
        """Return the ids of a text whose control tokens are ``written``, and in which all else is plain text.

        Raises InvalidRequestError, naming ``field``, if the tokenizer's model itself makes a control token of
        plain text.
        """
        inner, aliases, originals = self._encoder
        pieces: list[str] = []
        end = 0
        for spot in written:
            pieces += (
                text[end : spot.start],
                self._named(text[spot.start : spot.end], spot.token_id, aliases),
            )
            end = spot.end
        named = "".join((*pieces, text[end:]))
        ids = encoded(inner, named, add_special_tokens=False, field=field).ids
        for id_ in ids:
            if id_ in self._control and id_ not in originals:
                name = self._control[id_]
                problem = (
                    f"found the text {name!r}, which this model's tokenizer cannot tell from its control "
                    f"token"
                )
                raise InvalidRequestError([FieldViolation(field, f"{problem}; expected text without it")])
        return tuple(originals.get(id_, id_) for id_ in ids)

    def _named(self, found: str, token_id: int, aliases: dict[int, str]) -> str:
        """Return a token's alias with the white space that the token took in, and takes in again."""
        token = self._special[token_id]
        left = found[: len(found) - len(found.lstrip())] if token["lstrip"] else ""
        right = found[len(found.rstrip()) :] if token["rstrip"] else ""
        return left + aliases[token_id] + right

    def _made_finder(self, spec: dict[str, Any]) -> tuple[tokenizers.Tokenizer, dict[int, int]]:
        """A tokenizer that finds added tokens as the guarded one does and makes one token of all between
        them; real ids by its own.
        """
        rest = _secret_text()
        model = {"type": "WordLevel", "vocab": {rest: 0}, "unk_token": rest}
        changed: dict[str, Any] = {
            "model": model,
            "added_tokens": [],
            "pre_tokenizer": None,
            "post_processor": None,
            "decoder": None,
        }
        inner = tokenizers.Tokenizer.from_str(msgspec.json.encode(spec | changed).decode())
        ids = {}
        for token in self._added:
            id_ = _add(inner, token["content"], token)
            if token["special"]:
                ids[id_] = token["id"]
        return inner, ids

    def _made_encoder(
        self, spec: dict[str, Any]
    ) -> tuple[tokenizers.Tokenizer, dict[int, str], dict[int, int]]:
        """The copy; the aliases of special tokens by their ids; the original ids of added tokens by the
        copy's.
        """
        model = spec["model"]
        if model["type"] == "Unigram":
            # It takes any piece of its vocabulary for text that looks like it, so these get names that no
            # text has.
            hidden = set(self._control.values())
            vocab = [[_secret_text() if piece in hidden else piece, score] for piece, score in model["vocab"]]
            model = model | {"vocab": vocab}
        changed = {"model": model, "added_tokens": [], "post_processor": None}
        inner = tokenizers.Tokenizer.from_str(msgspec.json.encode(spec | changed).decode())
        aliases: dict[int, str] = {}
        originals: dict[int, int] = {}
        for token in self._added:
            name = token["content"]
            if token["special"]:
                name = aliases[token["id"]] = _secret_text()
                # Where it was found is where it is, whatever its neighbours are.
                token = token | {"single_word": False, "normalized": False}
            originals[_add(inner, name, token)] = token["id"]
        return inner, aliases, originals


def _add(inner: tokenizers.Tokenizer, name: str, token: dict[str, Any]) -> int:
    """Add a token with the flags of another; return its id."""
    flags = {key: token[key] for key in ("single_word", "lstrip", "rstrip", "normalized", "special")}
    inner.add_tokens([tokenizers.AddedToken(name, **flags)])
    id_ = inner.token_to_id(name)
    assert id_ is not None
    return id_


def _unigram_unknown(model: dict[str, Any]) -> list[str]:
    unknown = model.get("unk_id")
    return [] if unknown is None else [model["vocab"][unknown][0]]
