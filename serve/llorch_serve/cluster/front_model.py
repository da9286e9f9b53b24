"""What a front has of a model: its tokenizer, template and manifest, and no session.

Input: requests as fronts read them. Output: the same requests with token ids for texts, refused by the same
checks as in a worker, so that every replica finds nothing left to refuse but what its graph or its queue
cannot do.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Protocol, TypeVar

from llorch_serve.cluster.interfaces import Description
from llorch_serve.errors import FieldViolation, InvalidRequestError, ModelMismatchError
from llorch_serve.loading.models import load_model
from llorch_serve.requests import (
    AnswerOptions,
    EmbedRequest,
    EncodedPrompt,
    GenerationRequest,
    Prompt,
    RankRequest,
    ScoreRequest,
    TokenPrompt,
)
from llorch_serve.sampling.params import SamplingParams
from llorch_serve.text.tokenizer import Tokenizer
from llorch_serve.worker.checks import RequestChecks
from llorch_serve.worker.embeddings import embedded_ids
from llorch_serve.worker.prompts import PromptEncoder
from llorch_serve.worker.ranking import choose_ranking
from llorch_serve.worker.served import ServedModel
from llorch_serve.worker.texts import TextMethods

R = TypeVar("R")


class RequestReader(Protocol):
    """What :class:`llorch_serve.cluster.routed_generator.RoutedGenerator` needs of a model. From any thread.

    Each of the first four returns what is sent of a request, and the token ids that it begins with. They
    raise InvalidRequestError with every bad field.
    """

    def generation(self, request: GenerationRequest) -> tuple[GenerationRequest, tuple[int, ...]]:
        """Check and encode a request for generated text."""

    def score(self, request: ScoreRequest) -> tuple[ScoreRequest, tuple[int, ...]]:
        """Check and encode a request for scores."""

    def rank(self, request: RankRequest) -> tuple[RankRequest, tuple[int, ...]]:
        """Check a request for ranks."""

    def embed(self, request: EmbedRequest) -> tuple[EmbedRequest, tuple[int, ...]]:
        """Check and encode a request for vectors."""

    def violations(
        self, prompt: Prompt, sampling: SamplingParams, answers: AnswerOptions
    ) -> list[FieldViolation]:
        """Return every bad field of a prompt and its options."""

    def tokenize(self, prompt: Prompt) -> tuple[tuple[int, ...], str]:
        """Return a prompt's token ids and the text they stand for. Raises InvalidRequestError."""

    def detokenize(self, token_ids: tuple[int, ...], *, keep_special_tokens: bool) -> str:
        """Return the text of token ids. Raises InvalidRequestError."""


class FrontModel(TextMethods):
    """Implements :class:`RequestReader` on an artifact. description: what its replicas say of themselves.

    Requests that the model cannot answer at all pass through: a replica says why.
    """

    def __init__(self, artifact: ServedModel, prompts: PromptEncoder, description: Description) -> None:
        info = description.info
        super().__init__(prompts, context=info.context_length)
        self._embedding_size = info.embedding_size
        self._checks = RequestChecks(
            artifact, prompts, context=info.context_length, most_waiting=description.most_waiting
        )
        self._ranking = None
        if not self._embedding_size:
            self._ranking = choose_ranking(description.rank_format, prompts, info.model_id)

    def generation(self, request: GenerationRequest) -> tuple[GenerationRequest, tuple[int, ...]]:
        """Check and encode a request for generated text."""
        if self._embedding_size:
            return request, ()
        checked = self._checks.prompt(request.prompt, request.sampling, request.answers)
        if checked.bad:
            raise InvalidRequestError(checked.bad)
        return replace(request, encoded=EncodedPrompt(checked.token_ids, checked.text)), checked.token_ids

    def score(self, request: ScoreRequest) -> tuple[ScoreRequest, tuple[int, ...]]:
        """Check and encode a request for scores."""
        if self._embedding_size:
            return request, ()
        pairs = self._checks.continuations(request)
        context = pairs[0].context  # which is that of all
        sent = replace(
            request,
            context=TokenPrompt(context),
            continuations=tuple(TokenPrompt(pair.continuation) for pair in pairs),
        )
        return sent, context

    def rank(self, request: RankRequest) -> tuple[RankRequest, tuple[int, ...]]:
        """Check a request for ranks. A replica encodes it again: its documents have a question each."""
        if self._ranking is None:
            return request, ()
        return request, self._checks.documents(request, self._ranking)[0].context

    def embed(self, request: EmbedRequest) -> tuple[EmbedRequest, tuple[int, ...]]:
        """Check and encode a request for vectors, cut as it asks."""
        if not self._embedding_size:
            return request, ()
        texts = embedded_ids(request, self._prompts, context=self._context, size=self._embedding_size)
        sent = replace(request, inputs=tuple(map(TokenPrompt, texts)), truncate_prompt_tokens=None)
        return sent, ()

    def violations(
        self, prompt: Prompt, sampling: SamplingParams, answers: AnswerOptions
    ) -> list[FieldViolation]:
        """Return every bad field of a prompt and its options."""
        return [] if self._embedding_size else self._checks.prompt(prompt, sampling, answers).bad


def open_front_model(folder: Path, description: Description, *, tokenizer: Path | None = None) -> FrontModel:
    """Return what a front needs of a folder's model. tokenizer: one to use instead of the folder's.

    Raises ArtifactError, UsageError for a broken template, and ModelMismatchError where the replicas have
    another model.
    """
    model = load_model(folder)
    served = description.info.fingerprint
    if model.manifest.fingerprint != served:
        raise ModelMismatchError(
            f"{folder} has the fingerprint {model.manifest.fingerprint}, the replicas serve {served}; give "
            f"the front the folder that was deployed"
        )
    prompts = PromptEncoder(
        model,
        Tokenizer.load(tokenizer or model.tokenizer_path),
        tool_format=description.tool_format,
        reasoning_format=description.reasoning_format,
    )
    return FrontModel(model, prompts, description)
