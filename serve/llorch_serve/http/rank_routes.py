"""POST /v1/rerank: how relevant documents are to a query, the most relevant first, in the shape that clients
of Jina and Cohere read.

Input: a query and documents. Output: the documents' places with their relevance, 0 to 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from llorch_serve.calls.callers import Caller
from llorch_serve.errors import FieldViolation, InvalidRequestError
from llorch_serve.http.fields import read_struct
from llorch_serve.http.ignored_fields import noting
from llorch_serve.http.openai_requests import check_model
from llorch_serve.http.service import AnswerPlan, Plan
from llorch_serve.http.unknown_fields import UnknownFields
from llorch_serve.http.whole_answers import WholeAnswers
from llorch_serve.requests import GenerationUpdate, ModelInfo, RankRequest
from llorch_serve.worker.ranking import relevance

_PREFIX: Final = "rerank-"


class TextDocument(msgspec.Struct, forbid_unknown_fields=True):
    """A document as an object."""

    text: str


class RerankBody(msgspec.Struct, kw_only=True):
    """POST /v1/rerank. Absent and null are the same.

    top_n: return so many, the most relevant ones. return_documents: with their texts.
    instruction: beyond Jina's and Cohere's schema: what makes a document relevant.
    """

    query: str
    documents: list[str | TextDocument]
    model: str | None = None
    top_n: int | None = None
    return_documents: bool = False
    instruction: str | None = None


@dataclass(frozen=True, slots=True)
class _Shape:
    """What the answer says beside the scores. documents: their texts, if they are wanted. ignored: fields
    that were left aside.
    """

    answer_id: str
    model: str
    top_n: int | None
    documents: tuple[str, ...] | None
    ignored: tuple[str, ...]


def rerank_dialect(unknown: UnknownFields = UnknownFields.REFUSE) -> WholeAnswers:
    """Return POST /v1/rerank. unknown: what becomes of fields that the route does not know."""
    return WholeAnswers(noting(_read, unknown), _answer)


def _read(raw: bytes, info: ModelInfo, caller: Caller, ignored: list[str] | None) -> Plan:
    body = read_struct(raw, RerankBody, ignored)
    check_model(body.model, info)
    if body.top_n is not None and body.top_n < 1:
        found = f"found {body.top_n}, expected at least 1, or leaving it out"
        raise InvalidRequestError([FieldViolation("top_n", found)])
    documents = tuple(each if isinstance(each, str) else each.text for each in body.documents)
    request = RankRequest(
        caller.answer_id(_PREFIX),
        body.query,
        documents,
        instruction=body.instruction,
        client_id=caller.client,
        correlation_id=caller.correlation_id,
        traceparent=caller.traceparent,
    )
    shape = _Shape(
        request.request_id,
        body.model or info.names[0],
        body.top_n,
        documents if body.return_documents else None,
        tuple(ignored or ()),
    )
    return Plan((request,), AnswerPlan(False, lambda name: name, shape))


def _answer(shape: _Shape, updates: Sequence[GenerationUpdate]) -> dict[str, Any]:
    scores = [update.score for update in updates if update.score is not None]
    found = [relevance(yes, no) for yes, no in zip(scores[::2], scores[1::2], strict=True)]
    order = sorted(range(len(found)), key=lambda index: (-found[index], index))
    tokens = sum(score.context_tokens for score in scores[::2])
    return {
        "id": shape.answer_id,
        "model": shape.model,
        "results": [
            {
                "index": index,
                "relevance_score": found[index],
                **({} if shape.documents is None else {"document": {"text": shape.documents[index]}}),
            }
            for index in order[: shape.top_n]
        ],
        "usage": {"prompt_tokens": tokens, "total_tokens": tokens},
        **({"llorch": {"ignored": list(shape.ignored)}} if shape.ignored else {}),
    }
