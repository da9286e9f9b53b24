"""Every call of GenerationService as data: the message that is sent, and how its response is read.

Both clients build their calls here and differ only in how they wait for them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from google.protobuf.message import Message

from llorch_serve.calls.correlation import write_ids
from llorch_serve.client.channel import check_size
from llorch_serve.engine.load import Load
from llorch_serve.requests import (
    ContinuationScore,
    EmbedRequest,
    GenerationRequest,
    GenerationUpdate,
    ModelInfo,
    Prompt,
    ScoreRequest,
    TextEmbedding,
)
from llorch_serve.rpc import convert, convert_answers, convert_info, convert_prompt
from llorch_serve.rpc import worker_pb2 as pb
from llorch_serve.rpc.convert_embed import read_embeddings, write_embed_request
from llorch_serve.rpc.convert_score import read_scores, write_score_request

R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class Call(Generic[R]):
    """One call. Raises InvalidRequestError if no worker takes so large a message.

    method: its name in GenerationService. read: turns a response into what the client's method returns; of a
        stream, each of its messages.
    ids: metadata with the caller's own ids. timeout_s: for the whole answer, in seconds; None: no limit.
    """

    method: str
    message: Message
    read: Callable[[Any], R]
    ids: tuple[tuple[str, str], ...] = ()
    timeout_s: float | None = None

    def __post_init__(self) -> None:
        check_size(self.message.ByteSize())


def stream_call(request: GenerationRequest, timeout_s: float | None) -> Call[GenerationUpdate]:
    """Return the call that streams the updates of a request. Its messages are read in their order."""
    open_answers = request.answers.n

    def read(response: pb.GenerateStreamResponse) -> GenerationUpdate:
        nonlocal open_answers
        update = convert_answers.read_update(request.request_id, response, open_answers=open_answers)
        open_answers = update.open_answers
        return update

    message = pb.GenerateStreamRequest(request=convert.write_generation_request(request))
    ids = write_ids(request.correlation_id, request.traceparent)
    return Call("GenerateStream", message, read, ids, timeout_s)


def complete_call(request: GenerationRequest, timeout_s: float | None) -> Call[list[GenerationUpdate]]:
    """Return the call for the whole answers of a request."""
    message = convert.write_generation_request(request)
    ids = write_ids(request.correlation_id, request.traceparent)
    return Call("Generate", message, convert_answers.read_answers, ids, timeout_s)


def score_call(request: ScoreRequest, timeout_s: float | None) -> Call[Sequence[ContinuationScore]]:
    """Return the call for the scores of continuations."""
    ids = write_ids(request.correlation_id, request.traceparent)
    return Call("Score", write_score_request(request), read_scores, ids, timeout_s)


def embed_call(request: EmbedRequest, timeout_s: float | None) -> Call[list[TextEmbedding]]:
    """Return the call for the vectors of texts."""
    ids = write_ids(request.correlation_id, request.traceparent)
    return Call("Embed", write_embed_request(request), read_embeddings, ids, timeout_s)


def tokenize_call(prompt: Prompt) -> Call[tuple[tuple[int, ...], str]]:
    """Return the call for a prompt's token ids and text."""

    def read(response: pb.TokenizeResponse) -> tuple[tuple[int, ...], str]:
        return tuple(response.token_ids), response.text

    return Call("Tokenize", pb.TokenizeRequest(input=convert_prompt.write_prompt(prompt)), read)


def detokenize_call(token_ids: tuple[int, ...], *, keep_special_tokens: bool) -> Call[str]:
    """Return the call for the text of token ids."""

    def read(response: pb.DetokenizeResponse) -> str:
        return response.text

    message = convert.write_detokenize_request(token_ids, keep_special_tokens=keep_special_tokens)
    return Call("Detokenize", message, read)


def model_info_call() -> Call[ModelInfo]:
    """Return the call for what a worker serves."""
    return Call("GetModelInfo", pb.GetModelInfoRequest(), convert_info.read_model_info)


def load_call() -> Call[Load]:
    """Return the call for a worker's state and load."""
    return Call("GetLoad", pb.GetLoadRequest(), convert_info.read_load)


def abort_call(request_ids: tuple[str, ...]) -> Call[tuple[str, ...]]:
    """Return the call that ends live requests."""

    def read(response: pb.AbortResponse) -> tuple[str, ...]:
        return tuple(response.request_ids)

    return Call("Abort", convert.write_abort_request(request_ids), read)
