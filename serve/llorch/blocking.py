"""A model that answers calls which block: loaded in this process, or behind a worker."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, Protocol, Self, Unpack

from llorch import asking
from llorch.answers import Answer, Chunk, Chunks, read_answer
from llorch.asking import Message, Messages, Text
from llorch.settings import SamplingSettings
from llorch_serve.requests import (
    AnswerOptions,
    ContinuationScore,
    EmbedRequest,
    GenerationRequest,
    GenerationUpdate,
    ModelInfo,
    Prompt,
    ScoreRequest,
    TextEmbedding,
)

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

_AT_ONCE: Final = 64  # calls of one generate_all


class Source(Protocol):
    """What a model asks: a worker in this process, or a connection to one."""

    def generate(self, request: GenerationRequest) -> Generator[GenerationUpdate, None, None]:
        """Return the updates of a request as they come; closing the generator ends the request."""

    def complete(self, request: GenerationRequest) -> list[GenerationUpdate]:
        """Return the whole answers of a request."""

    def score(self, request: ScoreRequest) -> Sequence[ContinuationScore]:
        """Return how likely each continuation is."""

    def embed(self, request: EmbedRequest) -> list[TextEmbedding]:
        """Return the vectors of texts."""

    def tokenize(self, prompt: Prompt) -> tuple[tuple[int, ...], str]:
        """Return the ids of a prompt and the text they stand for."""

    def detokenize(self, token_ids: tuple[int, ...], *, keep_special_tokens: bool) -> str:
        """Return the text of ids."""

    def model_info(self) -> ModelInfo:
        """Return what the model says of itself."""

    def close(self) -> None:
        """Free what it holds."""


class Model:
    """A model that answers. :func:`llorch.load` and :func:`llorch.connect` return one.

    Threads may share it: their requests run together. Every method raises InvalidRequestError for a request
    that is refused, with all bad fields, and of a model behind a worker WorkerError, UnavailableError or
    QueueFullError too.
    """

    def __init__(self, source: Source) -> None:
        self._source = source

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End what still runs and free the model, or close the connection."""
        self._source.close()

    def info(self) -> ModelInfo:
        """Return what the model says of itself: name, fingerprint, context, provider and more."""
        return self._source.model_info()

    def generate(self, prompt: Text, **settings: Unpack[SamplingSettings]) -> Answer:
        """Return the answer that follows a text."""
        return self._whole(asking.text_prompt(prompt), settings)

    def generate_all(self, prompts: Iterable[Text], **settings: Unpack[SamplingSettings]) -> list[Answer]:
        """Return the answers to several texts, in their order; they are computed together."""
        asked = [asking.text_prompt(prompt) for prompt in prompts]
        if not asked:
            return []
        with ThreadPoolExecutor(min(len(asked), _AT_ONCE), "llorch-generate") as threads:
            return list(threads.map(lambda prompt: self._whole(prompt, settings), asked))

    def sample(
        self, prompt: Text, n: int, *, best_of: int | None = None, **settings: Unpack[SamplingSettings]
    ) -> list[Answer]:
        """Return ``n`` answers to one text, each with a seed of its own.

        best_of: generate so many, and return those of the highest mean log-probability.
        """
        options = AnswerOptions(n=n, best_of=best_of)
        request = asking.request(asking.text_prompt(prompt), settings, options)
        return [read_answer(update) for update in self._source.complete(request)]

    def stream(self, prompt: Text, **settings: Unpack[SamplingSettings]) -> Generator[Chunk, None, None]:
        """Return the answer that follows a text as it comes. Closing the generator ends the request."""
        return self._stream(asking.request(asking.text_prompt(prompt), settings))

    def chat(
        self,
        messages: Messages,
        *,
        tools: Iterable[Mapping[str, Any]] = (),
        template_arguments: Mapping[str, Any] | None = None,
        continue_final_message: bool = False,
        tool_choice: str | Mapping[str, Any] | None = None,
        parallel_tool_calls: bool = True,
        **settings: Unpack[SamplingSettings],
    ) -> Answer:
        """Return the answer to a conversation.

        messages: as OpenAI's clients send them, or one text of the user's. tools: the same.
        template_arguments: further variables of the model's template. continue_final_message: go on with the
        last message instead of answering it. tool_choice, parallel_tool_calls: as OpenAI's clients send them.
        """
        prompt = asking.chat_prompt(
            messages,
            tools=tools,
            template_arguments=template_arguments,
            continue_final_message=continue_final_message,
            tool_choice=tool_choice,
            parallel_tool_calls=parallel_tool_calls,
        )
        return self._whole(prompt, settings)

    def stream_chat(
        self,
        messages: Messages,
        *,
        tools: Iterable[Mapping[str, Any]] = (),
        template_arguments: Mapping[str, Any] | None = None,
        continue_final_message: bool = False,
        tool_choice: str | Mapping[str, Any] | None = None,
        parallel_tool_calls: bool = True,
        **settings: Unpack[SamplingSettings],
    ) -> Generator[Chunk, None, None]:
        """Return the answer to a conversation as it comes; see :meth:`chat` and :meth:`stream`."""
        prompt = asking.chat_prompt(
            messages,
            tools=tools,
            template_arguments=template_arguments,
            continue_final_message=continue_final_message,
            tool_choice=tool_choice,
            parallel_tool_calls=parallel_tool_calls,
        )
        return self._stream(asking.request(prompt, settings))

    def score(
        self, context: Text, continuations: Sequence[Text], *, logprobs: int | None = None
    ) -> list[ContinuationScore]:
        """Return how likely each continuation is, right behind the context.

        logprobs: 0 to 20: list the log-probability of each token too, and so many of the likeliest.
        """
        return list(self._source.score(asking.score_request(context, continuations, logprobs)))

    def embed(
        self,
        texts: Sequence[Text],
        *,
        dimensions: int | None = None,
        truncate_prompt_tokens: int | None = None,
    ) -> list[npt.NDArray[np.float32]]:
        """Return each text's vector, [dimensions], in their order, of a model exported to embed texts.

        dimensions: the first so many numbers, for models that were trained for it. truncate_prompt_tokens:
        cut longer texts; -1: those beyond the context. None: they are refused.
        """
        request = asking.embed_request(texts, dimensions, truncate_prompt_tokens)
        return [found.values for found in self._source.embed(request)]

    def tokenize(self, prompt: Text | Sequence[Message]) -> list[int]:
        """Return the ids of a text, or of a conversation as the model's template renders it."""
        return list(self._source.tokenize(asking.any_prompt(prompt))[0])

    def detokenize(self, token_ids: Iterable[int], *, keep_special_tokens: bool = False) -> str:
        """Return the text of ids."""
        return self._source.detokenize(tuple(token_ids), keep_special_tokens=keep_special_tokens)

    def _whole(self, prompt: Prompt, settings: SamplingSettings) -> Answer:
        (update,) = self._source.complete(asking.request(prompt, settings))
        return read_answer(update)

    def _stream(self, request: GenerationRequest) -> Generator[Chunk, None, None]:
        chunks = Chunks()
        with closing(self._source.generate(request)) as updates:
            for update in updates:
                yield chunks.chunk(update)
