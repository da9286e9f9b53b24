"""What crosses between a front and its replicas, as bytes: requests one way, parts of answers the other.

Both are messages of ``worker.proto``, made and read by the bridges of ``rpc/``; what no message of it has
(whose request it is, a prompt's tokens and its text at once, how many answers go on) stands beside them. A
part of an answer is what came of one request since the last part. Errors are in ``wire_errors.py``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Final, TypeVar

import msgspec
import numpy as np

from llorch_serve.cluster.interfaces import Description, ReplicaLoad
from llorch_serve.cluster.wire_errors import read_error, write_error
from llorch_serve.engine.sequence import FinishReason
from llorch_serve.requests import (
    ChatPrompt,
    EmbedRequest,
    EncodedPrompt,
    GenerationRequest,
    GenerationUpdate,
    Prompt,
    RankRequest,
    ScoreRequest,
    TextEmbedding,
    TextPrompt,
    TokenPrompt,
)
from llorch_serve.rpc import convert, convert_answers, convert_info
from llorch_serve.rpc import worker_pb2 as pb
from llorch_serve.rpc.convert_embed import read_embed_request, write_embed_request
from llorch_serve.rpc.convert_score import (
    read_score_request,
    read_scores,
    write_score_request,
    write_scores,
)

P = TypeVar("P", TextPrompt | TokenPrompt, Prompt)

_IDS: Final = np.dtype("<u4")
_VECTOR: Final = np.dtype("<f4")


class _Request(msgspec.Struct, array_like=True, frozen=True):
    """message: the request as its service has it. bare: which of its texts get no special tokens.

    token_ids, text, answers: its prompt, where the front has encoded it, and what has been told.
    """

    message: bytes
    owner: str
    correlation_id: str
    traceparent: str
    bare: tuple[int, ...] = ()
    token_ids: bytes | None = None
    text: str = ""
    answers: tuple[bytes | None, ...] = ()


class _Part(msgspec.Struct, array_like=True, frozen=True):
    """message: an update as a stream has it. open_answers, cancelled: what that does not say.

    score, vector, vector_tokens, error: of an update that has one.
    """

    message: bytes
    open_answers: int
    cancelled: bool = False
    score: bytes | None = None
    vector: bytes | None = None
    vector_tokens: int = 0
    error: bytes | None = None


class _Description(msgspec.Struct, array_like=True, frozen=True):
    info: bytes
    most_waiting: int
    tool_format: str
    reasoning_format: str
    rank_format: str


class _Load(msgspec.Struct, array_like=True, frozen=True):
    replica: str
    fingerprint: str
    load: bytes
    memory_bytes: int
    device_memory_bytes: int | None


_ENCODER: Final = msgspec.msgpack.Encoder()
_REQUEST: Final = msgspec.msgpack.Decoder(_Request)
_PARTS: Final = msgspec.msgpack.Decoder(tuple[_Part, ...])
_RANK: Final = msgspec.msgpack.Decoder(RankRequest)


def write_generation(request: GenerationRequest) -> bytes:
    """Return a request for generated text. Raises InvalidRequestError for what no message can carry."""
    encoded, prompt = request.encoded, request.prompt
    if encoded is not None:
        prompt = _without_words(prompt)
    (prompt,), bare = _dressed((prompt,))
    message = convert.write_generation_request(replace(request, prompt=prompt, encoded=None))
    answers = () if encoded is None else encoded.answers
    told = encoded is not None and (isinstance(request.prompt, ChatPrompt) or request.answers.echo)
    return _ENCODER.encode(
        _Request(
            message.SerializeToString(),
            request.owner,
            request.correlation_id,
            request.traceparent,
            bare,
            None if encoded is None else _packed(encoded.token_ids),
            encoded.text if encoded is not None and told else "",
            tuple(None if ids is None else _packed(ids) for ids in answers),
        )
    )


def read_generation(raw: bytes) -> GenerationRequest:
    """Return a request for generated text."""
    found = _REQUEST.decode(raw)
    request = convert.read_generation_request(pb.GenerateRequest.FromString(found.message))
    encoded, (prompt,) = None, _undressed((request.prompt,), found.bare)
    if found.token_ids is not None:
        answers = tuple(None if ids is None else _unpacked(ids) for ids in found.answers)
        encoded = EncodedPrompt(_unpacked(found.token_ids), found.text, answers)
        prompt = prompt if isinstance(prompt, ChatPrompt) else TokenPrompt(encoded.token_ids)
    return replace(
        request,
        prompt=prompt,
        encoded=encoded,
        owner=found.owner,
        correlation_id=found.correlation_id,
        traceparent=found.traceparent,
    )


def _packed(ids: tuple[int, ...]) -> bytes:
    return np.array(ids, _IDS).tobytes()


def _unpacked(raw: bytes) -> tuple[int, ...]:
    return tuple(np.frombuffer(raw, _IDS).tolist())


def _without_words(prompt: Prompt) -> Prompt:
    """Return what is still asked of a prompt whose tokens and text are known."""
    if not isinstance(prompt, ChatPrompt):
        return TokenPrompt(())
    # Whether the last message goes on decides how its answer is read.
    return replace(prompt, messages=prompt.messages[-1:], documents=(), template_arguments=None)


def _dressed(prompts: Sequence[P]) -> tuple[tuple[P, ...], tuple[int, ...]]:
    """Return prompts as messages carry them, and the places of those that get no special tokens."""
    bare = tuple(
        place
        for place, prompt in enumerate(prompts)
        if isinstance(prompt, TextPrompt) and not prompt.add_special_tokens
    )
    plain = (TextPrompt(p.text) if isinstance(p, TextPrompt) else p for p in prompts)
    return tuple(plain), bare


def _undressed(prompts: Sequence[P], bare: tuple[int, ...]) -> tuple[P, ...]:
    """Return prompts as they were."""
    return tuple(
        TextPrompt(prompt.text, add_special_tokens=False)
        if place in bare and isinstance(prompt, TextPrompt)
        else prompt
        for place, prompt in enumerate(prompts)
    )


def write_score(request: ScoreRequest) -> bytes:
    """Return a request for scores. Raises as :func:`write_generation`."""
    (context,), first = _dressed((request.context,))
    continuations, others = _dressed(request.continuations)
    message = write_score_request(replace(request, context=context, continuations=continuations))
    return _ENCODER.encode(
        _Request(
            message.SerializeToString(),
            request.owner,
            request.correlation_id,
            request.traceparent,
            (*first, *(place + 1 for place in others)),
        )
    )


def read_score(raw: bytes) -> ScoreRequest:
    """Return a request for scores."""
    found = _REQUEST.decode(raw)
    request = read_score_request(pb.ScoreRequest.FromString(found.message))
    others = tuple(place - 1 for place in found.bare if place)
    return replace(
        request,
        context=_undressed((request.context,), found.bare)[0],
        continuations=_undressed(request.continuations, others),
        owner=found.owner,
        correlation_id=found.correlation_id,
        traceparent=found.traceparent,
    )


def write_embed(request: EmbedRequest) -> bytes:
    """Return a request for vectors. Raises as :func:`write_generation`."""
    inputs, bare = _dressed(request.inputs)
    message = write_embed_request(replace(request, inputs=inputs))
    return _ENCODER.encode(
        _Request(
            message.SerializeToString(), request.owner, request.correlation_id, request.traceparent, bare
        )
    )


def read_embed(raw: bytes) -> EmbedRequest:
    """Return a request for vectors."""
    found = _REQUEST.decode(raw)
    request = read_embed_request(pb.EmbedRequest.FromString(found.message))
    return replace(
        request,
        inputs=_undressed(request.inputs, found.bare),
        owner=found.owner,
        correlation_id=found.correlation_id,
        traceparent=found.traceparent,
    )


def write_rank(request: RankRequest) -> bytes:
    """Return a request for ranks."""
    return _ENCODER.encode(request)


def read_rank(raw: bytes) -> RankRequest:
    """Return a request for ranks."""
    return _RANK.decode(raw)


def write_updates(updates: Sequence[GenerationUpdate]) -> bytes:
    """Return a part of an answer: updates of one request, in their order."""
    return _ENCODER.encode([_part(update) for update in updates])


def write_failure(error: Exception, *, method: str) -> bytes:
    """Return the last part of an answer that an error ends. What is no error of ours is logged."""
    return _ENCODER.encode([_Part(b"", 0, error=write_error(error, method=method))])


def _part(update: GenerationUpdate) -> _Part:
    cancelled = update.completion is not None and update.completion.reason is FinishReason.CANCELLED
    if cancelled and update.completion is not None:
        update = replace(update, completion=replace(update.completion, reason=FinishReason.STOP))
    vector = update.embedding
    return _Part(
        convert_answers.write_update(update, first=False).SerializeToString(),
        update.open_answers,
        cancelled,
        None if update.score is None else write_scores("", (update,)).SerializeToString(),
        None if vector is None else vector.values.astype(_VECTOR).tobytes(),
        0 if vector is None else vector.token_count,
        None if update.error is None else write_error(update.error, method="a replica"),
    )


def read_updates(request_id: str, raw: bytes) -> list[GenerationUpdate]:
    """Return the updates that a part of an answer is, as those of a request of this id."""
    return [_update(request_id, part) for part in _PARTS.decode(raw)]


def _update(request_id: str, part: _Part) -> GenerationUpdate:
    if part.error is not None:
        return GenerationUpdate(request_id, "", (), error=read_error(part.error))
    update = convert_answers.read_update(request_id, pb.GenerateStreamResponse.FromString(part.message))
    completion, score, embedding = update.completion, None, None
    if completion is not None and part.cancelled:
        completion = replace(completion, reason=FinishReason.CANCELLED)
    if part.score is not None:
        (score,) = read_scores(pb.ScoreResponse.FromString(part.score))
    if part.vector is not None:
        values = np.frombuffer(part.vector, _VECTOR).astype(np.float32)
        embedding = TextEmbedding(values, part.vector_tokens)
    return replace(
        update, completion=completion, open_answers=part.open_answers, score=score, embedding=embedding
    )


def write_description(description: Description) -> bytes:
    """Return what a replica says of itself."""
    return _ENCODER.encode(
        _Description(
            convert_info.write_model_info(description.info).SerializeToString(),
            description.most_waiting,
            description.tool_format,
            description.reasoning_format,
            description.rank_format,
        )
    )


def read_description(raw: bytes) -> Description:
    """Return what a replica says of itself."""
    found = msgspec.msgpack.decode(raw, type=_Description)
    return Description(
        convert_info.read_model_info(pb.GetModelInfoResponse.FromString(found.info)),
        found.most_waiting,
        found.tool_format,
        found.reasoning_format,
        found.rank_format,
    )


def write_load(load: ReplicaLoad) -> bytes:
    """Return how busy a replica is."""
    figures = convert_info.write_load(load.load).SerializeToString()
    return _ENCODER.encode(
        _Load(load.replica, load.fingerprint, figures, load.memory_bytes, load.device_memory_bytes)
    )


def read_load(raw: bytes) -> ReplicaLoad:
    """Return how busy a replica is."""
    found = msgspec.msgpack.decode(raw, type=_Load)
    load = convert_info.read_load(pb.GetLoadResponse.FromString(found.load))
    return ReplicaLoad(found.replica, found.fingerprint, load, found.memory_bytes, found.device_memory_bytes)
