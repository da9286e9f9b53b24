"""A model that answers, in this process or behind a running worker: what commands open, and use alike."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from llorch_serve.config import EngineConfig
from llorch_serve.loading.collection import uncollected
from llorch_serve.requests import (
    ContinuationScore,
    EmbedRequest,
    GenerationRequest,
    GenerationUpdate,
    ModelInfo,
    ScoreRequest,
    TextEmbedding,
)
from llorch_serve.terminal.access import WorkerFlags, connected, refuse_local_flags
from llorch_serve.terminal.target import ModelFlags, find_tokenizer, resolve_artifact

if TYPE_CHECKING:
    from llorch_serve.calls.interfaces import ClosableGenerator
    from llorch_serve.client.blocking import WorkerClient


class Generator(Protocol):
    """A model that answers. Its methods raise what the worker's own raise."""

    def model_info(self) -> ModelInfo:
        """Return what the model says of itself."""

    def generate(self, request: GenerationRequest) -> Iterator[GenerationUpdate]:
        """Return the updates of a request; closing the iterator early ends the request."""

    def score(self, request: ScoreRequest) -> Sequence[ContinuationScore]:
        """Return the scores of a request in the order of its continuations."""

    def embed(self, request: EmbedRequest) -> Sequence[TextEmbedding]:
        """Return the vectors of a request in the order of its texts."""


@contextlib.contextmanager
def open_generator(
    model: ModelFlags,
    worker: WorkerFlags,
    local: Sequence[str],
    config: Callable[[], EngineConfig],
    *,
    embeds: bool = False,
    chats: bool = True,
) -> Iterator[Generator]:
    """Open what the flags name: the worker of ``--connect``, or the model, which is loaded here.

    local: flags that were set and mean something to a model in this process alone; a worker refuses them.
    config: makes the settings of a model in this process. embeds: it may be one that embeds texts.
    chats: conversations will come, for which more is made ready; it means something where ``embeds`` does
        not.
    Raises UsageError for flags that do not go together, and what opening either raises.
    """
    if worker.connect is not None:
        refuse_local_flags(worker.connect, [*model.given(), *local])
        with connected(worker.connect, worker.access(), worker.wait) as client:
            yield _RemoteGenerator(client)
        return
    worker.refuse()
    with uncollected():
        from llorch_serve.terminal.opening import check_signed, open_any, open_worker

    settings = config()
    folder = resolve_artifact(model.target())
    signed = check_signed(folder, model.verify_signature, settings.draft)
    tokenizer = find_tokenizer()
    loaded: ClosableGenerator = (
        open_any(folder, settings, tokenizer=tokenizer, signed=signed)
        if embeds
        else open_worker(folder, settings, tokenizer=tokenizer, signed=signed, chats=chats)
    )
    from llorch_serve.worker.local import LocalClient

    try:
        yield LocalClient(loaded)
    finally:
        loaded.close()


@dataclass(frozen=True, slots=True)
class _RemoteGenerator:
    client: WorkerClient

    def model_info(self) -> ModelInfo:
        return self.client.model_info()

    def generate(self, request: GenerationRequest) -> Iterator[GenerationUpdate]:
        # Which answers are the best shows when all have ended, so that nothing streams.
        if request.answers.best_of is not None:
            return iter(self.client.complete(request))
        return self.client.generate(request)

    def score(self, request: ScoreRequest) -> Sequence[ContinuationScore]:
        return self.client.score(request)

    def embed(self, request: EmbedRequest) -> Sequence[TextEmbedding]:
        return self.client.embed(request)
