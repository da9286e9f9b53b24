"""Encodes text in which some special tokens' texts are control tokens and others are just text.

A rendered conversation comes from the chat module; ids go back to it. The encoder is a copy of the tokenizer whose
special tokens have other, secret names. The text's control tokens are given these names before the one and only pass
over it, so that sections, prefix spaces and merges are those of an ordinary encoding.
"""

from __future__ import annotations

import re
import secrets
from typing import Any

import msgspec
import tokenizers

from llorch_serve.errors import FieldViolation, InvalidRequestError
from llorch_serve.tokenizer_library import rust_call

# A private use area of Unicode: no normaliser, case mapping or trimming changes these characters.
_PRIVATE = 0xE000


def _secret_text() -> str:
    """Return 16 characters that nobody can guess (96 bits), and that no text holds by chance."""
    return "".join(chr(_PRIVATE + secrets.randbits(6)) for _ in range(16))


class GuardedEncoder:
    """See the module. Safe to use from many threads.

    inner: the tokenizer to copy.
    pattern: matches the text of any special token, the longest first.
    marker: a secret text, to be put before a special token's text that is not to become a control token.
    """

    def __init__(self, inner: tokenizers.Tokenizer, pattern: re.Pattern[str]) -> None:
        spec: dict[str, Any] = msgspec.json.decode(inner.to_str())
        added = spec["added_tokens"]
        spec.update(added_tokens=[], post_processor=None)
        model = spec["model"]
        unknown = {model.get("unk_token"), *self._unigram_unknown(model)}
        # Ids that plain text must not produce. The unknown token is what text without a token becomes: no harm.
        self._control = {t["id"]: t["content"] for t in added if t["special"] and t["content"] not in unknown}
        if model["type"] == "Unigram":
            # It takes any piece of its vocabulary for text that looks like it, so these get names that no text has.
            hidden = set(self._control.values())
            model["vocab"] = [
                [_secret_text() if piece in hidden else piece, score] for piece, score in model["vocab"]
            ]
        self.marker = _secret_text()
        self._marked = re.compile(f"{self.marker}({pattern.pattern})|{pattern.pattern}")
        self._inner = tokenizers.Tokenizer.from_str(msgspec.json.encode(spec).decode())
        self._aliases: dict[str, str] = {}
        self._original_ids: dict[int, int] = {}
        for token in added:
            name = token["content"]
            if token["special"]:
                alias = _secret_text()
                self._aliases[name] = alias
                name = alias
            flags = {key: token[key] for key in ("single_word", "lstrip", "rstrip", "normalized", "special")}
            self._inner.add_tokens([tokenizers.AddedToken(name, **flags)])
            new_id = self._inner.token_to_id(name)
            assert new_id is not None
            self._original_ids[new_id] = token["id"]

    def encode(self, text: str, field: str) -> tuple[int, ...]:
        """Return the ids of a text in which special tokens that follow :attr:`marker` are text, others control.

        The markers themselves are left out. Raises InvalidRequestError, naming ``field``, if the tokenizer's model
        itself makes a control token of plain text.
        """
        named = self._marked.sub(lambda found: found[1] or self._aliases[found[0]], text)
        named = named.replace(self.marker, "")
        with rust_call:
            ids = self._inner.encode(named, add_special_tokens=False).ids
        for id_ in ids:
            if id_ in self._control and id_ not in self._original_ids:
                name = self._control[id_]
                problem = f"found the text {name!r}, which this model's tokenizer cannot tell from its control token"
                raise InvalidRequestError([FieldViolation(field, f"{problem}; expected text without it")])
        return tuple(self._original_ids.get(id_, id_) for id_ in ids)

    @staticmethod
    def _unigram_unknown(model: dict[str, Any]) -> list[str]:
        unknown = model.get("unk_id")
        return [] if unknown is None else [model["vocab"][unknown][0]]
