"""The model's tokens as llguidance sees them: a trie of bytes, made once from tokenizer.json."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import msgspec
import numpy as np
import numpy.typing as npt

from llorch_serve.errors import LibraryPanicError, UnsupportedError
from llorch_serve.text.panics import panics_as_errors
from llorch_serve.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from llguidance import LLTokenizer

_END: Final = "<|llorch end of grammar|>"
_SPACE: Final = "\u2581"


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """What compiling and masking need of the tokens.

    trie: every token's bytes. Special tokens stand apart: no text spells one, only a grammar that names it.
    size: tokens that the model knows, the length of a row of logits.
    special: special tokens, by id.
    model_stops: tokens that end the model's answers.
    unwritten: ids below ``size`` that no grammar may allow: beyond tokenizer.json, and the model's stop
        tokens where tokenizer.json has them as plain text.
    """

    trie: LLTokenizer
    size: int
    special: Mapping[int, str]
    model_stops: frozenset[int]
    unwritten: npt.NDArray[np.int64]


def build(tokenizer: Tokenizer, vocab_size: int, model_stops: frozenset[int]) -> Vocabulary:
    """Make the trie; takes about a second and holds the interpreter meanwhile.

    vocab_size: tokens that the model knows, be they more or fewer than tokenizer.json's.

    Raises UnsupportedError for a tokenizer that llguidance cannot read.
    """
    from llguidance import LLTokenizer

    # llguidance wants a token for the end of a text. One of its own leaves the model's stop tokens to us.
    text, end_id = tokenizer.with_special_token(_END)
    description = msgspec.json.decode(text)
    _spell_out_spaces(description)
    try:
        with panics_as_errors("llguidance"):
            trie = LLTokenizer(
                msgspec.json.encode(description).decode(),
                n_vocab=max(end_id + 1, vocab_size),
                eos_token=end_id,
            )
    except (ValueError, LibraryPanicError) as error:
        reason = str(error).splitlines()[0]
        raise UnsupportedError(
            f"structured output is impossible with this model's tokenizer.json: {reason}; send the request "
            f"without it"
        ) from error
    special = tokenizer.special_tokens
    plain_stops = [id_ for id_ in model_stops if id_ not in special and id_ < vocab_size]
    unwritten = np.array([*plain_stops, *range(tokenizer.vocab_size, vocab_size)], dtype=np.int64)
    return Vocabulary(trie, vocab_size, special, model_stops, unwritten)


def _spell_out_spaces(description: dict[str, Any]) -> None:
    """Write Metaspace as the replacements that it makes, which llguidance reads, without the space it puts
    first.
    """
    if (description.get("pre_tokenizer") or {}).get("type") != "Metaspace":
        return
    space = {"String": " "}
    steps = [{"type": "Replace", "pattern": space, "content": _SPACE}]
    kept = description.get("normalizer")
    description["normalizer"] = {"type": "Sequence", "normalizers": ([kept] if kept else []) + steps}
    description["pre_tokenizer"] = None
    back = {"type": "Replace", "pattern": {"String": _SPACE}, "content": " "}
    description["decoder"] = {
        "type": "Sequence",
        "decoders": [back, {"type": "ByteFallback"}, {"type": "Fuse"}],
    }
