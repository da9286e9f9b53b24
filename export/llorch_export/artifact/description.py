"""What an artifact says of itself, and the files next to its graph, whoever made the graph.

Takes a checkpoint and a graph's signature; gives the manifest's common part, the fingerprint of an export,
whether an artifact is still the one that it would give, and tokenizer, template and licence files.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final, Protocol

import msgspec

from llorch_export.adapter.apply import adapter_notices
from llorch_export.artifact.write import ArtifactWriter
from llorch_export.checkpoint.base import Checkpoint
from llorch_export.checkpoint.folder import MAX_TEXT_BYTES, ModelFolder
from llorch_export.config.unread import notice_of
from llorch_export.resolved import ResolvedExport
from llorch_export.source.open import fingerprint
from llorch_export.tokenizer.chat_templates import TEMPLATE_FILE, artifact_file
from llorch_serve.artifact.folder import DEFAULT_TEMPLATE, MANIFEST_NAME, Artifact, load_artifact
from llorch_serve.artifact.manifest import (
    PLAIN_SCHEMA_VERSION,
    FileEntry,
    KvLayout,
    Manifest,
    Recipe,
    SourceInfo,
    TensorSpec,
)
from llorch_serve.artifact.signed_files import SIGNATURE_NAME
from llorch_serve.errors import ArtifactError, NewerSchemaError
from llorch_serve.files.text import writable

GRAPH_FILE: Final = "model.onnx"
TOKENIZER_FILE: Final = "tokenizer.json"
GRAPH_REVISION: Final = 5  # raised when the same source and recipe give another graph

Progress = Callable[[str, int, int], None]
"""Told (phase, bytes done since the last call, total bytes of the phase)."""


class Signature(Protocol):
    """What a graph takes and gives."""

    @property
    def inputs(self) -> tuple[TensorSpec, ...]:
        """All inputs."""

    @property
    def outputs(self) -> tuple[TensorSpec, ...]:
        """All outputs."""

    @property
    def kv(self) -> KvLayout:
        """Those of the KV cache among them."""


def export_fingerprint(source_print: str, resolved: ResolvedExport, terms: Mapping[str, bytes]) -> str:
    """Return the SHA-256 that names this export: same source, licence files, recipes, target and graph
    revision, same value.

    resolved: before anything is measured; what its rules may come to counts in place of what they do.
    """
    parts: list[object] = [
        source_print,
        resolved.recipe,
        resolved.context_length,
        GRAPH_REVISION,
        sorted(terms.items()),
    ]
    # Plain exports for the CPU keep the names that they had before there were others.
    if resolved.interop is not None:
        parts.append(resolved.interop)
    if resolved.target != "cpu":
        parts.append(resolved.target)
    if resolved.prompts is not None:
        parts.append([resolved.prompts, *resolved.prompt_choices])
    if resolved.embedding is not None:
        parts.append(resolved.embedding)
    if resolved.stages:
        parts.append(["stages", *(layers.start for layers in resolved.stages)])
    if resolved.choices:
        parts.append(["spikiest", *resolved.choices])
    return hashlib.sha256(msgspec.json.encode(parts)).hexdigest()


def source_notices(checkpoint: Checkpoint) -> tuple[str, ...]:
    """Return what a person should know of how a checkpoint was read, whoever makes the graph, a line each."""
    return (
        *notice_of(checkpoint.ignored_settings, checkpoint.code_not_run),
        *checkpoint.notices,
        *checkpoint.tokenizer.notices,
        *(() if checkpoint.embedding is None else checkpoint.embedding.notices),
        *adapter_notices(checkpoint.adapters),
    )


def up_to_date(
    output: Path, says: Mapping[str, Any], checkpoint: Checkpoint, progress: Progress
) -> Artifact | None:
    """Return the artifact at ``output`` if an export would leave the very same one; None if not, or if there
    is none.

    says: what its manifest would say, from :func:`checkpoint_fields`. checkpoint: its tokenizer and templates
        are compared too, since another llorch may have read the same files otherwise.
    Every byte is read and compared with its hash; the folder may hold nothing else but a signature. Versions
    of what made it may differ: they say what did, and do not ask to be renewed.
    Raises NewerSchemaError for one that a newer llorch made: it is not damaged, and this llorch cannot judge
    it.
    """
    try:
        manifest = load_artifact(output).manifest
        if msgspec.structs.replace(manifest, **says) != manifest:
            return None
        listed_hashes = {entry.path: entry.sha256 for entry in manifest.files}
        for name, content in _text_contents(checkpoint).items():
            if listed_hashes.get(name) != hashlib.sha256(content).hexdigest():
                return None
        files = {MANIFEST_NAME, *(entry.path for entry in manifest.files)}
        entries = list(output.iterdir())
        names = {path.name for path in entries} - {SIGNATURE_NAME}
        if names != files or any(path.is_symlink() for path in entries):
            return None
        total = sum(entry.bytes for entry in manifest.files)
        return load_artifact(
            output, verify_hashes=True, progress=lambda n: progress("checking the artifact", n, total)
        )
    except NewerSchemaError:
        raise
    except (ArtifactError, OSError):  # damaged, so it is made anew
        return None


def fingerprint_source(checkpoint: Checkpoint, progress: Progress) -> str:
    """Return the SHA-256 of a checkpoint's content, and tell ``progress`` of the reading."""
    adapted = (path for adapter in checkpoint.adapters for path in adapter.content_files)
    files = (*checkpoint.content_files, *adapted)
    total = sum(path.stat().st_size for path in files)
    return fingerprint(checkpoint, lambda n: progress("reading source", n, total))


def licences(checkpoint: Checkpoint) -> dict[str, bytes]:
    """Return the content of the licence files by name. Raises ArtifactError if one is of absurd size."""
    found = {}
    for path in checkpoint.licence_files:
        content = ModelFolder(path.parent).read_bytes(path.name, limit=MAX_TEXT_BYTES)
        if content is not None:
            found[writable(path.name)] = content
    return found


def add_text_files(writer: ArtifactWriter, checkpoint: Checkpoint, terms: Mapping[str, bytes]) -> None:
    """Write tokenizer and templates, and the files in ``terms`` by name."""
    for name, content in (*_text_contents(checkpoint).items(), *terms.items()):
        writer.add_bytes(name, content)


def _text_contents(checkpoint: Checkpoint) -> dict[str, bytes]:
    """Return tokenizer and templates by the names that they have in an artifact."""
    templates = checkpoint.tokenizer.chat_templates
    return {
        TOKENIZER_FILE: checkpoint.tokenizer.tokenizer_json,
        **{artifact_file(name): source.encode() for name, source in templates.items()},
    }


def listed(writer: ArtifactWriter) -> tuple[FileEntry, ...]:
    """Return the manifest's entries for all that was written so far."""
    return tuple(sorted(writer.entries, key=lambda entry: entry.path))


def checkpoint_fields(
    checkpoint: Checkpoint, *, context_length: int, source_print: str, export_print: str
) -> dict[str, Any]:
    """Return the fields of a manifest that are known before anything has been made."""
    text = checkpoint.tokenizer
    return {
        "model_id": checkpoint.name,
        "fingerprint": export_print,
        "model": checkpoint.config,
        "chat_template": TEMPLATE_FILE if text.chat_templates else None,
        "other_chat_templates": {
            name: artifact_file(name) for name in sorted(text.chat_templates) if name != DEFAULT_TEMPLATE
        },
        "context_length": context_length,
        "bos_token_id": text.bos_token_id,
        "eos_token_id": text.eos_token_id,
        "stop_token_ids": text.stop_token_ids,
        "template_tokens": msgspec.UNSET if text.template_tokens is None else text.template_tokens,
        "generation": text.generation,
        "source": SourceInfo(
            kind=checkpoint.kind,
            name=checkpoint.path.name,
            fingerprint=source_print,
            adapter=_adapters(checkpoint),
            repository=checkpoint.origin[0] if checkpoint.origin else msgspec.UNSET,
            revision=checkpoint.origin[1] if checkpoint.origin else msgspec.UNSET,
            hub=checkpoint.hub or msgspec.UNSET,
        ),
        "ignored_settings": checkpoint.ignored_settings or msgspec.UNSET,
        "code_not_run": checkpoint.code_not_run or msgspec.UNSET,
    }


def _adapters(checkpoint: Checkpoint) -> str | None:
    """Return what has been merged: names, each with its weight where that is not 1."""
    names = [
        adapter.name if adapter.weight == 1 else f"{adapter.name}={adapter.weight:g}"
        for adapter in checkpoint.adapters
    ]
    return " + ".join(names) or None


def base_manifest(
    fields: Mapping[str, Any],
    graph: Signature,
    recipe: Recipe,
    *,
    writer: ArtifactWriter,
    versions: Mapping[str, str],
    min_onnxruntime: str,
) -> Manifest:
    """Return the manifest of what ``writer`` has written.

    fields: from :func:`checkpoint_fields`. versions: of what made it, in addition to llorch.
    """
    return Manifest(
        **fields,
        schema_version=PLAIN_SCHEMA_VERSION,
        recipe=recipe,
        graph=GRAPH_FILE,
        tokenizer=TOKENIZER_FILE,
        inputs=graph.inputs,
        outputs=graph.outputs,
        kv=graph.kv,
        files=listed(writer),
        versions={"llorch": importlib.metadata.version("llorch"), **versions},
        min_onnxruntime=min_onnxruntime,
    )
