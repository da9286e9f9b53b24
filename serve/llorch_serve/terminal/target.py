"""From what the user points at to a folder to serve: an export as it is, a checkpoint exported once into a
cache.
"""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Annotated, Final

import msgspec
import typer

from llorch_serve.artifact.folder import is_artifact
from llorch_serve.errors import ArtifactError, UsageError
from llorch_serve.files.cache import cache_folder
from llorch_serve.foreign.detect import foreign_kind
from llorch_serve.loading.progress import LoadProgress
from llorch_serve.python_child import child_environment, module_command
from llorch_serve.terminal.console import say
from llorch_serve.terminal.groups import FlagGroup

# ORG/NAME; what it may contain is for the hub to say.
_HUB_ID: Final = re.compile(r"[^/\\\s]+/[^/\\\s]+")


VerifySignature = Annotated[
    Path | None,
    typer.Option(
        "--verify-signature",
        metavar="KEY",
        help="Refuse the model unless all of its files are what the owner of this public key (PEM) "
        "signed; see llorch sign.",
        show_default=False,
    ),
]


class ModelFlags(FlagGroup, frozen=True):
    """A model to load in this process."""

    model_dir: Annotated[
        str | None,
        typer.Argument(
            metavar="DIR",
            help="Artifact folder, one made by onnxruntime-genai or Optimum, or a source (GGUF file, Hugging "
            "Face folder, hub id) that is exported once into a cache.",
            show_default=False,
        ),
    ] = None
    model: Annotated[str | None, typer.Option("--model", help="The same as DIR.", show_default=False)] = None
    verify_signature: VerifySignature = None

    def given(self) -> list[str]:
        """Return what was named, as it is typed."""
        return [{"--model-dir": "DIR"}.get(flag, flag) for flag in super().given()]

    def target(self) -> str:
        """Return what DIR, --model or MODEL_PATH name, in this order.

        Raises UsageError for none or two different ones.
        """
        argument, option = self.model_dir, self.model
        if argument is not None and option is not None and argument != option:
            raise UsageError(f"DIR is {argument} and --model is {option}; give one of them")
        target = argument or option or os.environ.get("MODEL_PATH")
        if not target:
            raise UsageError("no model given; name an artifact folder or a source, or set MODEL_PATH")
        if self.verify_signature is not None:
            _check_may_be_signed(target)
        return target


def _check_may_be_signed(target: str) -> None:
    """Raise UsageError where a signature would not cover all that is loaded."""
    if find_artifact(target) is None:
        raise UsageError(
            f"--verify-signature is for a folder with a signature, and {target} is a source that is exported "
            "first; export it, sign it with llorch sign, and name that folder"
        )
    if os.environ.get("TOKENIZER_PATH"):
        raise UsageError(
            "--verify-signature does not cover the tokenizer of TOKENIZER_PATH; unset TOKENIZER_PATH, or "
            "leave the flag out"
        )


def find_tokenizer() -> Path | None:
    """Return the tokenizer.json that TOKENIZER_PATH names (the file, or its folder), or None.

    Raises UsageError if there is no such file.
    """
    value = os.environ.get("TOKENIZER_PATH")
    if not value:
        return None
    path = Path(value)
    if path.is_dir():
        path = path / "tokenizer.json"
    if not _exists(path):
        raise UsageError(
            f"TOKENIZER_PATH names {path}, which does not exist; expected a tokenizer.json or its folder"
        )
    return path


def resolve_artifact(target: str) -> Path:
    """Return the folder to serve for a target, exporting a source into the cache first if need be.

    Raises ArtifactError if there is no such thing. Exits with the exporter's code if it fails; it has then
    said why.
    """
    return find_artifact(target) or export_source(target)


def find_artifact(target: str) -> Path | None:
    """Return the folder to serve for a target; None if it is a source. Raises ArtifactError if there is no
    such thing.
    """
    path = Path(target)
    if is_artifact(path) or foreign_kind(path) is not None:
        return path
    if not _exists(path) and not _HUB_ID.fullmatch(target):
        raise ArtifactError(
            f"{target!r} does not exist; expected an artifact folder, a GGUF file, a Hugging Face folder or "
            f"a hub id"
        )
    if path.is_dir() and not (path / "config.json").is_file():
        return path  # not a checkpoint either: loading it as an artifact says what is missing
    return None


def export_source(target: str, progress: LoadProgress | None = None) -> Path:
    """Export a source into the cache, unless it is there; return the folder.

    progress: of the load that this is a part of; cancelling it ends the exporter, and this with
        UnavailableError.
    Exits with the exporter's code if it fails; it has then said why.
    """
    progress = progress or LoadProgress()
    folder = cache_folder() / _cache_name(target)
    say(f"{target} is a source, not an artifact; its default export is kept in {folder}")
    # The exporter runs in a process of its own: its libraries and buffers never weigh on the worker.
    flags = ("--output", str(folder), "--if-changed", "--json")
    command = module_command(sys.executable, "llorch_serve", "export", target, *flags)
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=child_environment()) as exporter:
        progress.stoppable(exporter.terminate)
        try:
            document, _ = exporter.communicate()
        except KeyboardInterrupt:
            # Nobody but a terminal tells the exporter too, and it must be given the time to clean up.
            exporter.terminate()
            exporter.wait()
            raise
        finally:
            progress.stoppable(None)
    progress.check()
    if exporter.returncode != 0:
        raise SystemExit(exporter.returncode)
    if msgspec.json.decode(document)["changed"]:
        say(f"exported to {folder}")
    return folder


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except OSError:  # a name that is too long for the file system
        return False


def _cache_name(target: str) -> str:
    """Return a folder name that people recognise and that differs for sources of the same file name."""
    path = Path(target)
    identity = str(path.resolve()) if path.exists() else target
    readable = re.sub(r"[^A-Za-z0-9._-]+", "-", path.stem if path.is_file() else path.name) or "model"
    return f"{readable}-{hashlib.sha256(identity.encode()).hexdigest()[:12]}"
