"""Find and open what the user points at: a GGUF file, a Hugging Face folder or a hub id.

Input is the command line's SOURCE; output is a :class:`Checkpoint`, or only its config or its files.
"""

from __future__ import annotations

import dataclasses
import hashlib
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

from llorch_export.checkpoint.base import Checkpoint, TokenizerAssets
from llorch_export.checkpoint.folder import LICENCE_FILE, ModelFolder
from llorch_export.checkpoint.ggml_types import NOT_IN_GGUF
from llorch_export.checkpoint.gguf import gguf_config, gguf_model_name, gguf_tensors
from llorch_export.checkpoint.gguf_parts import one_model, part_paths, read_parts
from llorch_export.checkpoint.safetensors import INDEX, SINGLE, folder_tensors, weight_files
from llorch_export.config.embedding import EmbedChoice
from llorch_export.config.fp8 import PACKING_FILES
from llorch_export.config.hf import ReadConfig, read_config
from llorch_export.config.packed.base import Packing
from llorch_export.config.packed.reading import read_packing_file
from llorch_export.source import hub
from llorch_export.source.pooling import (
    MODULES,
    embedding_of_folder,
    embedding_of_gguf,
    notices_of_name,
    without_modules,
)
from llorch_export.tokenizer.chat_templates import template_files
from llorch_export.tokenizer.gguf_tokenizer import tokenizer_from_gguf
from llorch_export.tokenizer.reading import FOLDER_FILES, tokenizer_from_folder
from llorch_export.tokenizer.vocabulary_files import files_of_vocabulary
from llorch_serve.artifact.links import open_real
from llorch_serve.artifact.manifest import LlamaConfig
from llorch_serve.errors import ArtifactError
from llorch_serve.files.text import writable
from llorch_serve.hub.reference import parse_reference

_CONFIG: Final = "config.json"
_ACCEPTED: Final = (
    f"expected a GGUF file, a folder with {_CONFIG} and safetensors files, or a hub id such as "
    "HuggingFaceTB/SmolLM2-135M-Instruct"
)


def open_checkpoint(source: str, embed: EmbedChoice | None = None) -> Checkpoint:
    """Read and check a checkpoint's headers; no tensor is read yet.

    source: path of a GGUF file, path of a folder with safetensors files or one GGUF file, or a hub id
        ``org/name``, ``org/name@revision`` or ``org/name:Q4_K_M``.
    embed: how it shall turn texts into vectors; None: as files beside it say, if any do.
    Raises ArtifactError if there is no such thing, or if it cannot be exported as it is.
    """
    path = _locate(source, embed, config_only=False)
    return _open_gguf(path, embed) if path.is_file() else _open_folder(ModelFolder(path), embed)


def open_config(source: str, embed: EmbedChoice | None = None) -> LlamaConfig:
    """Read only the config, from ``config.json`` or a GGUF header; the weights need not be there.

    Raises ArtifactError as :func:`open_checkpoint` does.
    """
    return open_settings(source, embed).config


def open_settings(source: str, embed: EmbedChoice | None = None) -> ReadConfig:
    """Read the config as :func:`open_config` does, with what of its file was left aside."""
    path = _locate(source, embed, config_only=True)
    if path.is_file():
        header = read_parts(path)
        found = embedding_of_gguf(header.metadata, embed, str(path))
        return ReadConfig(gguf_config(header), embedding=found)
    return _folder_config(ModelFolder(path), embed)[0]


def open_text(source: str, embed: EmbedChoice | None = None) -> TokenizerAssets | None:
    """Read only what text needs; None where the files of a tokenizer are not at hand.

    Raises ArtifactError as :func:`open_checkpoint` does.
    """
    path = _locate(source, embed, config_only=True)
    if path.is_file():
        header = read_parts(path)
        size = gguf_config(header).vocab_size
        return tokenizer_from_gguf(header.metadata, vocab_size=size, origin=str(header.path))
    folder = ModelFolder(path)
    if not files_of_vocabulary(folder) and not folder.find("tokenizer.json"):
        return None
    read, data = _folder_config(folder, embed)
    return tokenizer_from_folder(folder, data, vocab_size=read.config.vocab_size)


def list_content_files(source: str) -> tuple[Path, ...]:
    """Return :attr:`Checkpoint.content_files` without reading more than a shard index."""
    path = _locate(source, config_only=False)
    return part_paths(path) if path.is_file() else _content_files(ModelFolder(path))


def fingerprint(checkpoint: Checkpoint, progress: Callable[[int], None] | None = None) -> str:
    """Return the SHA-256 of a checkpoint's content, its adapters' included; see :func:`fingerprint_files`."""
    base = fingerprint_files(checkpoint.content_files, progress)
    if not checkpoint.adapters:
        return base
    parts = [base]
    for adapter in checkpoint.adapters:
        parts.append(fingerprint_files(adapter.content_files, progress))
        if adapter.weight != 1:
            parts.append(repr(adapter.weight))
    return hashlib.sha256(" ".join(parts).encode()).hexdigest()


def fingerprint_files(files: Sequence[Path], progress: Callable[[int], None] | None = None) -> str:
    """Return a SHA-256 in hex over names, sizes and bytes of ``files``; ``progress`` is told the bytes read.

    The name of a lone file (a GGUF) does not count: renaming it changes nothing.
    Raises ArtifactError if a file cannot be read.
    """
    digest = hashlib.sha256()
    for path in files:
        try:
            with open_real(Path(os.path.realpath(path))) as file:
                name = path.name if len(files) > 1 else ""
                digest.update(os.fsencode(name) + f"\0{os.fstat(file.fileno()).st_size}\0".encode())
                while chunk := file.read(2**22):
                    digest.update(chunk)
                    if progress is not None:
                        progress(len(chunk))
        except OSError as error:
            raise ArtifactError(f"{path} cannot be read: {error.strerror or error}") from error
    return digest.hexdigest()


def _locate(source: str, embed: EmbedChoice | None = None, *, config_only: bool) -> Path:
    """Return the GGUF file, or the Hugging Face folder, that ``source`` stands for.

    embed: what it shall be, whatever files say that may not have been fetched.
    """
    path = Path(source)
    try:
        is_file, is_folder = path.is_file(), bool(source) and path.is_dir()
    except OSError as error:  # no permission, or no possible name
        raise ArtifactError(f"{source[:200]} cannot be opened: {error.strerror}; {_ACCEPTED}") from error
    if is_file:
        if path.suffix == ".safetensors":
            raise ArtifactError(
                f"{path} is one file of a model; give the folder that holds it together with {_CONFIG}"
            )
        return path
    if is_folder:
        return _in_folder(ModelFolder(path), config_only=config_only)
    reference = parse_reference(source)
    if reference is None:
        raise ArtifactError(f"{source[:200]!r} does not exist; {_ACCEPTED}")
    found = hub.fetch_model(
        reference,
        config_only=config_only,
        is_complete=lambda folder: _is_complete(folder, embed, config_only=config_only),
    )
    return found if found.is_file() else _in_folder(ModelFolder(found), config_only=config_only)


def _in_folder(folder: ModelFolder, *, config_only: bool) -> Path:
    """Return the folder itself if it is a Hugging Face model, else the one GGUF file in it."""
    if folder.find(INDEX) or folder.find(SINGLE):
        return folder.path
    found = folder.files(_is_gguf)
    if (only := one_model(found)) is not None:
        return only
    if config_only and folder.find(_CONFIG):
        return folder.path
    if found:
        raise ArtifactError(
            f"{folder.path} holds {len(found)} GGUF files ({', '.join(p.name for p in found[:8])}); give "
            f"the path of one of them"
        )
    weight_files(folder)  # says what is missing, and what to do
    return folder.path


def _is_complete(path: Path, embed: EmbedChoice | None, *, config_only: bool) -> bool:
    """Tell whether a cached snapshot is a whole folder of a model: a partial download is no reason to fail,
    but to fetch. A GGUF file does not count, for the repository may hold others that were not fetched.
    """
    folder = ModelFolder(path)
    try:
        found = _in_folder(folder, config_only=config_only)
        if found.is_file() or (embed is None and without_modules(folder)):
            return False
        if not config_only:
            weight_files(folder)
            if not (folder.find("tokenizer.json") or folder.find("tokenizer.model")):
                return False
        return folder.find(_CONFIG) is not None
    except ArtifactError:
        return False


def _open_gguf(path: Path, embed: EmbedChoice | None) -> Checkpoint:
    header = read_parts(path)
    path, parts = header.path, part_paths(path)
    config = gguf_config(header)
    tensors = gguf_tensors(header, config)
    # Licence files next to a GGUF file are its own only where it is the only model in its folder.
    folder = ModelFolder(path.parent, whole=hub.snapshot_of(path.absolute()))
    alone = one_model(folder.entries(_is_gguf)) is not None
    return Checkpoint(
        kind="gguf",
        path=path,
        name=gguf_model_name(path),
        config=config,
        tensors=tensors,
        tokenizer=tokenizer_from_gguf(header.metadata, vocab_size=config.vocab_size, origin=str(path)),
        content_files=parts,
        licence_files=_licence_files(folder) if alone else (),
        only_read_here=len(parts) > 1 or any(tensor.dtype in NOT_IN_GGUF for tensor in tensors.values()),
        origin=hub.origin_of(path),
        hub=hub.hub_of(path),
        embedding=embedding_of_gguf(header.metadata, embed, str(path)),
    )


def _open_folder(folder: ModelFolder, embed: EmbedChoice | None) -> Checkpoint:
    read, data = _folder_config(folder, embed)
    config = read.config
    found = folder_tensors(folder, config, read.packing, headless=read.embedding is not None)
    name = _folder_name(folder.path)
    by_name = () if folder.find(MODULES) else notices_of_name(name, read.embedding, embed)
    return Checkpoint(
        kind="safetensors",
        path=folder.path,
        name=name,
        config=config,
        tensors=found.tensors,
        tokenizer=tokenizer_from_folder(folder, data, vocab_size=config.vocab_size),
        content_files=_content_files(folder),
        licence_files=_licence_files(folder),
        notices=(*found.notices, *by_name),
        only_read_here=found.renamed or isinstance(read.packing, Packing),
        ignored_settings=read.ignored_settings,
        code_not_run=read.code_not_run,
        origin=hub.origin_of(folder.path),
        hub=hub.hub_of(folder.path),
        embedding=read.embedding,
    )


def _folder_config(folder: ModelFolder, embed: EmbedChoice | None) -> tuple[ReadConfig, dict[str, object]]:
    data = folder.read_json(_CONFIG)
    if data is None:
        raise ArtifactError(f"{folder.path} has no {_CONFIG}; expected a complete Hugging Face model folder")
    embedding = embedding_of_folder(folder, embed)
    read = read_config(data, origin=str(folder.path / _CONFIG), headless=embedding is not None)
    read = dataclasses.replace(read, embedding=embedding)
    for name in PACKING_FILES if data.get("quantization_config") is None else ():
        packing = folder.read_json(name)
        if packing is not None:
            found = read_packing_file(packing, name=name, origin=str(folder.path / name))
            return dataclasses.replace(read, packing=found), data
    return read, data


def _content_files(folder: ModelFolder) -> tuple[Path, ...]:
    names = dict.fromkeys((_CONFIG, INDEX, *PACKING_FILES, *FOLDER_FILES, *files_of_vocabulary(folder)))
    small = (folder.find(name) for name in names)
    return (*(path for path in small if path is not None), *template_files(folder), *weight_files(folder))


def _licence_files(folder: ModelFolder) -> tuple[Path, ...]:
    return folder.files(LICENCE_FILE.match)


def _is_gguf(name: str) -> bool:
    return name.endswith(".gguf")


def _folder_name(path: Path) -> str:
    """Return the folder's name; for a snapshot in the hub's cache, which is named by a hash, the
    repository's.
    """
    resolved = path.resolve()
    origin = hub.origin_of(resolved)
    return writable(resolved.name) if origin is None else origin[0].rsplit("/", 1)[-1]
