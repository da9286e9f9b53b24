"""What crosses from a replica to a front, as bytes: parts of answers, and what it says of itself.

Messages of ``worker.proto``, made and read by the bridges of ``rpc/``; what no message of it has, as how many
answers go on, stands beside them. A part of an answer is what came of one request since the last part.
Requests are in ``wire_requests.py``, errors in ``wire_errors.py``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

import msgspec
import numpy as np

from llorch_serve.cluster.interfaces import Description, ReplicaLoad
from llorch_serve.cluster.wire_errors import read_error, write_error
from llorch_serve.config import CacheSharing
from llorch_serve.engine.sequence import FinishReason
from llorch_serve.requests import (
    GenerationUpdate,
    TextEmbedding,
)
from llorch_serve.rpc import convert_answers, convert_info
from llorch_serve.rpc import worker_pb2 as pb
from llorch_serve.rpc.convert_score import (
    read_scores,
    write_scores,
)

_VECTOR: Final = np.dtype("<f4")


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
    cache_sharing: CacheSharing = CacheSharing.CALLER


class _Load(msgspec.Struct, array_like=True, frozen=True):
    replica: str
    fingerprint: str
    load: bytes
    memory_bytes: int
    device_memory_bytes: int | None
    capabilities: tuple[str, ...]


_ENCODER: Final = msgspec.msgpack.Encoder()
_PARTS: Final = msgspec.msgpack.Decoder(tuple[_Part, ...])


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
            description.cache_sharing,
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
        found.cache_sharing,
    )


def write_load(load: ReplicaLoad) -> bytes:
    """Return how busy a replica is."""
    figures = convert_info.write_load(load.load).SerializeToString()
    return _ENCODER.encode(
        _Load(
            load.replica,
            load.fingerprint,
            figures,
            load.memory_bytes,
            load.device_memory_bytes,
            load.capabilities,
        )
    )


def read_load(raw: bytes) -> ReplicaLoad:
    """Return how busy a replica is."""
    found = msgspec.msgpack.decode(raw, type=_Load)
    load = convert_info.read_load(pb.GetLoadResponse.FromString(found.load))
    return ReplicaLoad(
        found.replica,
        found.fingerprint,
        load,
        found.memory_bytes,
        found.device_memory_bytes,
        found.capabilities,
    )
