"""A worker of a folder: its model read, its tokenizer and template made ready, its graph loaded, its engine
started.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from llorch_serve.artifact.folder import Artifact
from llorch_serve.config import EngineConfig, check_guesses
from llorch_serve.errors import UsageError
from llorch_serve.loading.beside import made_beside
from llorch_serve.loading.collection import uncollected
from llorch_serve.loading.models import load_model, open_lanes, open_model
from llorch_serve.providers.placement import describe_shares
from llorch_serve.runtime.heap import give_back_freed
from llorch_serve.runtime.opening import LoadReport
from llorch_serve.sampling.params import check_defaults
from llorch_serve.text.thread_pool import leave_threads_alone

if TYPE_CHECKING:
    from llorch_serve.engine.capabilities import Capabilities
    from llorch_serve.foreign.model import ForeignModel
    from llorch_serve.loading.draft import DraftModel
    from llorch_serve.stages.hosts import HostOpener
    from llorch_serve.stages.pipeline import Pipeline
    from llorch_serve.worker.embedding_worker import EmbeddingWorker
    from llorch_serve.worker.prompts import PromptEncoder
    from llorch_serve.worker.served import ServedSession
    from llorch_serve.worker.worker import Worker

AnyWorker: TypeAlias = "Worker | EmbeddingWorker"
"""What a folder's model becomes, by what its graph gives."""


def load_worker(
    folder: Path,
    config: EngineConfig,
    report: Callable[[LoadReport], None],
    *,
    tokenizer: Path | None = None,
    at_once: bool = False,
    prompts_first: bool = False,
    chats: bool = True,
) -> Worker:
    """Load an artifact that generates, or another tool's folder, and start its engine.

    tokenizer: a tokenizer.json to use instead of the folder's.
    at_once: make the tokenizer beside the graphs, as for a person who waits: sooner, and with more memory for
        a moment, some 40 MiB for a vocabulary of 50,000.
    prompts_first: take prompts before the graph that decodes is there, whose files are read again then. Not
        where guesses are weighed by what calls take: the first would take as long as that load.
    chats: see :class:`llorch_serve.worker.prompts.PromptEncoder`.
    Raises ArtifactError, ProviderError, ResourceError or UsageError.
    """
    first = prompts_first and config.guesses is None
    return _generating(
        load_model(folder), config, report, tokenizer, at_once=at_once, prompts_first=first, chats=chats
    )


def load_any(
    folder: Path,
    config: EngineConfig,
    report: Callable[[LoadReport], None],
    *,
    tokenizer: Path | None = None,
    elsewhere: HostOpener | None = None,
) -> AnyWorker:
    """Load as :func:`load_worker` does, an artifact that embeds texts too.

    elsewhere: starts the stages of a model that is cut into stages on other machines.
    Raises UsageError too where stages are to run elsewhere and there are none.
    """
    model = load_model(folder)
    if elsewhere is not None and not (isinstance(model, Artifact) and model.manifest.stages):
        raise UsageError(
            f"{folder} is not cut into stages, which were to run on nodes of their own; leave stages out, or "
            "export the model with --stages N"
        )
    if not isinstance(model, Artifact) or model.manifest.embeds is None:
        return _generating(model, config, report, tokenizer, at_once=False, elsewhere=elsewhere)
    _check_embeds(config, folder)
    from llorch_serve.runtime.embedding_session import open_embedder
    from llorch_serve.text.tokenizer import Tokenizer
    from llorch_serve.worker.embedding_worker import EmbeddingWorker
    from llorch_serve.worker.prompts import PromptEncoder

    prompts = PromptEncoder(model, Tokenizer.load(tokenizer or model.tokenizer_path))
    return EmbeddingWorker(model, open_embedder(model, config.session, report), prompts, config)


def _generating(
    model: Artifact | ForeignModel,
    config: EngineConfig,
    report: Callable[[LoadReport], None],
    tokenizer: Path | None,
    *,
    at_once: bool,
    prompts_first: bool = False,
    chats: bool = True,
    elsewhere: HostOpener | None = None,
) -> Worker:
    check_defaults(model.manifest.generation)

    def encoder() -> PromptEncoder:
        # All of it is imported beside the graphs, which need none. The tokenizer comes first: what reading it
        # takes for a moment, it takes while the graphs are small.
        from llorch_serve.text.tokenizer import Tokenizer

        made = Tokenizer.load(tokenizer or model.tokenizer_path)
        if at_once:
            give_back_freed()
        import llorch_serve.worker.worker  # noqa: F401
        from llorch_serve.worker.prompts import PromptEncoder

        return PromptEncoder(
            model,
            made,
            tool_format=config.tool_format,
            reasoning_format=config.reasoning_format,
            chats=chats,
        )

    def opened() -> tuple[ServedSession, Pipeline | None]:
        pipeline = open_lanes(model, config.session, report, elsewhere)
        if pipeline is not None:
            return pipeline.sessions[0], pipeline
        beside = None if draft is None else draft.beside
        return open_model(model, config.session, report, prompts_first=prompts_first, beside=beside), None

    draft = _draft(config, model, tokenizer)
    leave_threads_alone()
    with uncollected():
        if at_once:
            prompts, (session, pipeline) = made_beside(encoder, opened, lambda made: _close(made[1]))
        else:
            prompts = encoder()
            session, pipeline = opened()
        try:
            _check_able(config, session.capabilities, model.folder)
            guesser = None if draft is None else draft.open(session.capacity, report)
            from llorch_serve.worker.worker import Worker

            worker = Worker(model, session, prompts, config, pipeline=pipeline, draft=guesser)
        except BaseException:
            _close(pipeline)
            raise
    give_back_freed()  # tokenizers are built out of many small pieces
    return worker


def _draft(config: EngineConfig, model: Artifact | ForeignModel, tokenizer: Path | None) -> DraftModel | None:
    """Return the draft that the settings ask for, checked. Raises as find_draft does."""
    check_guesses(config)
    if config.draft is None:
        return None
    from llorch_serve.loading.draft import find_draft

    return find_draft(config.draft, model, tokenizer, config.session)


def _close(pipeline: Pipeline | None) -> None:
    """End the processes of stages, where there are any."""
    if pipeline is not None:
        pipeline.close()


def notes(worker: AnyWorker) -> list[str]:
    """Return what a person should know of a loaded worker: what its graph cannot do, and where it runs."""
    told = []
    info = worker.model_info()
    if info.limits and not info.embedding_size:
        by = "" if info.kind == "llorch" else f"made by {info.kind}; "
        told.append(f"{by}{'; '.join(info.limits)}")
    if len(info.provider_shares) > 1:
        told.append(describe_shares(info.provider_shares))
    if not info.stop_token_ids and not info.embedding_size:
        told.append("this model has no end-of-sequence token; answers end at max_tokens or a stop string")
    return told


def _check_embeds(config: EngineConfig, folder: Path) -> None:
    """Raise UsageError for a setting that means nothing where texts are embedded."""
    if config.session.share_weights:
        raise UsageError(f"--share-weights has no effect on {folder}, whose graph embeds texts; leave it out")
    usual = EngineConfig()
    for flag, field in (
        ("--lookup", "lookup"),
        ("--draft", "draft"),
        ("--cache-sharing", "cache_sharing"),
        ("--prefill-chunk", "prefill_chunk"),
        ("--strict-reuse", "strict_reuse"),
        ("--no-prefix-cache", "prefix_cache"),
        ("--no-kv-cache", "kv_cache"),
        ("--tool-format", "tool_format"),
        ("--reasoning-format", "reasoning_format"),
        ("--rank-format", "rank_format"),
    ):
        if getattr(config, field) != getattr(usual, field):
            raise UsageError(f"{flag} has no effect on {folder}, whose graph embeds texts; leave it out")


def _check_able(config: EngineConfig, able: Capabilities, folder: Path) -> None:
    """Raise UsageError for a setting that the loaded graph can give no effect."""
    for flag, asked, possible in (
        (config.guesses or "", config.guesses is not None, able.drafts),
        ("--strict-reuse", config.strict_reuse, able.prefix_reuse),
        (
            "--prefill-chunk",
            config.prefill_chunk != EngineConfig().prefill_chunk,
            able.chunked_prefill,
        ),
    ):
        if asked and not possible:
            raise UsageError(
                f"{flag} has no effect on the graph in {folder} ({'; '.join(able.limits())}); leave it out"
            )
