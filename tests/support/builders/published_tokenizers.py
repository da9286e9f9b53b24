"""Tokenizers for tiny models with published settings: a small vocabulary of the right kind, and a published
tokenizer_config.json whose added tokens are moved to the ids behind it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from tokenizers import AddedToken, Regex, Tokenizer, normalizers, pre_tokenizers, processors

from llorch_export.tokenizer.splitting import splitting_rules
from support.builders.tiny_tokenizers import byte_fallback, byte_level

PUBLISHED: Final = Path(__file__).parents[2] / "data" / "published" / "tokenizers.jsonl"
_FLAGS: Final = ("special", "lstrip", "rstrip", "single_word", "normalized")
_LLAMA3_ROWS: Final = 128_000
# The class of the published settings that a model of a family may have, and how its text is cut.
_KINDS: Final[Mapping[str, tuple[str, ...]]] = {
    "sentencepiece": ("LlamaTokenizer", "LlamaTokenizerFast"),
    "qwen2": ("Qwen2Tokenizer",),
    "llama-bpe": ("PreTrainedTokenizerFast",),
    "gpt-2": ("GPT2Tokenizer",),
}


def kind_of(config: Mapping[str, Any]) -> str:
    """Return which kind of tokenizer a published config.json goes with."""
    family, rows = config["model_type"], config.get("vocab_size", 0)
    if family in ("qwen2", "qwen3"):
        return "qwen2"
    if family == "granite":
        return "gpt-2"
    if rows >= _LLAMA3_ROWS or family == "smollm3":
        return "llama-bpe"
    return "gpt-2" if rows in (49152, 49216, 50304) else "sentencepiece"


def settings_for(name: str, kind: str, turn: int) -> dict[str, Any]:
    """Return the tokenizer_config.json of the model ``name``, or the ``turn``-th of those of its kind."""
    rows = [json.loads(line) for line in PUBLISHED.read_text(encoding="utf-8").splitlines()]
    fitting = {
        row["name"]: row["file"]
        for row in rows
        if row["file"].get("tokenizer_class") in _KINDS[kind] and not row["file"].get("auto_map")
    }
    model = name.rpartition("__")[2].lower()
    own = next((file for key, file in fitting.items() if model in key.lower()), None)
    return own or list(fitting.values())[turn % len(fitting)]


def write_tokenizer(folder: Path, kind: str, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Write tokenizer.json and tokenizer_config.json, and return the content of the second."""
    inner = _base(kind)
    moved = {}
    for _, entry in sorted(settings.get("added_tokens_decoder", {}).items(), key=lambda item: int(item[0])):
        token = AddedToken(entry["content"], **{flag: entry.get(flag, False) for flag in _FLAGS})
        inner.add_tokens([token])
        moved[str(inner.token_to_id(entry["content"]))] = entry
    named = [AddedToken(text, special=True, normalized=False) for text in _named(settings)]
    inner.add_special_tokens([token for token in named if inner.token_to_id(token.content) is None])
    bos = settings.get("bos_token")
    bos = bos["content"] if isinstance(bos, Mapping) else bos
    if bos and settings.get("add_bos_token", kind == "llama-bpe"):
        inner.post_processor = processors.TemplateProcessing(
            single=[bos, "$A"], special_tokens=[(bos, inner.token_to_id(bos))]
        )
    content = {**settings, "added_tokens_decoder": moved} if moved else dict(settings)
    inner.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(content), encoding="utf-8")
    return content


def _named(settings: Mapping[str, Any]) -> Iterator[str]:
    for role, value in settings.items():
        text = value.get("content") if isinstance(value, Mapping) else value
        if role.endswith("_token") and isinstance(text, str) and text:
            yield text


def _base(kind: str) -> Tokenizer:
    if kind == "sentencepiece":
        inner = byte_fallback()
        inner.post_processor = processors.TemplateProcessing(single="$A", special_tokens=[])
        return inner
    inner = byte_level(())
    plain = json.loads(inner.to_str()) | {"added_tokens": []}
    inner = Tokenizer.from_str(json.dumps(plain))
    if kind != "gpt-2":
        rules = splitting_rules(kind, origin="test")
        cuts = [pre_tokenizers.Split(Regex(pattern), behavior="isolated") for pattern in rules.patterns]
        encode = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        inner.pre_tokenizer = pre_tokenizers.Sequence([*cuts, encode])
        if rules.composes:
            inner.normalizer = normalizers.NFC()
    return inner
