"""The figures of a run under load, by their definitions. Pure arithmetic on what ``records.py`` holds.

Of one request whose answer is whole, with n tokens, all times on the client's clock:

- TTFT: from when the request was due to its first message with tokens.
- E2E: from when it was due to the message that ends its answer.
- TPOT: (time of the last token - time of the first) / (n - 1); there is none for n = 1.
- ITL: n - 1 times, one for each token after the first. A message with k tokens that comes g after the one
  before with tokens gives k times g / k: its tokens share the time that they took. Further tokens of the
  first message give 0. So a request's times add up to what lies between its first and last token, and their
  mean is its TPOT, however tokens are bundled.
- gap: g itself, once a message: what a reader waits.
- lateness: from when it was due to when the client sent it.

A request is due when an open loop's plan says, and in a closed loop when its user's last one has ended. Were
an open loop's latencies counted from the sending, a client that stalls with the worker would leave out the
waiting it causes (coordinated omission).

Summaries are over whole answers alone: TTFT, E2E, TPOT and lateness by request, ITL by token, gaps by
message; percentiles are interpolated linearly. Rates divide by the run's duration, from its start to the end
of its last request. Tokens of a stream that failed count nowhere but in ``failures``.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from llorch_serve.bench.serving.records import LoadRun, RequestRecord


@dataclass(frozen=True, slots=True)
class Summary:
    """A distribution of times, in milliseconds."""

    mean: float
    p50: float
    p90: float
    p99: float
    max: float


@dataclass(frozen=True, slots=True)
class Failures:
    """Requests that failed with one status. after_first_token: how many of them had begun to answer. tokens:
    what those had sent.

    example: the words of the first one.
    """

    requests: int
    after_first_token: int
    tokens: int
    example: str


@dataclass(frozen=True, slots=True)
class Goodput:
    """Whole answers within every limit. limits_ms: by figure, ttft, tpot or e2e; a time equal to its limit
    keeps it.

    share: of all requests of the run, failed ones included. An answer of one token has no TPOT, and keeps its
        limit.
    """

    limits_ms: dict[str, float]
    requests: int
    share: float
    requests_per_s: float
    tokens_per_s: float


@dataclass(frozen=True, slots=True)
class ServingFigures:
    """What a run amounts to; see the module's head for the definitions.

    prompt_tokens, cached_tokens, generated_tokens: of whole answers; cached: of the prompts', what the
        worker's cache held.
    peak_in_flight: most requests that had been sent and had not ended.
    itl_ms: None where a message does not say how many tokens it carries (HTTP). late_ms: None in a closed
        loop.
    Any summary is None where nothing was seen that it could be over.
    """

    requests: int
    succeeded: int
    failed: int
    failures: dict[str, Failures]
    duration_s: float
    peak_in_flight: int
    prompt_tokens: int
    cached_tokens: int
    generated_tokens: int
    requests_per_s: float
    output_tokens_per_s: float
    total_tokens_per_s: float
    ttft_ms: Summary | None
    tpot_ms: Summary | None
    itl_ms: Summary | None
    gap_ms: Summary | None
    e2e_ms: Summary | None
    late_ms: Summary | None
    goodput: Goodput | None


def ttft_s(record: RequestRecord) -> float:
    """Return the time to the first token of a whole answer, in seconds."""
    return record.arrivals[0].at_s - record.scheduled_s


def e2e_s(record: RequestRecord) -> float:
    """Return the time to the end of a whole answer, in seconds."""
    return record.ended_s - record.scheduled_s


def tpot_s(record: RequestRecord) -> float | None:
    """Return the time per output token after the first, in seconds; None for an answer of one token."""
    later = record.tokens - 1
    return (record.arrivals[-1].at_s - record.arrivals[0].at_s) / later if later > 0 else None


def gaps_s(record: RequestRecord) -> list[float]:
    """Return the times between successive messages with tokens, in seconds."""
    moments = [arrival.at_s for arrival in record.arrivals]
    return [later - earlier for earlier, later in itertools.pairwise(moments)]


def itl_s(record: RequestRecord) -> list[float] | None:
    """Return the time of every token after the first, in seconds; None where a message does not say how many
    it carries.
    """
    counts = [arrival.tokens for arrival in record.arrivals]
    known = [count for count in counts if count is not None]
    if len(known) < len(counts):
        return None
    times = [0.0] * (known[0] - 1)
    for gap, count in zip(gaps_s(record), known[1:], strict=True):
        times += [gap / count] * count
    return times


def compute_figures(
    run: LoadRun, *, limits_ms: Mapping[str, float] | None = None, open_loop: bool
) -> ServingFigures:
    """Return the figures of a run. limits_ms: by figure, for goodput; None: none is computed."""
    whole = [record for record in run.records if record.failure is None]
    prompt = sum(record.usage.prompt_tokens for record in whole if record.usage is not None)
    generated = sum(record.tokens for record in whole)
    by_token = [itl_s(record) for record in whole]
    known = [times for times in by_token if times is not None]
    return ServingFigures(
        requests=len(run.records),
        succeeded=len(whole),
        failed=len(run.records) - len(whole),
        failures=_failures(run.records),
        duration_s=run.duration_s,
        peak_in_flight=_peak(run.records),
        prompt_tokens=prompt,
        cached_tokens=sum(record.usage.cached_tokens for record in whole if record.usage is not None),
        generated_tokens=generated,
        requests_per_s=len(whole) / run.duration_s,
        output_tokens_per_s=generated / run.duration_s,
        total_tokens_per_s=(prompt + generated) / run.duration_s,
        ttft_ms=summarise(map(ttft_s, whole)),
        tpot_ms=summarise(time for record in whole if (time := tpot_s(record)) is not None),
        itl_ms=summarise(time for times in known for time in times) if len(known) == len(whole) else None,
        gap_ms=summarise(gap for record in whole for gap in gaps_s(record)),
        e2e_ms=summarise(map(e2e_s, whole)),
        late_ms=summarise(record.sent_s - record.scheduled_s for record in run.records)
        if open_loop
        else None,
        goodput=None if limits_ms is None else _goodput(run, whole, limits_ms),
    )


def summarise(seconds: Iterable[float]) -> Summary | None:
    """Return the summary of times in seconds; None for none."""
    times = np.fromiter(seconds, np.float64) * 1000
    if not times.size:
        return None
    p50, p90, p99 = np.percentile(times, [50, 90, 99])
    return Summary(float(times.mean()), float(p50), float(p90), float(p99), float(times.max()))


def _goodput(run: LoadRun, whole: Sequence[RequestRecord], limits_ms: Mapping[str, float]) -> Goodput:
    good = [record for record in whole if _keeps(record, limits_ms)]
    return Goodput(
        limits_ms=dict(limits_ms),
        requests=len(good),
        share=len(good) / len(run.records),
        requests_per_s=len(good) / run.duration_s,
        tokens_per_s=sum(record.tokens for record in good) / run.duration_s,
    )


def _keeps(record: RequestRecord, limits_ms: Mapping[str, float]) -> bool:
    times = {"ttft": ttft_s(record), "tpot": tpot_s(record), "e2e": e2e_s(record)}
    return all((time := times[name]) is None or time * 1000 <= limit for name, limit in limits_ms.items())


def _failures(records: Iterable[RequestRecord]) -> dict[str, Failures]:
    """Count failed requests by status, the most frequent first."""
    by_status: dict[str, list[RequestRecord]] = {}
    for record in records:
        if record.failure is not None:
            by_status.setdefault(record.failure, []).append(record)
    ranked = sorted(by_status.items(), key=lambda item: (-len(item[1]), item[0]))
    return {
        status: Failures(
            requests=len(failed),
            after_first_token=sum(bool(record.arrivals) for record in failed),
            tokens=sum(record.tokens for record in failed),
            example=failed[0].message,
        )
        for status, failed in ranked
    }


def _peak(records: Iterable[RequestRecord]) -> int:
    """Return how many requests were in flight at once at most; one that ends as another is sent is not beside
    it.
    """
    changes = sorted(change for record in records for change in ((record.sent_s, 1), (record.ended_s, -1)))
    most = now = 0
    for _, change in changes:
        now += change
        most = max(most, now)
    return most
