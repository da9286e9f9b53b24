"""What text needs besides weights: tokenizer, chat template, stop tokens and recommended sampling values.

Input is a Hugging Face folder (``gguf_tokenizer.py`` reads GGUF files); output is :class:`TokenizerAssets`,
which the artifact carries.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from tokenizers import AddedToken, Tokenizer

from llorch_export.checkpoint.base import TokenizerAssets
from llorch_export.checkpoint.folder import MAX_VOCABULARY_BYTES, ModelFolder
from llorch_export.config.fields import Fields, quoted
from llorch_export.tokenizer.added_tokens import DECODER, OlderFiles, decoder_tokens, with_added_tokens
from llorch_export.tokenizer.bpe import byte_level_bpe, sentencepiece_bpe
from llorch_export.tokenizer.chat_templates import PROCESSOR_FILES, TEMPLATE_FILE, templates_from_folder
from llorch_export.tokenizer.class_rules import class_notices
from llorch_export.tokenizer.end_tokens import ends_in_templates
from llorch_export.tokenizer.llama_rules import LLAMA, effective_class, with_llama_rules
from llorch_export.tokenizer.named_tokens import (
    SPECIAL_TOKENS_MAP,
    named_tokens,
    seen_by_templates,
    tokenizer_class,
)
from llorch_export.tokenizer.notices import tokenizer_notices
from llorch_export.tokenizer.sampling_defaults import defaults_from_folder
from llorch_export.tokenizer.vocabulary_files import read_vocabulary
from llorch_serve.errors import ArtifactError
from llorch_serve.text.tokenizer_library import MAX_TOKEN_CHARS, check_token_sizes, read_tokenizer

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
    SPECIAL_TOKENS_MAP,
    TEMPLATE_FILE,
    *PROCESSOR_FILES,
)


def tokenizer_from_folder(
    folder: ModelFolder, config: Mapping[str, object], *, vocab_size: int
) -> TokenizerAssets:
    """Read the tokenizer of a Hugging Face folder.

    config: content of its ``config.json``. An end-of-sequence token that no file names does not exist:
        transformers' default of 2 for ``config.json`` is not taken over.
    Raises ArtifactError if there is none, or if it cannot be used.
    """
    settings = folder.read_json("tokenizer_config.json") or {}
    generation = folder.read_json("generation_config.json") or {}
    whole = data = folder.read_bytes("tokenizer.json", limit=MAX_VOCABULARY_BYTES)
    if data is None:
        data = _converted(folder, settings, config, vocab_size).to_str().encode()
    name = effective_class(tokenizer_class(settings, config), str(config.get("model_type")), data)
    # A folder that asks for code of its own has transformers take its tokenizer.json as it is.
    if name == LLAMA and not settings.get("trust_remote_code"):
        data = with_llama_rules(data, settings, origin=str(folder.path / "tokenizer_config.json"))
    tokenizer = _parsed(data, folder)
    named = named_tokens(folder, settings, name)
    own_rules = class_notices(whole, tokenizer, name, settings, named) if whole else ()
    data = with_added_tokens(
        data,
        tokenizer,
        settings,
        named,
        older=_older_files(folder, settings, whole=whole is not None),
        origin=str(folder.path / "tokenizer_config.json"),
    )
    templates = templates_from_folder(folder, settings)
    turn_ends = ends_in_templates(_special_ids(tokenizer), templates.values())
    eos = _named_id(tokenizer, named, settings, "eos_token", vocab_size, folder)
    bos = _named_id(tokenizer, named, settings, "bos_token", vocab_size, folder)
    ends = (
        *eos,
        *_config_ids(config, "eos_token_id", vocab_size, f"{folder.path / 'config.json'}"),
        *_config_ids(generation, "eos_token_id", vocab_size, f"{folder.path / 'generation_config.json'}"),
        *(token_id for token_id in turn_ends.values() if token_id < vocab_size),
    )
    starts = (*bos, *_config_ids(config, "bos_token_id", vocab_size, f"{folder.path / 'config.json'}"))
    return TokenizerAssets(
        tokenizer_json=data,
        chat_templates=templates,
        bos_token_id=next(iter(starts), None),
        eos_token_id=next(iter(ends), None),
        stop_token_ids=tuple(sorted(set(ends))),
        generation=defaults_from_folder(generation, f"{folder.path / 'generation_config.json'}"),
        template_tokens=seen_by_templates(templates.values(), named, starts=bool(bos), ends=bool(eos)),
        named_tokens=named,
        notices=(*tokenizer_notices(tokenizer, settings, bos, eos, vocab_size), *own_rules),
    )


def _older_files(folder: ModelFolder, settings: Mapping[str, object], *, whole: bool) -> OlderFiles:
    """Return what older files say of tokens. whole: there is a tokenizer.json; else all is added."""
    if DECODER in settings:
        return OlderFiles()
    return OlderFiles(
        special=folder.read_json(SPECIAL_TOKENS_MAP) or {},
        added=(folder.read_json("added_tokens.json") or {}) if whole else {},
    )


def _special_ids(tokenizer: Tokenizer) -> dict[str, int]:
    added = tokenizer.get_added_tokens_decoder()
    return {token.content: token_id for token_id, token in added.items() if token.special}


def _parsed(data: bytes, folder: ModelFolder) -> Tokenizer:
    return read_tokenizer(data, origin=str(folder.path / "tokenizer.json"))


def _converted(
    folder: ModelFolder, settings: Mapping[str, object], config: Mapping[str, object], vocab_size: int
) -> Tokenizer:
    """Build a tokenizer from a bare vocabulary and the tokens that were added to it later."""
    flags = Fields(settings, origin=str(folder.path / "tokenizer_config.json"))
    added = _added_tokens(folder, settings)
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
                f"{tokenizer.get_vocab_size()}, the next free one; {_MAKE_TOKENIZER}"
            )
        tokenizer.add_tokens([token])
    return tokenizer


def _added_tokens(folder: ModelFolder, settings: Mapping[str, object]) -> dict[int, AddedToken]:
    """Return the tokens that a fine-tune added to a SentencePiece vocabulary, by id."""
    added: dict[int, AddedToken] = {}
    known = folder.read_json("added_tokens.json") or {}
    check_token_sizes(list(known), longest=MAX_TOKEN_CHARS, origin=str(folder.path / "added_tokens.json"))
    for text, token_id in known.items():
        if isinstance(token_id, bool) or not isinstance(token_id, int):
            raise ArtifactError(
                f"{folder.path / 'added_tokens.json'}: id of {text[:80]!r} is {quoted(token_id)}, "
                "expected an integer"
            )
        added[token_id] = AddedToken(text, special=True, normalized=False)
    return added | decoder_tokens(settings, origin=str(folder.path / "tokenizer_config.json"))


def _config_ids(data: Mapping[str, object], key: str, vocab_size: int, origin: str) -> tuple[int, ...]:
    """Return the ids under ``key``: one, a list, or none."""
    value = data.get(key)
    ids = value if isinstance(value, list) else [] if value is None else [value]
    for token_id in ids:
        if isinstance(token_id, bool) or not isinstance(token_id, int) or not 0 <= token_id < vocab_size:
            raise ArtifactError(
                f"{origin}: {key} is {quoted(value)}, expected ids from 0 to {vocab_size - 1}; correct it"
            )
    return tuple(ids)


def _named_id(
    tokenizer: Tokenizer,
    named: Mapping[str, str],
    settings: Mapping[str, object],
    role: str,
    vocab_size: int,
    folder: ModelFolder,
) -> tuple[int, ...]:
    """Return the id of a role's token. Empty if the role has none, its text is empty, or a class gives it a
    text that this vocabulary lacks.
    """
    text = named.get(role)
    if not text:
        return ()
    token_id = tokenizer.token_to_id(text)
    if token_id is None and role not in settings:
        return ()
    if token_id is None or token_id >= vocab_size:
        raise ArtifactError(
            f"{folder.path / 'tokenizer_config.json'}: {role} is {text!r}, expected a token of "
            f"tokenizer.json with an id below {vocab_size}; the two files belong to different models"
        )
    return (token_id,)
