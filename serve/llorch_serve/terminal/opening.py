"""Opening a worker for a terminal command: what it decided goes to stderr where a person should know it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from llorch_serve.config import EngineConfig
from llorch_serve.loading.worker import AnyWorker, load_any, load_worker, notes
from llorch_serve.runtime.opening import LoadReport
from llorch_serve.terminal.console import say
from llorch_serve.terminal.requirements import require_signing

if TYPE_CHECKING:
    from llorch_serve.artifact.signed_files import SignedFolder
    from llorch_serve.worker.worker import Worker

W = TypeVar("W", "Worker", "AnyWorker")


def check_signed(
    folder: Path, public_key: Path | None, draft: Path | None = None
) -> tuple[SignedFolder, ...]:
    """Check the signatures of a folder, and of its draft, where a key is given, before anything of them is
    loaded. Nothing is returned without a key.

    Raises ProviderError if the library for it is missing, and what
    :func:`llorch_serve.artifact.signature.check_signature` raises.
    """
    if public_key is None:
        return ()
    require_signing()
    from llorch_serve.artifact.signature import check_signature

    return tuple(check_signature(each, public_key) for each in (folder, draft) if each is not None)


def open_worker(
    folder: Path,
    config: EngineConfig,
    *,
    tokenizer: Path | None,
    signed: Sequence[SignedFolder] = (),
    chats: bool = True,
) -> Worker:
    """Load an artifact that generates, or another tool's folder; see
    :func:`llorch_serve.loading.worker.load_worker` for ``chats`` and the errors.

    signed: what :func:`check_signed` returned; ArtifactError is raised if a file has changed since then.
    """
    worker = load_worker(
        folder,
        config,
        report_load,
        tokenizer=tokenizer,
        at_once=True,
        prompts_first=not signed,  # what is read later is not what was checked
        chats=chats,
    )
    return _checked(worker, signed)


def open_any(
    folder: Path, config: EngineConfig, *, tokenizer: Path | None, signed: Sequence[SignedFolder] = ()
) -> AnyWorker:
    """Load as :func:`open_worker` does, an artifact that embeds texts too."""
    return _checked(load_any(folder, config, report_load, tokenizer=tokenizer), signed)


def _checked(worker: W, signed: Sequence[SignedFolder]) -> W:
    """Return a loaded worker whose files are what they were, and say what a person should know of it."""
    try:
        for each in signed:
            each.check_unchanged()
    except BaseException:
        worker.close()
        raise
    for note in notes(worker):
        say(f"note: {note}")
    return worker


def report_load(report: LoadReport) -> None:
    """Print what a person should know about a loaded session."""
    if report.notice is not None:
        say(f"note: {report.notice}")
