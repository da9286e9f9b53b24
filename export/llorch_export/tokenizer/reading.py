"""What text needs besides weights: tokenizer, chat template, stop tokens and recommended sampling values.

Input is GGUF metadata or a Hugging Face folder; output is :class:`TokenizerAssets`, which the artifact
carries.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from tokenizers import AddedToken, Tokenizer

from llorch_export.checkpoint.base import TokenizerAssets
from llorch_export.checkpoint.folder import MAX_JSON_BYTES, ModelFolder
from llorch_export.config.fields import Fields
from llorch_export.tokenizer.bpe import byte_level_bpe, sentencepiece_bpe
from llorch_export.tokenizer.chat_templates import TEMPLATE_FILE, templates_from_folder, templates_from_gguf
from llorch_export.tokenizer.sampling_defaults import defaults_from_folder, defaults_from_gguf
from llorch_export.tokenizer.splitting import UNCUT, splitting_rules
from llorch_export.tokenizer.vocabulary import TokenKind, Vocabulary
from llorch_export.tokenizer.vocabulary_files import read_vocabulary
from llorch_serve.errors import ArtifactError
from llorch_serve.text.tokenizer_library import MAX_TOKEN_CHARS, check_token_sizes, read_tokenizer

# Tokens that end a turn, for GGUF files that name only an end-of-sequence token. They count if they are
# control tokens.
_END_OF_TURN: Final = frozenset({"<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<end_of_turn>"})
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
_MAKE_TOKENIZER: Final = (
    "make one with transformers: AutoTokenizer.from_pretrained(FOLDER).save_pretrained(FOLDER), then export "
    "again"
)
# The files of a Hugging Face folder that are read here.
FOLDER_FILES: Final = (
    "generation_config.json",
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "added_tokens.json",
    TEMPLATE_FILE,
)


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
    if not 0 < len(tokens) <= vocab_size:
        raise ArtifactError(
            f"{origin}: the tokenizer has {len(tokens)} tokens, expected 1 to {vocab_size}, the rows of the "
            f"embedding"
        )
    kinds = _kinds(fields, len(tokens), origin)
    highest = len(tokens) - 1
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
    stops = {
        eos,
        _token_id(fields, "eot_token_id", None, highest),
        _token_id(fields, "eom_token_id", None, highest),
    }
    stops |= {i for i, t in enumerate(tokens) if t in _END_OF_TURN and kinds[i] is TokenKind.CONTROL}
    return TokenizerAssets(
        tokenizer_json=built.to_str().encode(),
        chat_templates=templates_from_gguf(metadata, origin=origin),
        bos_token_id=bos,
        eos_token_id=eos,
        stop_token_ids=tuple(sorted(stop for stop in stops if stop is not None)),
        generation=defaults_from_gguf(metadata, origin),
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


def tokenizer_from_folder(
    folder: ModelFolder, config: Mapping[str, object], *, vocab_size: int
) -> TokenizerAssets:
    """Read the tokenizer of a Hugging Face folder.

    config: content of its ``config.json``. An end-of-sequence token that no file names does not exist:
        transformers'
    default of 2 for ``config.json`` is not taken over.
    Raises ArtifactError if there is none, or if it cannot be used.
    """
    settings = folder.read_json("tokenizer_config.json") or {}
    generation = folder.read_json("generation_config.json") or {}
    data = folder.read_bytes("tokenizer.json", limit=MAX_JSON_BYTES)
    if data is None:
        data = _converted(folder, settings, config, vocab_size).to_str().encode()
    tokenizer = _parsed(data, folder)
    ends = (
        *_named_id(tokenizer, settings, "eos_token", vocab_size, folder),
        *_config_ids(config, "eos_token_id", vocab_size, f"{folder.path / 'config.json'}"),
        *_config_ids(generation, "eos_token_id", vocab_size, f"{folder.path / 'generation_config.json'}"),
    )
    starts = (
        *_named_id(tokenizer, settings, "bos_token", vocab_size, folder),
        *_config_ids(config, "bos_token_id", vocab_size, f"{folder.path / 'config.json'}"),
    )
    return TokenizerAssets(
        tokenizer_json=data,
        chat_templates=templates_from_folder(folder, settings),
        bos_token_id=next(iter(starts), None),
        eos_token_id=next(iter(ends), None),
        stop_token_ids=tuple(sorted(set(ends))),
        generation=defaults_from_folder(generation, f"{folder.path / 'generation_config.json'}"),
    )


def _parsed(data: bytes, folder: ModelFolder) -> Tokenizer:
    return read_tokenizer(data, origin=str(folder.path / "tokenizer.json"))


def _converted(
    folder: ModelFolder, settings: Mapping[str, object], config: Mapping[str, object], vocab_size: int
) -> Tokenizer:
    """Build a tokenizer from a bare vocabulary and the tokens that were added to it later."""
    flags = Fields(settings, origin=str(folder.path / "tokenizer_config.json"))
    added = _added_tokens(folder, flags)
    vocabulary = read_vocabulary(folder, flags, added, config, vocab_size=vocab_size)
    if vocabulary is None:
        raise ArtifactError(
            f"{folder.path} has neither tokenizer.json nor tokenizer.model nor tekken.json, so text cannot "
            f"be encoded; {_MAKE_TOKENIZER}"
        )
    tokenizer = sentencepiece_bpe(vocabulary) if vocabulary.scores else byte_level_bpe(vocabulary)
    for token_id, token in sorted(added.items()):
        if tokenizer.id_to_token(token_id) == token.content:
            continue
        if token_id != tokenizer.get_vocab_size():
            raise ArtifactError(
                f"{folder.path}: added token {token.content!r} has id {token_id}, expected "
                f"{tokenizer.get_vocab_size()}, "
                f"the next free one; {_MAKE_TOKENIZER}"
            )
        tokenizer.add_tokens([token])
    return tokenizer


def _added_tokens(folder: ModelFolder, flags: Fields) -> dict[int, AddedToken]:
    """Return the tokens that a fine-tune added to a SentencePiece vocabulary, by id."""
    added: dict[int, AddedToken] = {}
    known = folder.read_json("added_tokens.json") or {}
    check_token_sizes(list(known), longest=MAX_TOKEN_CHARS, origin=str(folder.path / "added_tokens.json"))
    for text, token_id in known.items():
        if isinstance(token_id, bool) or not isinstance(token_id, int):
            raise ArtifactError(
                f"{folder.path / 'added_tokens.json'}: id of {text!r} is {token_id!r}, expected an integer"
            )
        added[token_id] = AddedToken(text, special=True, normalized=False)
    for key, entry in flags.mapping("added_tokens_decoder").items():
        content = entry.get("content") if isinstance(entry, Mapping) else None
        if (
            not (key.isdecimal() and len(key) < 10)
            or not isinstance(entry, Mapping)
            or not isinstance(content, str)
            or not content
        ):
            raise flags.wrong("added_tokens_decoder", "an object of ids and tokens with content")
        token_flags = {
            name: bool(entry.get(name, False))
            for name in ("special", "lstrip", "rstrip", "single_word", "normalized")
        }
        added[int(key)] = AddedToken(content, **token_flags)
    return added


def _config_ids(data: Mapping[str, object], key: str, vocab_size: int, origin: str) -> tuple[int, ...]:
    """Return the ids under ``key``: one, a list, or none."""
    value = data.get(key)
    ids = value if isinstance(value, list) else [] if value is None else [value]
    for token_id in ids:
        if isinstance(token_id, bool) or not isinstance(token_id, int) or not 0 <= token_id < vocab_size:
            raise ArtifactError(
                f"{origin}: {key} is {value!r}, expected ids from 0 to {vocab_size - 1}; correct it"
            )
    return tuple(ids)


def _named_id(
    tokenizer: Tokenizer, settings: Mapping[str, object], key: str, vocab_size: int, folder: ModelFolder
) -> tuple[int, ...]:
    """Return the id of a token that ``tokenizer_config.json`` names by its text; empty if it names none."""
    value = settings.get(key)
    text = value.get("content") if isinstance(value, Mapping) else value
    if text is None:
        return ()
    token_id = tokenizer.token_to_id(text) if isinstance(text, str) else None
    if token_id is None or token_id >= vocab_size:
        raise ArtifactError(
            f"{folder.path / 'tokenizer_config.json'}: {key} is {text!r}, expected a token of tokenizer.json "
            f"with an id below {vocab_size}; the two files belong to different models"
        )
    return (token_id,)


def _kinds(fields: Fields, count: int, origin: str) -> list[TokenKind]:
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
