"""A model that answers coroutines: loaded in this process, or behind a worker."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Iterable, Mapping, Sequence
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


class AsyncSource(Protocol):
    """What a model asks: a worker in this process, or a connection to one."""

    def generate(self, request: GenerationRequest) -> AsyncGenerator[GenerationUpdate, None]:
        """Return the updates of a request as they come."""

    async def complete(self, request: GenerationRequest) -> list[GenerationUpdate]:
        """Return the whole answers of a request."""

    async def score(self, request: ScoreRequest) -> Sequence[ContinuationScore]:
        """Return how likely each continuation is."""

    async def embed(self, request: EmbedRequest) -> list[TextEmbedding]:
        """Return the vectors of texts."""

    async def tokenize(self, prompt: Prompt) -> tuple[tuple[int, ...], str]:
        """Return the ids of a prompt and the text they stand for."""

    async def detokenize(self, token_ids: tuple[int, ...], *, keep_special_tokens: bool) -> str:
        """Return the text of ids."""

    async def model_info(self) -> ModelInfo:
        """Return what the model says of itself."""

    async def close(self) -> None:
        """Free what it holds."""


class AsyncModel:
    """What :class:`llorch.Model` does, for an event loop: :func:`llorch.load_async` and
    :func:`llorch.connect_async` return one. A task that is cancelled ends its request.
    """

    def __init__(self, source: AsyncSource) -> None:
        self._source = source

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """End what still runs and free the model, or close the connection."""
        await self._source.close()

    async def info(self) -> ModelInfo:
        """See :meth:`llorch.Model.info`."""
        return await self._source.model_info()

    async def generate(self, prompt: Text, **settings: Unpack[SamplingSettings]) -> Answer:
        """See :meth:`llorch.Model.generate`."""
        return await self._whole(asking.text_prompt(prompt), settings)

    async def generate_all(
        self, prompts: Iterable[Text], **settings: Unpack[SamplingSettings]
    ) -> list[Answer]:
        """See :meth:`llorch.Model.generate_all`."""
        room = asyncio.Semaphore(_AT_ONCE)

        async def one(prompt: Prompt) -> Answer:
            async with room:
                return await self._whole(prompt, settings)

        asked = [asking.text_prompt(prompt) for prompt in prompts]
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(one(prompt)) for prompt in asked]
        return [task.result() for task in tasks]

    async def sample(
        self, prompt: Text, n: int, *, best_of: int | None = None, **settings: Unpack[SamplingSettings]
    ) -> list[Answer]:
        """See :meth:`llorch.Model.sample`."""
        options = AnswerOptions(n=n, best_of=best_of)
        request = asking.request(asking.text_prompt(prompt), settings, options)
        return [read_answer(update) for update in await self._source.complete(request)]

    def stream(self, prompt: Text, **settings: Unpack[SamplingSettings]) -> AsyncGenerator[Chunk, None]:
        """See :meth:`llorch.Model.stream`."""
        return self._stream(asking.request(asking.text_prompt(prompt), settings))

    async def chat(
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
        """See :meth:`llorch.Model.chat`."""
        prompt = asking.chat_prompt(
            messages,
            tools=tools,
            template_arguments=template_arguments,
            continue_final_message=continue_final_message,
            tool_choice=tool_choice,
            parallel_tool_calls=parallel_tool_calls,
        )
        return await self._whole(prompt, settings)

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
    ) -> AsyncGenerator[Chunk, None]:
        """See :meth:`llorch.Model.stream_chat`."""
        prompt = asking.chat_prompt(
            messages,
            tools=tools,
            template_arguments=template_arguments,
            continue_final_message=continue_final_message,
            tool_choice=tool_choice,
            parallel_tool_calls=parallel_tool_calls,
        )
        return self._stream(asking.request(prompt, settings))

    async def score(
        self, context: Text, continuations: Sequence[Text], *, logprobs: int | None = None
    ) -> list[ContinuationScore]:
        """See :meth:`llorch.Model.score`."""
        return list(await self._source.score(asking.score_request(context, continuations, logprobs)))

    async def embed(
        self,
        texts: Sequence[Text],
        *,
        dimensions: int | None = None,
        truncate_prompt_tokens: int | None = None,
    ) -> list[npt.NDArray[np.float32]]:
        """See :meth:`llorch.Model.embed`."""
        request = asking.embed_request(texts, dimensions, truncate_prompt_tokens)
        return [found.values for found in await self._source.embed(request)]

    async def tokenize(self, prompt: Text | Sequence[Message]) -> list[int]:
        """See :meth:`llorch.Model.tokenize`."""
        return list((await self._source.tokenize(asking.any_prompt(prompt)))[0])

    async def detokenize(self, token_ids: Iterable[int], *, keep_special_tokens: bool = False) -> str:
        """See :meth:`llorch.Model.detokenize`."""
        return await self._source.detokenize(tuple(token_ids), keep_special_tokens=keep_special_tokens)

    async def _whole(self, prompt: Prompt, settings: SamplingSettings) -> Answer:
        (update,) = await self._source.complete(asking.request(prompt, settings))
        return read_answer(update)

    async def _stream(self, request: GenerationRequest) -> AsyncGenerator[Chunk, None]:
        chunks = Chunks()
        async with contextlib.aclosing(self._source.generate(request)) as updates:
            async for update in updates:
                yield chunks.chunk(update)
