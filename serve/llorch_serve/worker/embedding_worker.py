"""A loaded artifact that gives vectors for texts, around an engine whose steps are batches of texts.

Requests are checked and tokenised on the caller's thread, as those for generated text are.
"""

from __future__ import annotations

import time
from typing import NoReturn

from llorch_serve.artifact.folder import Artifact
from llorch_serve.config import EngineConfig
from llorch_serve.engine.embedding import EmbeddingEngine
from llorch_serve.engine.load import Load
from llorch_serve.engine.sequence import Ownership
from llorch_serve.engine.waiting import DEFAULT_MOST_TOKENS, WaitingQueue
from llorch_serve.errors import FieldViolation, UnsupportedError
from llorch_serve.requests import (
    Abort,
    AnswerOptions,
    EmbedRequest,
    GenerationRequest,
    ModelInfo,
    Prompt,
    RankRequest,
    ScoreRequest,
    TokenPrompt,
    UpdateSink,
)
from llorch_serve.sampling.params import SamplingParams
from llorch_serve.worker.embeddings import MAX_TEXTS, Embeddings, embedded_ids, embedded_sequences
from llorch_serve.worker.live_requests import LiveRequests
from llorch_serve.worker.loaded import LoadedModel
from llorch_serve.worker.local import embed
from llorch_serve.worker.prompts import PromptEncoder
from llorch_serve.worker.served import ServedEmbedder


class EmbeddingWorker(LoadedModel):
    """Implements :class:`llorch_serve.requests.TextGenerator` on an artifact that embeds texts.
    ``loading/worker.py`` makes one of a folder.
    """

    def __init__(
        self, artifact: Artifact, session: ServedEmbedder, prompts: PromptEncoder, config: EngineConfig
    ) -> None:
        super().__init__(
            artifact,
            prompts,
            session.placement,
            context=session.context,
            served_names=config.served_names,
        )
        form = artifact.manifest.embeds
        assert form is not None, "loading asks for it"
        self._form = form
        self._size = artifact.manifest.model.hidden_size
        # A single request may have so many texts; the others' places are none of its.
        most = config.max_waiting + MAX_TEXTS
        waiting = WaitingQueue(most, config.max_waiting_tokens or DEFAULT_MOST_TOKENS)
        self._engine = EmbeddingEngine(session, waiting)
        self._requests = LiveRequests([self._engine], None)

    def close(self) -> None:
        """Cancel what is live and stop the engine."""
        self._requests.close()

    def warm_up(self) -> None:
        """Embed a short text, so that the first request finds buffers and pages ready."""
        embed(self, EmbedRequest("warm-up", (TokenPrompt((0,) * min(8, self._context)),)))

    def submit_embedding(self, request: EmbedRequest, sink: UpdateSink) -> Abort:
        """Check, tokenise and queue the texts of a request; return what ends it early.

        Raises InvalidRequestError with every bad field, or UnavailableError once the engine has stopped.
        """
        texts = embedded_ids(request, self._prompts, context=self._context, size=self._size)
        ownership = Ownership(f"{request.owner}/{request.client_id}", priority=request.priority)
        job = Embeddings(
            request.request_id,
            sink,
            embedded_sequences(request, texts, ownership=ownership, now=time.perf_counter()),
            request.dimensions or self._size,
            self._form.normalised,
        )
        return self._requests.enter(job)

    def submit(self, request: GenerationRequest, sink: UpdateSink) -> Abort:
        """Raise UnsupportedError: the graph gives no logits."""
        self._refuse("generates nothing")

    def submit_score(self, request: ScoreRequest, sink: UpdateSink) -> Abort:
        """Raise UnsupportedError: the graph gives no logits."""
        self._refuse("scores nothing")

    def submit_rank(self, request: RankRequest, sink: UpdateSink) -> Abort:
        """Raise UnsupportedError: the graph gives no logits."""
        self._refuse("ranks nothing")

    def violations(
        self, prompt: Prompt, sampling: SamplingParams, answers: AnswerOptions
    ) -> list[FieldViolation]:
        """Return nothing: a request for generated text is refused whatever its fields are."""
        return []

    def model_info(self) -> ModelInfo:
        """Describe what is served."""
        return self.info(
            slots=1,
            batch_invariant=False,
            limits=("embeds texts, and neither generates nor scores any",),
            embedding_size=self._size,
            capabilities=("embed", "tokenize"),
        )

    def load(self) -> Load:
        """Return how busy the engine is, as of its last step."""
        return self._engine.load()

    def _refuse(self, what: str) -> NoReturn:
        raise UnsupportedError(
            f"{self.artifact.manifest.model_id} embeds texts and {what}; call Embed or /v1/embeddings, or "
            f"serve an export of a language model (llorch export --embed none)"
        )
