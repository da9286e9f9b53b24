"""What crosses from a front to a replica, as bytes: requests.

Messages of ``worker.proto``, made and read by the bridges of ``rpc/``; what no message of it has stands
beside them: whose request it is, which texts get no special tokens, and what the front has made of the
prompt.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Final, TypeVar

import msgspec
import numpy as np

from llorch_serve.requests import (
    ChatPrompt,
    EmbedRequest,
    EncodedPrompt,
    GenerationRequest,
    Prompt,
    RankRequest,
    ScoreRequest,
    TextPrompt,
    TokenPrompt,
)
from llorch_serve.rpc import convert
from llorch_serve.rpc import worker_pb2 as pb
from llorch_serve.rpc.convert_embed import read_embed_request, write_embed_request
from llorch_serve.rpc.convert_score import read_score_request, write_score_request

P = TypeVar("P", TextPrompt | TokenPrompt, Prompt)

_IDS: Final = np.dtype("<u4")


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


_ENCODER: Final = msgspec.msgpack.Encoder()
_REQUEST: Final = msgspec.msgpack.Decoder(_Request)
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
