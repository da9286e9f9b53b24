"""The chat templates of a checkpoint by name: ``default``, and others such as ``tool_use`` and ``rag`` where
it has them.

Input is GGUF metadata or a Hugging Face folder; the artifact carries the sources in files of their own.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from llorch_export.checkpoint.folder import MAX_TEXT_BYTES, ModelFolder
from llorch_export.config.fields import quoted
from llorch_serve.artifact.folder import DEFAULT_TEMPLATE
from llorch_serve.chat.template import ChatTemplate
from llorch_serve.errors import ArtifactError

TEMPLATE_FILE: Final = "chat_template.jinja"
# Where transformers keeps all but the default, one file each.
TEMPLATE_FOLDER: Final = "additional_chat_templates"
# Where processors of models with images keep a template, for folders whose tokenizer has none.
PROCESSOR_FILES: Final = ("chat_template.json", "processor_config.json")
MAX_TEMPLATES: Final = 16
_NAME: Final = re.compile(r"[A-Za-z0-9_-]{1,64}")


def templates_from_gguf(metadata: Mapping[str, object], *, origin: str) -> dict[str, str]:
    """Return the templates under ``tokenizer.chat_template`` and ``tokenizer.chat_template.NAME``. Raises
    ArtifactError.
    """
    key = "tokenizer.chat_template"
    found = {DEFAULT_TEMPLATE: metadata.get(key)}
    found |= {
        name.removeprefix(f"{key}."): text for name, text in metadata.items() if name.startswith(f"{key}.")
    }
    return _checked(found, f"{origin}: {key}")


def templates_from_folder(folder: ModelFolder, settings: Mapping[str, object]) -> dict[str, str]:
    """Return the templates of ``tokenizer_config.json``, and in their place files where there are any.

    settings: content of ``tokenizer_config.json``. Raises ArtifactError.
    """
    origin = f"{folder.path / 'tokenizer_config.json'}: chat_template"
    value = settings.get("chat_template")
    found: dict[str, object]
    if isinstance(value, list):
        found = dict(_named(entry, origin) for entry in value)
    else:
        found = {DEFAULT_TEMPLATE: value}
    if (template := folder.read_text(TEMPLATE_FILE)) is not None:
        found[DEFAULT_TEMPLATE] = template
    inner = ModelFolder(folder.path / TEMPLATE_FOLDER, whole=folder.path)
    for path in template_files(folder):
        found[path.stem] = inner.read_text(path.name)
    for name in PROCESSOR_FILES:
        if not any(found.values()):
            found = {DEFAULT_TEMPLATE: (folder.read_json(name) or {}).get("chat_template")}
    return _checked(found, origin)


def template_files(folder: ModelFolder) -> tuple[Path, ...]:
    """Return the files of templates that are not the default, sorted. Raises ArtifactError for links out of
    the folder.
    """
    inner = folder.path / TEMPLATE_FOLDER
    if not inner.is_dir():
        return ()
    if not inner.resolve().is_relative_to(folder.path.resolve()):
        raise ArtifactError(f"{inner} is a link that leads out of its folder; copy the files into the folder")
    return ModelFolder(inner, whole=folder.path).files(lambda name: name.endswith(".jinja"))


def artifact_file(name: str) -> str:
    """Return the name of the file in which an artifact carries a template."""
    return TEMPLATE_FILE if name == DEFAULT_TEMPLATE else f"chat_template.{name}.jinja"


def _checked(found: Mapping[str, object], origin: str) -> dict[str, str]:
    texts = {name: text for name, value in found.items() if (text := _text(value, origin)) is not None}
    if texts and DEFAULT_TEMPLATE not in texts:
        raise ArtifactError(
            f"{origin} has the templates {sorted(texts)}, expected one named 'default'; rename one"
        )
    if len(texts) > MAX_TEMPLATES:
        raise ArtifactError(
            f"{origin} has {len(texts)} templates, expected at most {MAX_TEMPLATES}; remove some"
        )
    for name in texts:
        if not _NAME.fullmatch(name):
            raise ArtifactError(
                f"{origin} has a template named {name[:100]!r}, expected letters, digits, - and _; rename it"
            )
    for name, text in texts.items():
        try:
            ChatTemplate(text, None, None)
        except ArtifactError as error:  # no worker would load the artifact
            raise ArtifactError(f"{origin}: {name}: {error}") from error
    return texts


def _named(entry: object, origin: str) -> tuple[str, object]:
    """Return name and source of one of several templates. Raises ArtifactError if it is no such thing."""
    name = entry.get("name") if isinstance(entry, Mapping) else None
    if not isinstance(entry, Mapping) or not isinstance(name, str):
        raise ArtifactError(
            f"{origin} holds {quoted(entry)}, expected objects with name and template; correct it"
        )
    return name, entry.get("template")


def _text(value: object, origin: str) -> str | None:
    if value is None:
        return None
    if not isinstance(value, str) or len(value) > MAX_TEXT_BYTES:
        raise ArtifactError(
            f"{origin} is {type(value).__name__}, expected text of at most {MAX_TEXT_BYTES} characters"
        )
    return value or None
