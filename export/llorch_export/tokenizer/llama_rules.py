"""The rules that transformers' ``LlamaTokenizer`` puts in place of those in tokenizer.json.

Since transformers 5 that class keeps a file's vocabulary, merges and post-processor, and cuts text by
``legacy`` and ``add_prefix_space`` of tokenizer_config.json. Input and output are contents of a
tokenizer.json.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final

import msgspec

from llorch_export.config.fields import Fields
from llorch_export.tokenizer.bpe import SPACE
from llorch_serve.errors import ArtifactError
from llorch_serve.files.json_errors import NOT_JSON

LLAMA: Final = "LlamaTokenizer"
# Families whose files transformers takes as they are, whatever class they name.
_AS_THEY_ARE: Final = frozenset({"mistral", "phi3", "granite", "olmo2", "olmo3", "stablelm", "internlm2"})


def effective_class(name: str, model_type: str, data: bytes) -> str:
    """Return the class by which transformers 5 reads a folder; empty: tokenizer.json is taken as it is.

    name: the class that the folder asks for. Byte-level files that ask for the class of SentencePiece files,
    as some with Llama 3's vocabulary do, are taken as they are.
    """
    if model_type in _AS_THEY_ARE:
        return ""
    if model_type == "qwen2" or (model_type == "qwen3" and not name):
        return "Qwen2Tokenizer"
    if name != LLAMA:
        return name
    inner = _decoded(data) or {}
    model = inner.get("model")
    is_bpe = isinstance(model, dict) and model.get("type") == "BPE"
    return LLAMA if is_bpe and b'"ByteLevel"' not in data else ""


def with_llama_rules(data: bytes, settings: Mapping[str, object], *, origin: str) -> bytes:
    """Return a tokenizer.json with the class's rules; for those whose :func:`effective_class` it is.

    settings: of tokenizer_config.json; ``origin`` names it. Raises ArtifactError for flags that are none.
    """
    flags = Fields(settings, origin=origin)
    prefix = flags.boolean("add_prefix_space", True)
    # The class has a default for an absent key; a null is handed on, and is as good as false.
    legacy = flags.boolean("legacy", False)
    inner = _decoded(data)
    if inner is None:
        raise ArtifactError(f"{origin}: tokenizer.json beside it is not JSON; fetch it again")
    if "added_tokens_decoder" in settings:
        inner["added_tokens"] = []  # only those of the settings count
    inner["normalizer"] = None
    inner["pre_tokenizer"] = {
        "type": "Metaspace",
        "replacement": SPACE,
        "prepend_scheme": ("always" if legacy else "first") if prefix else "never",
        "split": False,
    }
    rules: list[dict[str, Any]] = [
        {"type": "Replace", "pattern": {"String": SPACE}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ]
    if prefix:
        rules.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    inner["decoder"] = {"type": "Sequence", "decoders": rules}
    inner["model"] |= {"fuse_unk": True, "byte_fallback": True, "unk_token": None, "dropout": None}
    return json.dumps(inner, ensure_ascii=False, separators=(",", ":")).encode()


def _decoded(data: bytes) -> dict[str, Any] | None:
    try:
        inner = msgspec.json.decode(
            data
        )  # as the content is decoded once more later: half a character is none
    except NOT_JSON:
        return None
    return inner if isinstance(inner, dict) else None
