"""What a person should know about a folder's tokenizer: settings without effect, and tokens that no model
has.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tokenizers import Tokenizer

from llorch_serve.errors import LibraryPanicError
from llorch_serve.text.tokenizer_library import rust_call


def tokenizer_notices(
    tokenizer: Tokenizer,
    settings: Mapping[str, object],
    bos: Sequence[int],
    eos: Sequence[int],
    vocab_size: int,
) -> tuple[str, ...]:
    """Return the notices, a line each.

    bos, eos: ids of the tokens that the folder names; empty or one. vocab_size: rows of the embedding.
    """
    notices = []
    code = settings.get("auto_map")
    if isinstance(code, Mapping) and code.get("AutoTokenizer"):
        notices.append(
            "the tokenizer's own code, which auto_map of tokenizer_config.json names, is not run; compare "
            "ids with llorch verify"
        )
    if settings.get("split_special_tokens"):
        notices.append(
            "split_special_tokens of tokenizer_config.json has no effect: special tokens in the text of a "
            "prompt are read as such, as chat templates need it"
        )
    ids = _ids_of_some_text(tokenizer)
    for name, added, token in (("add_bos_token", ids[:1], bos), ("add_eos_token", ids[-1:], eos)):
        wanted = settings.get(name)
        adds = bool(token) and added == list(token)
        if isinstance(wanted, bool) and wanted is not adds:
            does = "adds it" if adds else "adds none"
            notices.append(
                f"{name} of tokenizer_config.json is {str(wanted).lower()}, but tokenizer.json {does} to "
                f"texts, and its rules count, as in transformers 5"
            )
    beyond = sum(token_id >= vocab_size for token_id in tokenizer.get_vocab().values())
    return (*notices, *beyond_notices(beyond, vocab_size))


def ids_of(tokenizer: Tokenizer, text: str) -> list[int] | None:
    """Return the ids of a text; None where a vocabulary has no token for a part of it."""
    try:
        with rust_call:
            return tokenizer.encode(text).ids
    except LibraryPanicError:
        raise
    except Exception:  # noqa: BLE001 - the library raises nothing more precise
        return None


def _ids_of_some_text(tokenizer: Tokenizer) -> list[int]:
    """Return the ids of a text that is one token, with what is added around it."""
    tokens = tokenizer.get_vocab(with_added_tokens=False)
    return ids_of(tokenizer, "a") or ids_of(tokenizer, min(tokens, default="")) or []


def beyond_notices(beyond: int, vocab_size: int) -> tuple[str, ...]:
    """Return a line about the ``beyond`` tokens without a row of the embedding; none if there are none."""
    if not beyond:
        return ()
    return (
        f"{beyond} tokens of the tokenizer have ids of {vocab_size} and more, for which the model has no "
        f"embedding; texts with them are refused",
    )
