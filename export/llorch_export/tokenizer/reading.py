"""What text needs besides weights: tokenizer, chat template, stop tokens and recommended sampling values.

Input is a Hugging Face folder (``gguf_tokenizer.py`` reads GGUF files); output is :class:`TokenizerAssets`, which the artifact
carries.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from tokenizers import AddedToken, Tokenizer

from llorch_export.checkpoint.base import TokenizerAssets
from llorch_export.checkpoint.folder import MAX_JSON_BYTES, ModelFolder
from llorch_export.config.fields import Fields
from llorch_export.tokenizer.chat_templates import TEMPLATE_FILE, templates_from_folder
from llorch_export.tokenizer.sampling_defaults import defaults_from_folder
from llorch_export.tokenizer.sentencepiece_model import read_sentencepiece
from llorch_export.tokenizer.vocabulary import sentencepiece_bpe
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
    TEMPLATE_FILE,
)


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
        data = _converted(folder, settings, vocab_size).to_str().encode()
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


def _converted(folder: ModelFolder, settings: Mapping[str, object], vocab_size: int) -> Tokenizer:
    """Build a tokenizer from ``tokenizer.model`` and the tokens that were added to it later."""
    path = folder.path / "tokenizer.model"
    data = folder.read_bytes("tokenizer.model", limit=MAX_JSON_BYTES)
    if data is None:
        raise ArtifactError(
            f"{folder.path} has neither tokenizer.json nor tokenizer.model, so text cannot be encoded; "
            f"{_MAKE_TOKENIZER}"
        )
    flags = Fields(settings, origin=str(folder.path / "tokenizer_config.json"))
    vocabulary = read_sentencepiece(
        data,
        add_bos=flags.boolean("add_bos_token", True),
        add_eos=flags.boolean("add_eos_token", False),
        vocab_size=vocab_size,
        origin=str(path),
    )
    tokenizer = sentencepiece_bpe(vocabulary)
    for token_id, token in sorted(_added_tokens(folder, flags).items()):
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
