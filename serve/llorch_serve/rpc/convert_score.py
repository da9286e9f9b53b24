"""The bridge between protobuf's and our own requests and answers of ``Score``, as ``convert.py`` is for the
rest.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from llorch_serve.errors import FieldViolation, InvalidRequestError
from llorch_serve.requests import ContinuationScore, GenerationUpdate, ScoreRequest, TextPrompt, TokenPrompt
from llorch_serve.rpc import worker_pb2 as pb
from llorch_serve.rpc.convert import read_ids
from llorch_serve.rpc.convert_fields import set_field
from llorch_serve.rpc.convert_logprobs import read_logprobs, write_logprobs
from llorch_serve.rpc.convert_prompt import fill_input, read_input, read_tokens
from llorch_serve.worker.scoring import MAX_CONTINUATIONS


def read_score_request(message: pb.ScoreRequest, *, connection: str = "") -> ScoreRequest:
    """Return the request; ids that are not sent are chosen as for generation. Raises InvalidRequestError."""
    bad: list[FieldViolation] = []
    context = read_input(message.context, bad, "context")
    request_id = read_ids(message, bad)
    if len(message.continuations) > MAX_CONTINUATIONS:
        found = f"found {len(message.continuations)} items, expected at most {MAX_CONTINUATIONS}"
        bad.append(FieldViolation("continuations", found))
        raise InvalidRequestError(bad)
    continuations = [
        _read_continuation(item, f"continuations[{index}]", bad)
        for index, item in enumerate(message.continuations)
    ]
    if bad or context is None:
        raise InvalidRequestError(bad)
    return ScoreRequest(
        request_id,
        context,
        tuple(continuation for continuation in continuations if continuation is not None),
        logprobs=message.logprobs if message.HasField("logprobs") else None,
        client_id=message.client_id or connection,
        priority=message.priority,
        fingerprint=message.fingerprint if message.HasField("fingerprint") else None,
    )


def _read_continuation(
    message: pb.Continuation, field: str, bad: list[FieldViolation]
) -> TextPrompt | TokenPrompt | None:
    kind = message.WhichOneof("kind")
    if kind == "text":
        return TextPrompt(message.text)
    if kind == "tokens":
        return read_tokens(message.tokens, f"{field}.tokens.ids", bad)
    bad.append(FieldViolation(field, "not set, expected one of text and tokens"))
    return None


def write_score_request(request: ScoreRequest) -> pb.ScoreRequest:
    """Return the message. Raises InvalidRequestError for values that no message can carry."""
    bad: list[FieldViolation] = []
    message = pb.ScoreRequest()
    set_field(message, "request_id", request.request_id, "request_id", bad)
    if request.client_id:
        set_field(message, "client_id", request.client_id, "client_id", bad)
    if request.priority:
        set_field(message, "priority", request.priority, "priority", bad)
    set_field(message, "fingerprint", request.fingerprint, "fingerprint", bad)
    if request.logprobs is not None:
        set_field(message, "logprobs", request.logprobs, "logprobs", bad)
    fill_input(message.context, request.context, bad, "context")
    for index, continuation in enumerate(request.continuations):
        fill_input(message.continuations.add(), continuation, bad, f"continuations[{index}]")
    if bad:
        raise InvalidRequestError(bad)
    return message


def write_scores(request_id: str, updates: Iterable[GenerationUpdate]) -> pb.ScoreResponse:
    """Return the message of a request's scores, one update for each."""
    response = pb.ScoreResponse(request_id=request_id)
    for update in sorted(updates, key=lambda update: update.index):
        score = update.score
        assert score is not None
        response.scores.add(
            logprob=score.logprob,
            is_greedy=score.is_greedy,
            token_count=score.token_count,
            context_tokens=score.context_tokens,
            cached_tokens=score.cached_tokens,
            logprobs=write_logprobs(score.logprobs),
        )
    return response


def read_scores(message: pb.ScoreResponse) -> Sequence[ContinuationScore]:
    """Return the scores in the order of the continuations."""
    return [
        ContinuationScore(
            logprob=score.logprob,
            is_greedy=score.is_greedy,
            token_count=score.token_count,
            context_tokens=score.context_tokens,
            cached_tokens=score.cached_tokens,
            logprobs=read_logprobs(score.logprobs),
        )
        for score in message.scores
    ]
