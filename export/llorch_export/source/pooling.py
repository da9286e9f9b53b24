"""How a checkpoint turns texts into vectors: as its user says, or as the files of sentence-transformers in
its folder do.

Input is a folder that a stranger may have filled, or the metadata of a GGUF file; output is an
:class:`Embedding`, or None for a language model.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final

from llorch_export.checkpoint.folder import ModelFolder
from llorch_export.config.embedding import EmbedChoice, Embedding
from llorch_export.config.fields import quoted
from llorch_serve.artifact.manifest import EmbeddingForm, Pooling
from llorch_serve.errors import ArtifactError

MODULES: Final = "modules.json"
LENGTH: Final = "sentence_bert_config.json"
PROMPTS: Final = "config_sentence_transformers.json"
SENTENCE_FILES: Final = (MODULES, LENGTH, PROMPTS)
"""Files beside config.json that are read here; the pooling's own lies in a folder that the first names."""

_POOLING_FOLDER: Final = re.compile(r"\d+_Pooling")
_SAYS_SO: Final = re.compile(r"embed", re.IGNORECASE)
_MAX_MODULES: Final = 16
_MAX_SHOWN: Final = 8
_POOLINGS: Final[Mapping[str, Pooling]] = {"lasttoken": "last", "mean": "mean"}
_FLAGS: Final[Mapping[str, str]] = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}
"""How files before sentence-transformers 6 say it, by the name that it has since then."""

_GGUF_POOLINGS: Final[Mapping[int, Pooling | None]] = {0: None, 1: "mean", 3: "last"}
"""llama.cpp's numbers. 0 is a language model's; 2 takes the first token, 4 is for ranking by a head."""

_INSTEAD: Final = "use --embed last or --embed mean for pooled hidden states alone, or --embed none for none"


def embedding_of_folder(folder: ModelFolder, choice: EmbedChoice | None) -> Embedding | None:
    """Return how a folder's model embeds texts; None if it is a language model.

    choice: None: as the folder's modules say. Raises ArtifactError for modules that are not supported.
    """
    if choice == "none":
        return None
    data = folder.read_value(MODULES)
    modules = None if data is None else _modules(data, folder)
    if choice is not None:
        own = () if modules is None else tuple(kind for kind, _ in modules)
        aside = f"{folder.path / MODULES} ({', '.join(own)}) is left aside for --embed {choice}"
        return Embedding(EmbeddingForm(pooling=choice), notices=(aside,) if own else ())
    if modules is None and (files := without_modules(folder)):
        raise ArtifactError(
            f"{folder.path} has {' and '.join(files)} of a model that embeds texts, and no {MODULES}, which "
            f"says how; fetch it too, or {_INSTEAD}"
        )
    if modules is None or not any(kind == "Pooling" for kind, _ in modules):
        return None
    kinds = [kind for kind, _ in modules]
    if kinds not in (["Transformer", "Pooling"], ["Transformer", "Pooling", "Normalize"]):
        raise ArtifactError(
            f"{folder.path / MODULES} lists {', '.join(kinds)}; expected Transformer and Pooling, with or "
            f"without Normalize behind them; {_INSTEAD}"
        )
    pooling = _pooling(folder, modules[1][1])
    length = _length(folder)
    form = EmbeddingForm(pooling=pooling, normalised="Normalize" in kinds)
    return Embedding(form, length, _said_of_prompts(folder))


def without_modules(folder: ModelFolder) -> tuple[str, ...]:
    """Return what sentence-transformers has left in a folder that lacks its list of modules; nothing where
    the list is there. Raises ArtifactError if the folder cannot be read.
    """
    if folder.find(MODULES):
        return ()
    found = folder.entries(lambda name: name in (LENGTH, PROMPTS) or _POOLING_FOLDER.fullmatch(name))
    return tuple(path.name for path in found)


def notices_of_name(name: str, embedding: Embedding | None, choice: EmbedChoice | None) -> tuple[str, ...]:
    """Return what to say where only its name tells that a model may be one that embeds texts."""
    if embedding is not None or choice is not None or not _SAYS_SO.search(name):
        return ()
    return (
        f"{name} has no {MODULES} beside it and becomes a language model; if it embeds texts, fetch that "
        f"file too, or use --embed last or --embed mean (--embed none says that it does not)",
    )


def embedding_of_gguf(
    metadata: Mapping[str, object], choice: EmbedChoice | None, origin: str
) -> Embedding | None:
    """Return how a GGUF file's model embeds texts; None if it is a language model. Raises ArtifactError."""
    if choice == "none":
        return None
    if choice is not None:
        return Embedding(EmbeddingForm(pooling=choice))
    key = f"{metadata.get('general.architecture')}.pooling_type"
    found = metadata.get(key, 0)
    if not isinstance(found, int) or found not in _GGUF_POOLINGS:
        raise ArtifactError(
            f"{origin}: {key} is {quoted(found)}, expected 1 (mean) or 3 (last token); {_INSTEAD}"
        )
    pooling = _GGUF_POOLINGS[found]
    return None if pooling is None else Embedding(EmbeddingForm(pooling=pooling))


def _modules(data: object, folder: ModelFolder) -> list[tuple[str, str]]:
    """Return the kind and the folder of each module, in their order."""
    entries = data if isinstance(data, list) else []
    found = [
        (entry["type"].rsplit(".", 1)[-1][:100], entry["path"])
        for entry in entries[: _MAX_MODULES + 1]
        if isinstance(entry, dict)
        and isinstance(entry.get("type"), str)
        and isinstance(entry.get("path"), str)
    ]
    if not found or len(found) > _MAX_MODULES or len(found) != len(entries):
        raise ArtifactError(
            f"{folder.path / MODULES} is no list of up to {_MAX_MODULES} modules, each with type and path; "
            f"fetch it again, or {_INSTEAD}"
        )
    return found


def _pooling(folder: ModelFolder, path: str) -> Pooling:
    """Return what the pooling's own file says."""
    if not path or path in (".", "..") or "/" in path or "\\" in path or "\0" in path:
        raise ArtifactError(
            f"{folder.path / MODULES} has its pooling in {quoted(path)}, expected a folder's plain name; "
            "fetch it again"
        )
    inside = ModelFolder(folder.path / path, whole=folder.whole or folder.path)
    settings = inside.read_value("config.json")
    where = folder.path / path / "config.json"
    if not isinstance(settings, dict):
        raise ArtifactError(f"{where} is missing or no JSON object, and says how states are pooled; fetch it")
    mode = settings.get("pooling_mode")
    stated = [mode] if mode is not None else [name for key, name in _FLAGS.items() if settings.get(key)]
    known = [_POOLINGS[name] for name in stated if isinstance(name, str) and name in _POOLINGS]
    if len(stated) != 1 or not known:
        found = " and ".join(str(name)[:100] for name in stated) or "nothing"
        raise ArtifactError(
            f"{where} pools by {found}, expected one of {' and '.join(_POOLINGS)}; {_INSTEAD}"
        )
    if settings.get("include_prompt", True) is not True and known[0] == "mean":
        raise ArtifactError(
            f"{where} leaves a prompt's tokens out of the mean (include_prompt), which is not supported; "
            f"{_INSTEAD}"
        )
    return known[0]


def _length(folder: ModelFolder) -> int | None:
    """Return the most tokens of a text."""
    settings = folder.read_value(LENGTH)
    if not isinstance(settings, dict):
        return None
    if settings.get("do_lower_case"):
        raise ArtifactError(
            f"{folder.path / LENGTH} has texts in lower case (do_lower_case), which is not supported; "
            f"{_INSTEAD}"
        )
    length = settings.get("max_seq_length")
    if length is None:
        return None
    if isinstance(length, bool) or not isinstance(length, int) or not 2 <= length < 2**31:
        raise ArtifactError(
            f"{folder.path / LENGTH}: max_seq_length is {quoted(length)}, expected a number of tokens; "
            "correct it"
        )
    return length


def _said_of_prompts(folder: ModelFolder) -> tuple[str, ...]:
    settings = folder.read_value(PROMPTS)
    prompts = settings.get("prompts") if isinstance(settings, dict) else None
    if not isinstance(prompts, dict):
        return ()
    texts = {name: text for name, text in prompts.items() if isinstance(text, str) and text}
    if not texts:
        return ()
    shown = ", ".join(f"{name[:50]}: {text[:100]!r}" for name, text in list(texts.items())[:_MAX_SHOWN])
    return (
        "this model was trained with prompts before its texts, which whoever asks must send with them "
        f"({shown})",
    )
