"""Opening a worker for a terminal command: what it decided goes to stderr where a person should know it."""

from __future__ import annotations

from pathlib import Path

from llorch_serve.config import EngineConfig
from llorch_serve.loading.worker import load_worker, notes
from llorch_serve.runtime.opening import LoadReport
from llorch_serve.terminal.console import say
from llorch_serve.worker.worker import Worker


def open_worker(folder: Path, config: EngineConfig, *, tokenizer: Path | None) -> Worker:
    """Load an artifact or another tool's folder; see :func:`llorch_serve.loading.worker.load_worker` for the
    errors.
    """
    worker = load_worker(folder, config, report_load, tokenizer=tokenizer)
    for note in notes(worker):
        say(f"note: {note}")
    return worker


def report_load(report: LoadReport) -> None:
    """Print what a person should know about a loaded session."""
    if report.notice is not None:
        say(f"note: {report.notice}")
