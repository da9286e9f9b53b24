"""Opening a worker for a terminal command: what it decided goes to stderr where a person should know it."""

from __future__ import annotations

from pathlib import Path

from llorch_serve.config import EngineConfig
from llorch_serve.providers.placement import describe_shares
from llorch_serve.session_opening import LoadReport
from llorch_serve.terminal.console import say
from llorch_serve.worker import Worker


def open_worker(folder: Path, config: EngineConfig, *, tokenizer: Path | None) -> Worker:
    """Load an artifact or another tool's folder; see :meth:`llorch_serve.worker.Worker.open` for the errors."""
    worker = Worker.open(folder, config, report_load, tokenizer=tokenizer)
    info = worker.model_info()
    if info.limits:
        by = "" if info.kind == "llorch" else f"made by {info.kind}; "
        say(f"note: {by}{'; '.join(info.limits)}")
    if len(info.provider_shares) > 1:
        say(f"note: {describe_shares(info.provider_shares)}")
    if not worker.artifact.manifest.stop_token_ids:
        say("note: this model has no end-of-sequence token; answers end at max_tokens or a stop string")
    return worker


def report_load(report: LoadReport) -> None:
    """Print what a person should know about a loaded session."""
    if report.notice is not None:
        say(f"note: {report.notice}")
