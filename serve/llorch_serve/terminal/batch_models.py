"""What answers the lines of ``llorch batch``: a model in this process, or a worker's or a cluster's.

Input: flags. Output: a generator, and what the run must know of it.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final

from llorch_serve.artifact.folder import load_artifact
from llorch_serve.config import EngineConfig
from llorch_serve.errors import EngineStoppedError, LlorchError
from llorch_serve.requests import ModelInfo, TextGenerator
from llorch_serve.terminal.access import WorkerFlags
from llorch_serve.terminal.console import note
from llorch_serve.terminal.target import ModelFlags, find_tokenizer, resolve_artifact

_TOLD: Final = (
    "prefix_cache",
    "strict_reuse",
    "lookup",
    "kv_cache",
    "tool_format",
    "reasoning_format",
    "rank_format",
    "served_names",
)
_TOLD_OF_SESSION: Final = ("max_context", "kv_dtype", "single_graph", "batch_invariant")


@dataclass(frozen=True, slots=True)
class AnsweringModel:
    """A model that answers lines.

    settings: of the model, on which the bytes of answers depend. stopped: why it answers no more, else None.
    is_here: it runs in this process.
    """

    generator: TextGenerator
    info: ModelInfo
    settings: dict[str, Any]
    stopped: Callable[[], LlorchError | None]
    is_here: bool


@contextlib.contextmanager
def model_here(model: ModelFlags, config: EngineConfig, *, repeats: bool) -> Iterator[AnsweringModel]:
    """Load a model in this process. repeats: its answers must be the same bits whatever else runs.

    Raises what loading raises.
    """
    from llorch_serve.loading.repeatable import repeatable
    from llorch_serve.terminal.opening import check_signed, open_any

    folder = resolve_artifact(model.target())
    signed = check_signed(folder, model.verify_signature, config.draft)
    if repeats:
        config = repeatable(config, folder)
    worker = open_any(folder, config, tokenizer=find_tokenizer(), signed=signed)
    try:
        dead: list[EngineStoppedError] = []
        worker.when_dead(dead.append)
        yield AnsweringModel(
            worker, worker.model_info(), _settings(config), lambda: dead[0] if dead else None, is_here=True
        )
    finally:
        worker.close()


@contextlib.asynccontextmanager
async def model_elsewhere(worker: WorkerFlags) -> AsyncIterator[AnsweringModel]:
    """Connect to a worker, or to the front of a cluster. Raises WorkerError, UnavailableError, UsageError."""
    from llorch_serve.client.asynchronous import AsyncWorkerClient
    from llorch_serve.client.generator import RemoteGenerator

    assert worker.connect is not None
    async with AsyncWorkerClient(worker.connect, worker.access()) as client:
        if worker.wait:
            await client.wait_until_ready(worker.wait)
        info = await client.model_info()
        remote = RemoteGenerator(client, info, note)
        try:
            yield AnsweringModel(remote, info, {}, lambda: remote.lost, is_here=False)
        finally:
            await remote.close()


def _settings(config: EngineConfig) -> dict[str, Any]:
    """Return what differs from the usual of what answers depend on."""
    usual = EngineConfig()
    found: dict[str, Any] = {}
    for names, mine, theirs in (
        (_TOLD, config, usual),
        (_TOLD_OF_SESSION, config.session, usual.session),
    ):
        found |= {name: getattr(mine, name) for name in names if getattr(mine, name) != getattr(theirs, name)}
    if config.draft is not None:  # its guesses decide which calls compute a token, and so its last bits
        found["draft"] = load_artifact(config.draft).manifest.fingerprint
    provider = config.session.provider.name
    return found if provider is None else found | {"provider": provider}
