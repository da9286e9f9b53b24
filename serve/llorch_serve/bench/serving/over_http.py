"""Requests of a benchmark over llorch's HTTP front, in OpenAI's form: chunks do not say how many tokens they
carry.

So times between tokens are not known here; the number of tokens is that of the stream's usage, and TPOT is
what lies between the first and the last chunk with text over the tokens after the first.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Any

import msgspec

from llorch_serve.bench.serving.records import CallError, Piece, Usage
from llorch_serve.bench.serving.wire import CONNECTION, HttpAddress, HttpAnswer, request
from llorch_serve.bench.serving.work import Job
from llorch_serve.errors import WorkerError
from llorch_serve.files.json_errors import NOT_JSON
from llorch_serve.requests import ChatPrompt, ModelInfo, TextPrompt


class HttpCall:
    """Implements :data:`llorch_serve.bench.serving.load.Call` for ``llorch serve --http``. model: the served
    model's id.
    """

    def __init__(self, address: HttpAddress, model: str) -> None:
        self._address = address
        self._model = model

    async def __call__(self, job: Job) -> AsyncGenerator[Piece]:
        """Send a request; yield its answer's chunks. Raises CallError with the HTTP status, or the code of a
        failure within.
        """
        path, asked = _asked(job)
        body = {
            "model": self._model,
            "max_tokens": job.max_tokens,
            "temperature": 0,
            "repetition_penalty": 1,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        async with request(self._address, "POST", path, msgspec.json.encode(body | asked)) as answer:
            if answer.status != 200:
                raise await _refusal(answer)
            async for data in answer.events():
                if data != b"[DONE]":
                    yield _piece(data)


async def fetch_model_info(address: HttpAddress) -> ModelInfo:
    """Return what is served. Raises WorkerError if it cannot be reached, refuses, or is no llorch."""
    try:
        async with request(address, "GET", "/v1/models") as answer:
            if answer.status != 200:
                raise await _refusal(answer)
            models = msgspec.json.decode(await answer.body(), type=_Models)
    except CallError as error:
        if error.status != CONNECTION:
            raise WorkerError(
                f"{address} answered {error.status} when asked for its model: {error}"
            ) from error
        raise WorkerError(
            f"no answer from {error}; start a worker with: llorch serve DIR --http PORT, or correct the "
            f"address"
        ) from error
    except NOT_JSON as error:
        raise WorkerError(
            f"{address} does not say what llorch does of its model ({error}); expected the front of llorch "
            f"serve --http"
        ) from error
    return models.data[0].llorch


class _Model(msgspec.Struct):
    llorch: ModelInfo


class _Models(msgspec.Struct):
    data: tuple[_Model]


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[Any] | None = None


class _Choice(msgspec.Struct):
    text: str | None = None
    delta: _Delta | None = None

    @property
    def carries(self) -> bool:
        """Whether there is anything of the model's in it."""
        delta = self.delta or _Delta()
        return bool(self.text or delta.content or delta.reasoning_content or delta.tool_calls)


class _Cached(msgspec.Struct):
    cached_tokens: int = 0


class _Usage(msgspec.Struct):
    prompt_tokens: int
    completion_tokens: int
    prompt_tokens_details: _Cached | None = None


class _Error(msgspec.Struct):
    message: str
    code: str | None = None


class _Chunk(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: _Error | None = None


def _asked(job: Job) -> tuple[str, dict[str, Any]]:
    """Return the route for a prompt, and the field that holds it."""
    match job.prompt:
        case TextPrompt(text):
            return "/v1/completions", {"prompt": text}
        case ChatPrompt(messages):
            return "/v1/chat/completions", {
                "messages": [{"role": message.role, "content": message.content} for message in messages]
            }
        case prompt:
            return "/v1/completions", {"prompt": prompt.token_ids}


def _piece(data: bytes) -> Piece:
    try:
        chunk = msgspec.json.decode(data, type=_Chunk)
    except NOT_JSON as error:
        raise CallError("MALFORMED", f"a chunk is not one of OpenAI's: {error}") from error
    if chunk.error is not None:
        raise CallError(chunk.error.code or "error", chunk.error.message)
    carries = any(choice.carries for choice in chunk.choices)
    told = chunk.usage
    usage = None
    if told is not None:
        cached = told.prompt_tokens_details
        usage = Usage(
            told.prompt_tokens, 0 if cached is None else cached.cached_tokens, told.completion_tokens
        )
    return Piece(None if carries else 0, usage)


async def _refusal(answer: HttpAnswer) -> CallError:
    body = await answer.body()
    try:
        found = msgspec.json.decode(body, type=_Chunk).error
    except NOT_JSON:
        found = None
    return CallError(
        f"HTTP {answer.status}", body[:200].decode("utf-8", "replace") if found is None else found.message
    )
