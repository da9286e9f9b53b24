"""The tokenizer and chat template that an adapter brings along.

Trainers save them beside the adapter, mostly as copies of the base model's. They are used where they differ
and fit; where they cannot be used, a notice says why, and the base model's stay.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path

from llorch_export.checkpoint.base import Adapter, TokenizerAssets
from llorch_export.checkpoint.folder import ModelFolder
from llorch_export.tokenizer.chat_templates import template_files, templates_from_folder
from llorch_export.tokenizer.named_tokens import seen_by_templates
from llorch_export.tokenizer.reading import FOLDER_FILES, tokenizer_from_folder
from llorch_export.tokenizer.vocabulary_files import files_of_vocabulary
from llorch_serve.errors import ArtifactError
from llorch_serve.text.tokenizer_library import read_tokenizer

_TOKENIZERS = ("tokenizer.json", "tokenizer.model")
_SETTINGS = "tokenizer_config.json"


def adapted_text(
    base: TokenizerAssets, adapters: Sequence[Adapter], vocab_size: int
) -> tuple[TokenizerAssets, tuple[Adapter, ...]]:
    """Return what text needs, from the first adapter that has something of its own, and the adapters with the
    files that were read and with notices.

    vocab_size: rows of the adapted model's embedding.
    """
    found, result, user = base, [], None
    for adapter in adapters:
        try:
            own, what = _own(base, ModelFolder(adapter.path), vocab_size)
        except ArtifactError as error:
            result.append(_noted(adapter, f"its tokenizer and chat template are not used: {error}"))
            continue
        if not what:
            result.append(adapter)
        elif user is not None and own != found:
            result.append(_noted(adapter, f"its {what} is not used, because that of {user} is"))
        else:
            found, user = own, adapter.name
            files = (*adapter.content_files, *_text_files(ModelFolder(adapter.path)))
            result.append(
                _noted(dataclasses.replace(adapter, content_files=files), f"its own {what} is used")
            )
    return found, tuple(result)


def check_covered(text: TokenizerAssets, vocab_size: int, source: Path) -> None:
    """Raise ArtifactError if a vocabulary that was made smaller has no row for a token."""
    ids = read_tokenizer(text.tokenizer_json, origin=f"the tokenizer of {source}").get_vocab().values()
    highest = max((*ids, *text.stop_token_ids), default=0)
    if highest >= vocab_size:
        raise ArtifactError(
            f"the adapter leaves {vocab_size} rows of the embedding, and the tokenizer of {source} has token "
            f"{highest}; put the tokenizer that it was trained with into the adapter's folder"
        )


def _noted(adapter: Adapter, notice: str) -> Adapter:
    return dataclasses.replace(adapter, notices=(*adapter.notices, notice))


def _own(base: TokenizerAssets, folder: ModelFolder, vocab_size: int) -> tuple[TokenizerAssets, str]:
    """Return what text needs with an adapter, and what of it is the adapter's own; empty if nothing is.

    Raises ArtifactError if it has something that cannot be used.
    """
    own, what = base, []
    templates = templates_from_folder(folder, folder.read_json(_SETTINGS) or {}) or base.chat_templates
    if any(folder.find(name) for name in _TOKENIZERS):
        read = tokenizer_from_folder(folder, {}, vocab_size=vocab_size)
        _check_fits(base, read, folder, vocab_size)
        stops = tuple(sorted({*base.stop_token_ids, *read.stop_token_ids}))
        own = dataclasses.replace(
            base,
            tokenizer_json=read.tokenizer_json,
            bos_token_id=base.bos_token_id if read.bos_token_id is None else read.bos_token_id,
            eos_token_id=base.eos_token_id if read.eos_token_id is None else read.eos_token_id,
            stop_token_ids=stops,
            named_tokens=read.named_tokens,
        )
        if not (_same_text(base, own, folder) and _seen(own, templates) == _seen(base, templates)):
            what.append("tokenizer")
        else:
            own = base
    if templates != base.chat_templates:
        what.append("chat template")
    if not what:
        return base, ""
    own = dataclasses.replace(own, chat_templates=templates, template_tokens=_seen(own, templates))
    return own, " and ".join(what)


def _seen(text: TokenizerAssets, templates: Mapping[str, str]) -> dict[str, str] | None:
    """Return what templates see of a tokenizer's named tokens; None if it is what the ids say."""
    tokenizer = read_tokenizer(text.tokenizer_json, origin="the tokenizer")
    agree = [
        (token := text.named_tokens.get(role)) is not None and tokenizer.token_to_id(token) == token_id
        for role, token_id in (("bos_token", text.bos_token_id), ("eos_token", text.eos_token_id))
    ]
    return seen_by_templates(templates.values(), text.named_tokens, starts=agree[0], ends=agree[1])


def _same_text(base: TokenizerAssets, own: TokenizerAssets, folder: ModelFolder) -> bool:
    """Tell whether two tokenizers encode alike and end alike, as far as their files say."""
    if own == base:
        return True
    origin = str(folder.path)
    left, right = (read_tokenizer(text.tokenizer_json, origin=origin).to_str() for text in (base, own))
    own = dataclasses.replace(own, tokenizer_json=base.tokenizer_json, named_tokens=base.named_tokens)
    return left == right and own == base


def _check_fits(base: TokenizerAssets, own: TokenizerAssets, folder: ModelFolder, vocab_size: int) -> None:
    """Raise ArtifactError if the tokenizer's ids are not those that the model was trained on."""
    origin = str(folder.path / "tokenizer.json")
    theirs = read_tokenizer(own.tokenizer_json, origin=origin).get_vocab()
    highest = max(theirs.values(), default=0)
    if highest >= vocab_size:
        raise ArtifactError(
            f"{origin} has token {highest}, expected ids below {vocab_size}, the rows of the embedding; save "
            f"the adapter with its embedding (save_embedding_layers=True)"
        )
    ours = read_tokenizer(base.tokenizer_json, origin=origin).get_vocab()
    tokens = {number: token for token, number in ours.items()}
    moved = [
        f"{token!r} as {number}"
        for token, number in theirs.items()
        if number in tokens and tokens[number] != token and token in ours
    ]
    if moved:
        raise ArtifactError(
            f"{origin} has {len(moved)} tokens under other ids than the base model, {', '.join(moved[:3])} "
            f"among them; it belongs to another model"
        )


def _text_files(folder: ModelFolder) -> tuple[Path, ...]:
    names = dict.fromkeys((*FOLDER_FILES, *files_of_vocabulary(folder)))
    found = (folder.find(name) for name in names)
    return (*(path for path in found if path is not None), *template_files(folder))
