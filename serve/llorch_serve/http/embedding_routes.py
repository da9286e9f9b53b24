"""POST /v1/embeddings: a vector for each of some texts, as OpenAI's clients ask for them.

Input: a text, token ids, or a list of either. Output: the vectors in their order, as numbers or as base64 of
little-endian float32.
"""

from __future__ import annotations

import base64
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

import msgspec

from llorch_serve.calls.callers import Caller
from llorch_serve.errors import FieldViolation, InvalidRequestError
from llorch_serve.http.fields import read_struct
from llorch_serve.http.ignored_fields import noting
from llorch_serve.http.openai_prompts import read_prompts
from llorch_serve.http.openai_requests import check_model
from llorch_serve.http.service import AnswerPlan, Plan
from llorch_serve.http.unknown_fields import UnknownFields
from llorch_serve.http.whole_answers import WholeAnswers
from llorch_serve.requests import (
    EmbedRequest,
    GenerationUpdate,
    ModelInfo,
    TextEmbedding,
)
from llorch_serve.worker.embeddings import MAX_TEXTS

_PREFIX: Final = "embd-"


class EmbeddingsBody(msgspec.Struct, kw_only=True):
    """POST /v1/embeddings. Absent and null are the same.

    truncate_prompt_tokens: beyond OpenAI's schema: cut texts that have more tokens; -1: than the context
        holds.
    """

    input: str | list[str | int | list[int]]
    model: str | None = None
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: int | None = None
    truncate_prompt_tokens: int | None = None
    # Without effect on the answer.
    user: str | None = None


@dataclass(frozen=True, slots=True)
class _Shape:
    """What the answer says beside the vectors, and how they are written. ignored: fields that were left
    aside.
    """

    model: str
    in_base64: bool
    ignored: tuple[str, ...]


def embeddings_dialect(unknown: UnknownFields = UnknownFields.REFUSE) -> WholeAnswers:
    """Return POST /v1/embeddings. unknown: what becomes of fields that the route does not know."""
    return WholeAnswers(noting(_read, unknown), _answer)


def _read(raw: bytes, info: ModelInfo, caller: Caller, ignored: list[str] | None) -> Plan:
    body = read_struct(raw, EmbeddingsBody, ignored)
    check_model(body.model, info)
    bad: list[FieldViolation] = []
    texts = read_prompts(body.input, bad, name="input", most=MAX_TEXTS)
    if bad:
        raise InvalidRequestError(bad)
    request = EmbedRequest(
        caller.answer_id(_PREFIX),
        tuple(texts),
        dimensions=body.dimensions,
        truncate_prompt_tokens=body.truncate_prompt_tokens,
        client_id=caller.client,
        correlation_id=caller.correlation_id,
        traceparent=caller.traceparent,
    )
    name = body.model or info.names[0]
    shape = _Shape(name, body.encoding_format == "base64", tuple(ignored or ()))
    return Plan((request,), AnswerPlan(False, _own_name, shape))


def _own_name(field: str) -> str:
    """Return a field's name in the body."""
    return f"input{field.removeprefix('inputs')}" if field.startswith("inputs") else field


def _answer(shape: _Shape, updates: Sequence[GenerationUpdate]) -> dict[str, Any]:
    found = [update.embedding for update in updates if update.embedding is not None]
    tokens = sum(each.token_count for each in found)
    return {
        "object": "list",
        "model": shape.model,
        "data": [
            {"object": "embedding", "index": index, "embedding": _written(each, in_base64=shape.in_base64)}
            for index, each in enumerate(found)
        ],
        "usage": {"prompt_tokens": tokens, "total_tokens": tokens},
        **({"llorch": {"ignored": list(shape.ignored)}} if shape.ignored else {}),
    }


def _written(embedding: TextEmbedding, *, in_base64: bool) -> msgspec.Raw:
    """Return a vector as JSON."""
    if in_base64:
        coded = base64.b64encode(embedding.values.astype("<f4").tobytes()).decode()
        return msgspec.Raw(msgspec.json.encode(coded))
    return msgspec.Raw(msgspec.json.encode(embedding.values.tolist()))
