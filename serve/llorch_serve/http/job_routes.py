"""The API of the worker that this one descends from: POST /v1/inference (also /execute) and POST /cancel.

Input: a job with its id, prompt and sampling. Output: the events ``started``, ``token``, ``metrics``, then
exactly one of ``end`` and ``error``, then ``[DONE]``. The job's id is the request's id.
"""

from __future__ import annotations

import secrets
import time
from dataclasses import dataclass
from typing import Any

import msgspec

from llorch_serve.calls.callers import Caller
from llorch_serve.calls.live_call import LiveCall, check_completed
from llorch_serve.engine.sequence import FinishReason
from llorch_serve.errors import FieldViolation, InvalidRequestError
from llorch_serve.http.exchange import Exchange
from llorch_serve.http.fields import read_struct
from llorch_serve.http.problems import Problem
from llorch_serve.http.service import AnswerPlan, Plan
from llorch_serve.requests import Completion, GenerationRequest, ModelInfo, TextPrompt
from llorch_serve.sampling.params import SamplingParams

MAX_JOB_ID_BYTES = 128


class JobBody(msgspec.Struct, kw_only=True):
    """POST /v1/inference. Absent and null are the same."""

    prompt: str
    job_id: str | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    seed: int | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    stop: list[str] = msgspec.field(default_factory=list)


class CancelBody(msgspec.Struct):
    """POST /cancel."""

    job_id: str


@dataclass(frozen=True, slots=True)
class _Job:
    """What a job's events say beside its text. model: the served one's id. stops: its stop strings."""

    job_id: str
    model: str
    stops: tuple[str, ...]


class JobDialect:
    """POST /v1/inference. Implements :class:`llorch_serve.http.service.Dialect`."""

    def read(self, raw: bytes, info: ModelInfo, caller: Caller) -> Plan:
        """Return what a body asks for. Raises InvalidRequestError."""
        body = read_struct(raw, JobBody, ignorable=False)
        job_id = secrets.token_hex(8) if body.job_id is None else body.job_id
        check_job_id(job_id)
        sampling = SamplingParams(
            temperature=body.temperature,
            top_k=body.top_k,
            top_p=body.top_p,
            min_p=body.min_p,
            repetition_penalty=body.repetition_penalty,
            seed=body.seed,
            max_tokens=body.max_tokens,
            stop=tuple(body.stop),
        )
        request = GenerationRequest(
            job_id,
            TextPrompt(body.prompt),
            sampling,
            client_id=caller.client,
            correlation_id=caller.correlation_id,
            traceparent=caller.traceparent,
        )
        detail = _Job(job_id, info.model_id, sampling.stop)
        return Plan((request,), AnswerPlan(stream=True, names=_rename, detail=detail))

    async def answer(self, plan: AnswerPlan, calls: list[LiveCall], exchange: Exchange) -> None:
        """Send the job's events."""
        job: _Job = plan.detail
        (call,) = calls
        started = {"job_id": job.job_id, "model": job.model, "started_at": str(int(time.time()))}
        await exchange.start_events()
        await exchange.send_events(("started", started))
        count, completion = 0, None
        while completion is None:
            (update,) = await call.take()  # a job has one answer
            check_completed(update)
            completion = update.completion
            if update.text:
                await exchange.send_events(("token", {"t": update.text, "i": count}))
                count += 1
        await exchange.send_events(("metrics", _metrics(completion)), ("end", _end(completion, job.stops)))
        await exchange.end_events()

    def refusal(self, problem: Problem) -> object:
        """Return the body of a refusal."""
        return problem.plain()

    async def send_failure(self, problem: Problem, exchange: Exchange) -> None:
        """Send the event ``error``, and end the answer."""
        await exchange.send_events(("error", {"code": problem.code.upper(), "message": problem.message}))
        await exchange.end_events()


def check_job_id(job_id: str) -> None:
    """Raise InvalidRequestError for a job id that is empty or too long."""
    size = len(job_id.encode("utf-8", "surrogatepass"))
    if not 0 < size <= MAX_JOB_ID_BYTES:
        found = f"found {size} bytes, expected 1 to {MAX_JOB_ID_BYTES}"
        raise InvalidRequestError([FieldViolation("job_id", found)])


def _rename(field: str) -> str:
    if field.startswith("input"):
        return "prompt"
    return "job_id" if field == "request_id" else field.removeprefix("sampling.")


def _metrics(completion: Completion) -> dict[str, Any]:
    timings = completion.timings
    speed = (completion.generated_tokens - 1) / timings.decode_s if timings.decode_s > 0 else None
    return {
        "tokens_per_sec": speed,
        "prompt_tokens": completion.prompt_tokens,
        "cached_tokens": completion.cached_tokens,
        "queue_time_ms": round(timings.queue_s * 1000),
        "prefill_time_ms": round(timings.prefill_s * 1000),
        "seed": completion.seed,
    }


def _end(completion: Completion, stops: tuple[str, ...]) -> dict[str, Any]:
    matched = completion.stop_matched if completion.stop_matched in stops else None
    if completion.reason is FinishReason.LENGTH:
        reason = "MAX_TOKENS"
    else:
        reason = "EOS" if matched is None else "STOP_SEQUENCE"
    return {
        "tokens_out": completion.generated_tokens,
        "decode_time_ms": round(completion.timings.decode_s * 1000),
        "stop_reason": reason,
        "stop_sequence_matched": matched,
    }
