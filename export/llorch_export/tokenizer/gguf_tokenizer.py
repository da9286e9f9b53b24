"""The tokenizer of a GGUF file: vocabulary, chat templates, stop tokens and recommended sampling values.

Input is the file's metadata; output is :class:`TokenizerAssets`, which the artifact carries.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from llorch_export.checkpoint.base import TokenizerAssets
from llorch_export.config.fields import Fields
from llorch_export.tokenizer.bpe import byte_level_bpe, sentencepiece_bpe
from llorch_export.tokenizer.chat_templates import templates_from_gguf
from llorch_export.tokenizer.end_tokens import END_OF_TURN, end_token_ids
from llorch_export.tokenizer.named_tokens import seen_by_templates
from llorch_export.tokenizer.notices import beyond_notices
from llorch_export.tokenizer.sampling_defaults import defaults_from_gguf
from llorch_export.tokenizer.splitting import UNCUT, splitting_rules
from llorch_export.tokenizer.vocabulary import TokenKind, Vocabulary
from llorch_serve.errors import ArtifactError

# Kinds of tokenizers that GGUF files hold and that are not rebuilt here.
_OTHER_MODELS: Final = {
    "bert": "WordPiece, as BERT has it",
    "t5": "a Unigram model, as T5 has it",
    "rwkv": "RWKV's longest match",
    "plamo2": "PLaMo 2's table of suffixes",
    "gemma4": "BPE on characters, as Gemma 4 has it",
    "hybriddna": "BPE and k-mers of DNA",
    "whitespace": "words between white space",
    "no_vocab": "no tokenizer",
    "none": "no tokenizer",
}


def tokenizer_from_gguf(metadata: Mapping[str, object], *, vocab_size: int, origin: str) -> TokenizerAssets:
    """Rebuild the tokenizer of a GGUF file.

    Raises ArtifactError if the file has no tokenizer, one of another kind than gpt2 and llama, or a broken
    one.
    """
    prefix = "tokenizer.ggml."
    fields = Fields(
        {k.removeprefix(prefix): v for k, v in metadata.items() if k.startswith(prefix)},
        origin=f"{origin}: tokenizer",
    )
    model = _model(fields, origin)
    tokens = fields.array("tokens", str)
    if not tokens:
        raise ArtifactError(f"{origin}: the tokenizer has 0 tokens, expected some; convert it again")
    kinds = _kinds(fields, tokens, origin)
    highest = min(len(tokens), vocab_size) - 1  # what the embedding lacks has no role
    # llama.cpp's defaults for SentencePiece vocabularies, which old files rely on.
    spm = model == "llama"
    bos = _token_id(fields, "bos_token_id", 1 if spm else None, highest)
    eos = _token_id(fields, "eos_token_id", 2 if spm else None, highest)
    unknown = _token_id(fields, "unknown_token_id", 0 if spm else None, highest)
    rules = UNCUT if spm else splitting_rules(_pre(fields), origin=origin)
    vocabulary = Vocabulary(
        tokens=tokens,
        kinds=kinds,
        bos=bos,
        eos=eos,
        unknown=unknown,
        add_bos=fields.boolean("add_bos_token", spm or rules.adds_bos),
        add_eos=fields.boolean("add_eos_token", False),
        scores=fields.array("scores", float, length=len(tokens)) if spm else (),
        merges=() if spm else fields.array("merges", str),
        rules=rules,
        space_prefix=spm and fields.boolean("add_space_prefix", True),
        strips_space=spm and _is_phi_3(metadata),
        origin=origin,
    )
    built = sentencepiece_bpe(vocabulary) if spm else byte_level_bpe(vocabulary)
    templates = templates_from_gguf(metadata, origin=origin)
    padding = _token_id(fields, "padding_token_id", None, len(tokens) - 1)
    roles = {"bos_token": bos, "eos_token": eos, "unk_token": unknown, "pad_token": padding}
    named = {role: tokens[token_id] for role, token_id in roles.items() if token_id is not None}
    return TokenizerAssets(
        tokenizer_json=built.to_str().encode(),
        chat_templates=templates,
        bos_token_id=bos,
        eos_token_id=eos,
        stop_token_ids=_stops(fields, eos, tokens[: highest + 1], kinds[: highest + 1]),
        generation=defaults_from_gguf(metadata, origin),
        # What lacks an id is undefined in templates either way.
        template_tokens=seen_by_templates(templates.values(), named, starts=True, ends=True),
        named_tokens=named,
        notices=beyond_notices(len(tokens) - highest - 1, vocab_size),
    )


def _model(fields: Fields, origin: str) -> str:
    """Return which of the two kinds of tokenizers a file has. Raises ArtifactError for any other."""
    model = fields.get("model")
    if model not in ("gpt2", "llama"):
        kind = f", {_OTHER_MODELS[model]}" if isinstance(model, str) and model in _OTHER_MODELS else ""
        raise ArtifactError(
            f"{origin}: tokenizer.ggml.model is {repr(model)[:100]}{kind}; supported are gpt2 and llama. "
            "Use a GGUF file that carries its tokenizer, or export from the original Hugging Face folder"
        )
    if fields.boolean("remove_extra_whitespaces", False) and model == "llama":
        raise fields.wrong("remove_extra_whitespaces", "false, since spaces are not removed here")
    return str(model)


def _pre(fields: Fields) -> str:
    """Return the name of the rules by which a text is cut; files of old converters name none."""
    pre = fields.get("pre")
    if not isinstance(pre, str | None):
        raise fields.wrong("pre", "a name")
    return pre or "default"


def _is_phi_3(metadata: Mapping[str, object]) -> bool:
    """Return whether a file holds a Phi-3: GGUF has no place for what its special tokens do to spaces."""
    name = str(metadata.get("general.name", "")).lower()
    return metadata.get("general.architecture") == "phi3" or "phi-3" in name or "phi3" in name


def _stops(
    fields: Fields, eos: int | None, tokens: Sequence[str], kinds: Sequence[TokenKind]
) -> tuple[int, ...]:
    """Return what ends an answer: what the file says does, and what does by its name."""
    roles = ("eot", "eom", "fim_pad", "fim_rep", "fim_sep")
    stated = {_token_id(fields, f"{role}_token_id", None, len(tokens) - 1) for role in roles} | {eos}
    return tuple(sorted({stop for stop in stated if stop is not None}.union(end_token_ids(tokens, kinds))))


def _kinds(fields: Fields, tokens: Sequence[str], origin: str) -> list[TokenKind]:
    """Return what each token is for. What ends a turn by its name is a control token, whatever the file
    says.
    """
    return [
        TokenKind.CONTROL if token in END_OF_TURN else kind
        for token, kind in zip(tokens, _stated_kinds(fields, len(tokens), origin), strict=True)
    ]


def _stated_kinds(fields: Fields, count: int, origin: str) -> list[TokenKind]:
    if "token_type" not in fields:
        return [TokenKind.NORMAL] * count
    known = {int(kind): kind for kind in TokenKind} | {0: TokenKind.NORMAL}  # 0: not stated
    numbers = fields.array("token_type", int, length=count)
    bad = next((number for number in numbers if number not in known), None)
    if bad is not None:
        raise ArtifactError(
            f"{origin}: tokenizer.ggml.token_type holds {bad}, expected 0 to {max(known)}; convert the "
            f"model again"
        )
    return [known[number] for number in numbers]


def _token_id(fields: Fields, key: str, default: int | None, highest: int) -> int | None:
    if key in fields:
        return fields.integer(key, low=0, high=highest)
    return default if default is not None and default <= highest else None
