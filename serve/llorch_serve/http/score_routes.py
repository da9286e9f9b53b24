"""POST /v1/score: how likely each of some continuations of a context is, as ``Score`` tells it over gRPC.

Input: a context (a text, token ids or a conversation) and its continuations. Output: the log-probability of
each, in their order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from llorch_serve.calls.callers import Caller
from llorch_serve.errors import FieldViolation, InvalidRequestError
from llorch_serve.http.fields import read_struct
from llorch_serve.http.openai_logprobs import chat_logprobs
from llorch_serve.http.openai_requests import check_model
from llorch_serve.http.prompt_bodies import ConversationBody, choose_one, own_name, read_conversation
from llorch_serve.http.service import AnswerPlan, Plan
from llorch_serve.http.whole_answers import WholeAnswers
from llorch_serve.requests import (
    ContinuationScore,
    GenerationUpdate,
    ModelInfo,
    ScoreRequest,
    TextPrompt,
    TokenPrompt,
)
from llorch_serve.worker.scoring import MAX_CONTINUATIONS

_PREFIX: Final = "score-"


class ScoreBody(ConversationBody, kw_only=True):
    """POST /v1/score. context: a text or token ids, in place of messages. continuations: a text or token ids
    each. logprobs: 0 to 20: list those of each token, and so many of the likeliest ones.
    """

    continuations: list[str | list[int]]
    context: str | list[int] | None = None
    logprobs: int | None = None


@dataclass(frozen=True, slots=True)
class _Shape:
    """What the answer says beside the scores. listed: each token's log-probability, too."""

    answer_id: str
    model: str
    listed: bool


def score_dialect() -> WholeAnswers:
    """Return POST /v1/score."""
    return WholeAnswers(_read, _answer)


def _read(raw: bytes, info: ModelInfo, caller: Caller) -> Plan:
    """Return what a body asks for. Raises InvalidRequestError or ModelMismatchError."""
    body = read_struct(raw, ScoreBody, ignorable=False)
    choose_one(body, "context", body.context)
    if len(body.continuations) > MAX_CONTINUATIONS:
        found = f"found {len(body.continuations)}, expected 1 to {MAX_CONTINUATIONS}"
        raise InvalidRequestError([FieldViolation("continuations", found)])
    bad: list[FieldViolation] = []
    continuations = tuple(
        _prompt(each, f"continuations[{index}]", bad) for index, each in enumerate(body.continuations)
    )
    check_model(body.model, info)
    if body.context is None:
        context = read_conversation(body, info, caller)
    else:
        context = _prompt(body.context, "context", bad)
    if bad:
        raise InvalidRequestError(bad)
    request = ScoreRequest(
        caller.answer_id(_PREFIX),
        context,
        continuations,
        logprobs=body.logprobs,
        client_id=caller.client,
        correlation_id=caller.correlation_id,
        traceparent=caller.traceparent,
    )
    shape = _Shape(request.request_id, body.model or info.names[0], body.logprobs is not None)
    return Plan((request,), AnswerPlan(False, lambda name: own_name(name, "context"), shape))


def _prompt(given: str | list[int], path: str, bad: list[FieldViolation]) -> TextPrompt | TokenPrompt:
    if isinstance(given, str):
        return TextPrompt(given)
    if given and min(given) < 0:
        bad.append(FieldViolation(path, f"found {min(given)}, expected token ids from 0"))
    return TokenPrompt(tuple(given))


def _answer(shape: _Shape, updates: Sequence[GenerationUpdate]) -> dict[str, Any]:
    scores = [update.score for update in updates if update.score is not None]
    tokens = sum(score.token_count for score in scores) + (scores[0].context_tokens if scores else 0)
    return {
        "id": shape.answer_id,
        "object": "list",
        "model": shape.model,
        "data": [_score(score, index, listed=shape.listed) for index, score in enumerate(scores)],
        "usage": {"prompt_tokens": tokens, "completion_tokens": 0, "total_tokens": tokens},
    }


def _score(score: ContinuationScore, index: int, *, listed: bool) -> dict[str, Any]:
    return {
        "index": index,
        "object": "score",
        "logprob": score.logprob,
        "is_greedy": score.is_greedy,
        "token_count": score.token_count,
        "context_tokens": score.context_tokens,
        "cached_tokens": score.cached_tokens,
        "logprobs": chat_logprobs(score.logprobs)["content"] if listed else None,
    }
