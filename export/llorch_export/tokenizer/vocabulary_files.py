"""Which file of a Hugging Face folder without tokenizer.json holds its vocabulary, and how it is read."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Final

from tokenizers import AddedToken

from llorch_export.checkpoint.folder import MAX_VOCABULARY_BYTES, ModelFolder
from llorch_export.config.fields import Fields
from llorch_export.tokenizer.sentencepiece_model import read_sentencepiece
from llorch_export.tokenizer.tekken import read_tekken
from llorch_export.tokenizer.tiktoken_file import is_tiktoken, read_tiktoken
from llorch_export.tokenizer.vocabulary import Vocabulary
from llorch_serve.errors import ArtifactError

_WHOLE: Final = "tokenizer.json"
_USUAL: Final = "tokenizer.model"
# mistral-common's names: a version, and one of the pictures' encoder.
_VERSIONED: Final = re.compile(r"(tokenizer|mistral_instruct_tokenizer_[0-9]+)[.]model[.]v[0-9]+(m[0-9]+)?")
_TEKKEN: Final = re.compile(r"tekken(_[0-9]+)?[.]json")


def files_of_vocabulary(folder: ModelFolder) -> list[str]:
    """Return those of a folder's files that its vocabulary is read from."""
    return vocabulary_files(path.name for path in folder.files(_is_vocabulary))


def vocabulary_files(names: Iterable[str]) -> list[str]:
    """Return those of a folder's files that its vocabulary is read from; more than one is a mistake of its
    maker, which :func:`read_vocabulary` names.
    """
    found = sorted(filter(_is_vocabulary, names))
    if _WHOLE in found:
        return []
    return [_USUAL] if _USUAL in found else found


def read_vocabulary(
    folder: ModelFolder,
    flags: Fields,
    added: Mapping[int, AddedToken],
    config: Mapping[str, object],
    *,
    vocab_size: int,
) -> Vocabulary | None:
    """Read a folder's vocabulary; None if it has none.

    flags: content of ``tokenizer_config.json``. added: the tokens that it adds, by id. config: content of
        ``config.json``.
    Raises ArtifactError if the vocabulary is damaged or of another kind, or if there are several.
    """
    names = files_of_vocabulary(folder)
    if len(names) > 1:
        raise ArtifactError(
            f"{folder.path} has the vocabularies {', '.join(names)}, expected one; remove the others"
        )
    data = folder.read_bytes(names[0], limit=MAX_VOCABULARY_BYTES) if names else None
    if data is None:
        return None
    origin = str(folder.path / names[0])
    add_bos, add_eos = flags.boolean("add_bos_token", True), flags.boolean("add_eos_token", False)
    if _TEKKEN.fullmatch(names[0]):
        return read_tekken(data, add_bos=add_bos, add_eos=add_eos, vocab_size=vocab_size, origin=origin)
    if is_tiktoken(data):
        return read_tiktoken(
            data,
            added,
            since_3_1=_scales_like_llama_3_1(config),
            add_bos=add_bos,
            add_eos=add_eos,
            vocab_size=vocab_size,
            origin=origin,
        )
    return read_sentencepiece(data, add_bos=add_bos, add_eos=add_eos, vocab_size=vocab_size, origin=origin)


def _is_vocabulary(name: str) -> bool:
    return name in (_WHOLE, _USUAL) or bool(_VERSIONED.fullmatch(name) or _TEKKEN.fullmatch(name))


def _scales_like_llama_3_1(config: Mapping[str, object]) -> bool:
    found = config.get("rope_scaling") or config.get("rope_parameters")
    return isinstance(found, Mapping) and "llama3" in (found.get("rope_type"), found.get("type"))
