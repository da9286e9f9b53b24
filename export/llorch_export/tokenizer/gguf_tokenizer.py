"""The tokenizer of a GGUF file: vocabulary, chat templates, stop tokens and recommended sampling values.

Input is the file's metadata; output is :class:`TokenizerAssets`, which the artifact carries.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from llorch_export.checkpoint.base import TokenizerAssets
from llorch_export.config.fields import Fields
from llorch_export.tokenizer.chat_templates import templates_from_gguf
from llorch_export.tokenizer.end_tokens import END_OF_TURN, end_token_ids
from llorch_export.tokenizer.named_tokens import seen_by_templates
from llorch_export.tokenizer.sampling_defaults import defaults_from_gguf
from llorch_export.tokenizer.vocabulary import TokenKind, Vocabulary, byte_level_bpe, sentencepiece_bpe
from llorch_serve.errors import ArtifactError


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
    model = fields.get("model")
    if model not in ("gpt2", "llama"):
        raise ArtifactError(
            f"{origin}: tokenizer.ggml.model is {model!r}; supported are gpt2 and llama. "
            "Use a GGUF file that carries its tokenizer, or export from the original Hugging Face folder"
        )
    tokens = fields.array("tokens", str)
    if not 0 < len(tokens) <= vocab_size:
        raise ArtifactError(
            f"{origin}: the tokenizer has {len(tokens)} tokens, expected 1 to {vocab_size}, the rows of the "
            f"embedding"
        )
    kinds = _kinds(fields, tokens, origin)
    highest = len(tokens) - 1
    # llama.cpp's defaults for SentencePiece vocabularies, which old files rely on.
    spm = model == "llama"
    bos = _token_id(fields, "bos_token_id", 1 if spm else None, highest)
    eos = _token_id(fields, "eos_token_id", 2 if spm else None, highest)
    unknown = _token_id(fields, "unknown_token_id", 0 if spm else None, highest)
    pre = fields.get("pre") or "default"
    vocabulary = Vocabulary(
        tokens=tokens,
        kinds=kinds,
        bos=bos,
        eos=eos,
        unknown=unknown,
        add_bos=fields.boolean("add_bos_token", spm or pre in ("llama-bpe", "llama3", "llama-v3")),
        add_eos=fields.boolean("add_eos_token", False),
        scores=fields.array("scores", float, length=len(tokens)) if spm else (),
        merges=() if spm else fields.array("merges", str),
        pre=str(pre),
        space_prefix=spm and fields.boolean("add_space_prefix", True),
        origin=origin,
    )
    built = sentencepiece_bpe(vocabulary) if spm else byte_level_bpe(vocabulary)
    templates = templates_from_gguf(metadata, origin=origin)
    padding = _token_id(fields, "padding_token_id", None, highest)
    roles = {"bos_token": bos, "eos_token": eos, "unk_token": unknown, "pad_token": padding}
    named = {role: tokens[token_id] for role, token_id in roles.items() if token_id is not None}
    return TokenizerAssets(
        tokenizer_json=built.to_str().encode(),
        chat_templates=templates,
        bos_token_id=bos,
        eos_token_id=eos,
        stop_token_ids=_stops(fields, eos, tokens, kinds),
        generation=defaults_from_gguf(metadata, origin),
        # What lacks an id is undefined in templates either way.
        template_tokens=seen_by_templates(templates.values(), named, starts=True, ends=True),
    )


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
