"""A worker of a folder: its model read, its tokenizer and template made ready, its graph loaded, its engine
started.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from llorch_serve.config import EngineConfig
from llorch_serve.engine.capabilities import Capabilities
from llorch_serve.errors import UsageError
from llorch_serve.loading.models import load_model, open_model
from llorch_serve.providers.placement import describe_shares
from llorch_serve.runtime.opening import LoadReport
from llorch_serve.sampling.params import check_defaults
from llorch_serve.text.tokenizer import Tokenizer
from llorch_serve.worker.prompts import PromptEncoder
from llorch_serve.worker.worker import Worker


def load_worker(
    folder: Path,
    config: EngineConfig,
    report: Callable[[LoadReport], None],
    *,
    tokenizer: Path | None = None,
) -> Worker:
    """Load an artifact, or another tool's folder, and start its engine.

    tokenizer: a tokenizer.json to use instead of the folder's.
    Raises ArtifactError, ProviderError, ResourceError or UsageError.
    """
    model = load_model(folder)
    check_defaults(model.manifest.generation)
    prompts = PromptEncoder(
        model,
        Tokenizer.load(tokenizer or model.tokenizer_path),
        tool_format=config.tool_format,
        reasoning_format=config.reasoning_format,
    )
    session = open_model(model, config.session, report)
    _check_able(config, session.capabilities, folder)
    return Worker(model, session, prompts, config)


def notes(worker: Worker) -> list[str]:
    """Return what a person should know of a loaded worker: what its graph cannot do, and where it runs."""
    told = []
    info = worker.model_info()
    if info.limits:
        by = "" if info.kind == "llorch" else f"made by {info.kind}; "
        told.append(f"{by}{'; '.join(info.limits)}")
    if len(info.provider_shares) > 1:
        told.append(describe_shares(info.provider_shares))
    if not info.stop_token_ids:
        told.append("this model has no end-of-sequence token; answers end at max_tokens or a stop string")
    return told


def _check_able(config: EngineConfig, able: Capabilities, folder: Path) -> None:
    """Raise UsageError for a setting that the loaded graph can give no effect."""
    for flag, asked, possible in (
        (f"--lookup {config.lookup}", bool(config.lookup), able.drafts),
        ("--strict-reuse", config.strict_reuse, able.prefix_reuse),
    ):
        if asked and not possible:
            raise UsageError(
                f"{flag} has no effect on the graph in {folder} ({'; '.join(able.limits())}); leave it out"
            )
