"""Where transformers' tokenizer classes cut text otherwise than a folder's tokenizer.json.

Since transformers 5 a class such as ``Qwen2Tokenizer`` keeps a file's vocabulary and merges, and cuts text
by rules of its own. The model was trained with the file's rules, and other runtimes obey them too. So the
file counts here, and a notice tells of the difference. Input is a tokenizer.json; output are notices.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final

from tokenizers import Tokenizer

from llorch_export.config.fields import quoted
from llorch_export.tokenizer.added_tokens import DECODER, FURTHER
from llorch_export.tokenizer.bpe import SPACE
from llorch_export.tokenizer.llama_rules import LLAMA
from llorch_export.tokenizer.notices import ids_of
from llorch_export.tokenizer.splitting import splitting_rules
from llorch_serve.errors import ArtifactError
from llorch_serve.text.tokenizer_library import read_tokenizer

# These take a file as it is.
_NO_RULES: Final = frozenset({"", LLAMA, "PreTrainedTokenizer", "TokenizersBackend"})
_NFC: Final = {"type": "NFC"}
# What tokenizers differ in: spaces, digits, signs, contractions, composed letters, scripts, line breaks.
_TEXTS: Final = (
    *("Hello world", " a  b   c", "In 2024: 1234567 of 89", "it's I'LL", "f(x)=[1,2];//x", "a\n\n b\r\n\tc"),
    *("cafe\u0301 A\u030a", "na\u00efve \u00fcber", "\u4f60\u597d\uff0c\u4e16\u754c\u3002", "\u06f1\u06f2"),
    *(
        "\u0939\u093f\u0928\u094d\u0926\u0940",
        "\ud55c\uad6d\uc5b4",
        "\U0001f642\U0001f680",
        "a\u00a0b\u3000c",
    ),
    *("HTTPServer camelCase", "---- .... ???", "x_1 y-2 z+3"),
)


def class_notices(
    data: bytes,
    tokenizer: Tokenizer,
    name: str,
    settings: Mapping[str, object],
    named: Mapping[str, str],
) -> tuple[str, ...]:
    """Return a notice if the class ``name`` gives other ids than the file; none if they are the same.

    data, tokenizer: tokenizer.json and what it holds. name: the class by which transformers reads the folder;
    empty if it has no rules. settings: of tokenizer_config.json. named: token texts by role.
    """
    if name in _NO_RULES:
        return ()
    rules = _rules(name, add_prefix_space=bool(settings.get("add_prefix_space")))
    if rules is None:
        return (
            f"tokenizer_class is {name[:100]}, whose rules in transformers may differ from tokenizer.json; "
            f"tokenizer.json counts here, as the model's own file",
        )
    if (dropped := _dropped(tokenizer, settings, named)) is not None:
        return (_notice(name, f"does not know {quoted(dropped)} as a token"),)
    inner: dict[str, Any] = json.loads(data)
    model = inner["model"] | rules.pop("model")
    changed = inner | rules | {"model": model}
    if changed == inner:
        return ()
    try:
        other = read_tokenizer(json.dumps(changed).encode(), origin="tokenizer.json")
    except ArtifactError:
        return (_notice(name, "cannot read this tokenizer.json"),)
    for text in _TEXTS:
        here, there = ids_of(tokenizer, text), ids_of(other, text)
        if here != there:
            does = f"makes the ids {there or 'none'} of {text!r}, and tokenizer.json {here or 'none'}"
            return (_notice(name, does),)
    return ()


def _dropped(tokenizer: Tokenizer, settings: Mapping[str, object], named: Mapping[str, str]) -> str | None:
    """Return an added token of the file that a class with rules drops: where the settings list such tokens,
    only those count, and those with a role.
    """
    stated = settings.get(DECODER)
    if not isinstance(stated, Mapping):
        return None
    known = {entry.get("content") for entry in stated.values() if isinstance(entry, Mapping)}
    known |= {*named.values()}
    for key in FURTHER:
        found = settings.get(key)
        known |= {text for text in found if isinstance(text, str)} if isinstance(found, list) else set()
    texts = (token.content for token in tokenizer.get_added_tokens_decoder().values())
    return next((text for text in texts if text not in known), None)


def _notice(name: str, does: str) -> str:
    return (
        f"tokenizer_class is {name}, which in transformers 5 has rules of its own and {does}; tokenizer.json "
        f"counts here, as the model's own file"
    )


def _rules(name: str, *, add_prefix_space: bool) -> dict[str, Any] | None:
    """Return the parts of a tokenizer.json that a class replaces; None for a class not known here."""
    byte_level = {
        "type": "ByteLevel",
        "add_prefix_space": add_prefix_space,
        "trim_offsets": True,
        "use_regex": True,
    }
    model = {"unk_token": None, "fuse_unk": False, "byte_fallback": False, "ignore_merges": False}
    if name == "GPT2Tokenizer":
        return {"normalizer": None, "pre_tokenizer": byte_level, "model": model}
    if name == "GPTNeoXTokenizer":
        return {"normalizer": _NFC, "pre_tokenizer": byte_level, "post_processor": None, "model": model}
    if name == "Qwen2Tokenizer":
        (pattern,) = splitting_rules("qwen2", origin=name).patterns
        cut = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
        parts = [cut, byte_level | {"use_regex": False}]
        sequence = {"type": "Sequence", "pretokenizers": parts}
        return {"normalizer": _NFC, "pre_tokenizer": sequence, "model": model}
    if name == "GemmaTokenizer":
        return {
            "normalizer": {"type": "Replace", "pattern": {"String": " "}, "content": SPACE},
            "pre_tokenizer": {
                "type": "Split",
                "pattern": {"String": " "},
                "behavior": "MergedWithPrevious",
                "invert": False,
            },
            "model": model | {"fuse_unk": True, "byte_fallback": True},
        }
    return None
