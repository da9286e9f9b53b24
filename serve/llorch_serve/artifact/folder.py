"""The artifact folder: all that passes from the exporter to the worker.

:func:`load_artifact` reads the manifest and checks that every listed file is inside the folder and has its
listed size, so that a worker never starts on half an artifact.
"""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Final

import msgspec

from llorch_serve.artifact.kinds import ModelKind
from llorch_serve.artifact.links import open_inside, real_file
from llorch_serve.artifact.manifest import FileEntry, Manifest, decode_manifest
from llorch_serve.errors import ArtifactError

MANIFEST_NAME: Final = "llorch.json"
DEFAULT_TEMPLATE: Final = "default"
MAX_MANIFEST_BYTES: Final = 16 * 2**20


class Artifact(msgspec.Struct, frozen=True):
    """A manifest and the folder it was read from."""

    folder: Path
    manifest: Manifest

    @property
    def kind(self) -> ModelKind:
        """Who made the graph."""
        return ModelKind.OPTIMUM if self.manifest.layout == "optimum" else ModelKind.LLORCH

    @property
    def graph_path(self) -> Path:
        """Path of the ONNX model."""
        return self.folder / self.manifest.graph

    @property
    def prompt_graph_path(self) -> Path:
        """Path of the ONNX model that takes a prompt; :attr:`graph_path` unless shapes are fixed."""
        fixed = self.manifest.fixed_shapes
        return self.graph_path if fixed is None else self.folder / fixed.prefill_graph

    @property
    def tokenizer_path(self) -> Path:
        """Path of tokenizer.json."""
        return self.folder / self.manifest.tokenizer

    def chat_templates(self) -> dict[str, str]:
        """Return the sources of the chat templates by name, ``default`` first. Raises ArtifactError."""
        if self.manifest.chat_template is None:
            return {}
        files = {DEFAULT_TEMPLATE: self.manifest.chat_template, **self.manifest.other_chat_templates}
        return {name: self._text(file) for name, file in files.items()}

    def _text(self, name: str) -> str:
        path = self.folder / name
        try:
            with open_inside(path, self.folder) as file:
                return file.read().decode("utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ArtifactError(
                f"{path} cannot be read as UTF-8 text ({error}); export the model again"
            ) from error


def is_artifact(path: Path) -> bool:
    """Tell whether ``path`` is a folder that holds a manifest."""
    try:
        return (path / MANIFEST_NAME).is_file()
    except OSError:  # a name that is too long for the file system
        return False


def load_artifact(
    folder: Path,
    *,
    progress: Callable[[int], None] | None = None,
    verify_hashes: bool = False,
    needed: Callable[[Manifest], Iterable[FileEntry]] = lambda manifest: manifest.files,
) -> Artifact:
    """Read and check an artifact.

    verify_hashes: also read every file and compare its SHA-256; ``progress`` is told the bytes read.
    needed: returns the files that must be there; those that it leaves out are not looked at.
    Raises ArtifactError if the folder holds no artifact, or one that is damaged, incomplete or unsafe.
    """
    path = folder / MANIFEST_NAME
    if not folder.is_dir():
        raise ArtifactError(f"{folder} is not a folder; expected one made by llorch export")
    if not path.is_file():
        raise ArtifactError(
            f"{folder} holds no {MANIFEST_NAME}; make an artifact with: llorch export SOURCE --output DIR"
        )
    manifest = decode_manifest(_read_manifest(path), origin=str(path))
    listed = {entry.path: entry for entry in manifest.files}
    fixed = manifest.fixed_shapes
    int8, prompts = manifest.int8_cache, manifest.prompts
    optional = {
        manifest.chat_template,
        *manifest.other_chat_templates.values(),
        *((fixed.prefill_graph,) if fixed else ()),
        *((int8.decode_graph, int8.scales) if int8 else ()),
        *((prompts.graph, prompts.data) if prompts else ()),
        *(name for stage in manifest.stages or () for name in stage.files),
    } - {None}
    required = {manifest.graph, manifest.tokenizer} | optional
    for name in sorted(str(r) for r in required if r not in listed):
        raise ArtifactError(f"{path} names {name} but does not list it under files; export the model again")
    entries = tuple(needed(manifest))
    for entry in entries:
        _check_file(folder, entry)
    if verify_hashes:
        for entry in entries:
            _check_hash(folder, entry, progress)
    return Artifact(folder=folder, manifest=manifest)


def _read_manifest(path: Path) -> bytes:
    try:
        with open_inside(path, path.parent) as file:
            data = file.read(MAX_MANIFEST_BYTES + 1)
    except OSError as error:
        raise ArtifactError(f"{path} cannot be read: {error.strerror or error}") from error
    if len(data) > MAX_MANIFEST_BYTES:
        raise ArtifactError(f"{path} has more than {MAX_MANIFEST_BYTES} bytes, which no manifest needs")
    return data


def _check_file(folder: Path, entry: FileEntry) -> None:
    path = folder / entry.path
    try:
        if Path(entry.path).is_absolute() or ".." in Path(entry.path).parts:
            raise ArtifactError(
                f"{folder / MANIFEST_NAME} lists {entry.path!r}, which is outside the artifact's folder"
            )
        size = _file_size(real_file(path, folder))
    except (OSError, ValueError, RuntimeError) as error:  # a loop of links, a NUL, a name that is too long
        raise ArtifactError(
            f"{folder / MANIFEST_NAME} lists {entry.path[:100]!r}, which is not a usable file name "
            f"({type(error).__name__}); export the model again"
        ) from error
    if size is None:
        found = "leads to no file" if os.path.lexists(path) else "is missing"
        raise ArtifactError(f"{path} {found}; export the model again, or copy the whole folder")
    if size != entry.bytes:
        raise ArtifactError(
            f"{path} has {size} bytes where the manifest says {entry.bytes}; it is damaged, copy it again"
        )


def _file_size(path: Path) -> int | None:
    """Return a regular file's size in bytes; None if there is none. Raises OSError for an impossible path."""
    try:
        info = path.stat()
    except FileNotFoundError:
        return None
    return info.st_size if stat.S_ISREG(info.st_mode) else None


def _check_hash(folder: Path, entry: FileEntry, progress: Callable[[int], None] | None) -> None:
    path, digest = folder / entry.path, hashlib.sha256()
    with open_inside(path, folder) as file:
        while chunk := file.read(2**22):
            digest.update(chunk)
            if progress is not None:
                progress(len(chunk))
    if digest.hexdigest() != entry.sha256:
        raise ArtifactError(
            f"{path} has SHA-256 {digest.hexdigest()} where the manifest says {entry.sha256}; copy it again"
        )
