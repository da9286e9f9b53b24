"""Metrics for Prometheus, named as vLLM names them so that its dashboards need a new prefix and no more.

Input: what ``tap.py`` tells of requests, the generator's own figures at the moment of a scrape, and the HTTP
front's answers.
Output: Prometheus' text. Everything is in a registry of its own; a second worker in the process has a second
one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Final

from prometheus_client import (
    CONTENT_TYPE_LATEST,
    CollectorRegistry,
    Counter,
    Histogram,
    ProcessCollector,
    generate_latest,
)
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily
from prometheus_client.registry import Collector

from llorch_serve.cluster.interfaces import ReplicaLoad
from llorch_serve.cluster.totals import totals_of
from llorch_serve.engine.load import Load, StageTimes
from llorch_serve.engine.sequence import FinishReason
from llorch_serve.observe.observer import EMBED, SCORE, Ending, Observed
from llorch_serve.requests import TextGenerator

# Seconds. A small model on a CPU gives a token in 5 to 50 ms, a large one in a second.
_TOKEN_BUCKETS: Final = (0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1, 2.5, 5)
_FIRST_BUCKETS: Final = (0.005, 0.01, 0.02, 0.04, 0.06, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 80)
_REQUEST_BUCKETS: Final = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 60, 120, 240, 480, 960)
_LENGTH_BUCKETS: Final = (1, 4, 16, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072)
_REASONS: Final = {
    FinishReason.STOP: "stop",
    FinishReason.LENGTH: "length",
    FinishReason.TOOL_CALLS: "tool_calls",
    FinishReason.CANCELLED: "abort",
}


class Meters:
    """All metrics of a worker. Implements :class:`llorch_serve.observe.observer.Observer`.

    :meth:`expose` may be called from any thread.
    """

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        ProcessCollector(registry=self._registry)
        self._snapshot = _Snapshot()
        self._registry.register(self._snapshot)

        def seconds(name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
            return Histogram(f"llorch:{name}_seconds", text, registry=self._registry, buckets=buckets)

        def tokens(name: str, text: str) -> Histogram:
            return Histogram(f"llorch:{name}", text, registry=self._registry, buckets=_LENGTH_BUCKETS)

        self._first = seconds("time_to_first_token", "From submission to the first token.", _FIRST_BUCKETS)
        self._between = seconds(
            "inter_token_latency", "Between tokens of one request, after the first.", _TOKEN_BUCKETS
        )
        self._whole = seconds("e2e_request_latency", "From submission to the end.", _REQUEST_BUCKETS)
        self._queue = seconds(
            "request_queue_time", "From submission to the first prefill step.", _REQUEST_BUCKETS
        )
        self._prefill = seconds(
            "request_prefill_time", "From the first prefill step to the first token.", _REQUEST_BUCKETS
        )
        self._decode = seconds("request_decode_time", "From the first token to the last.", _REQUEST_BUCKETS)
        self._prompt = tokens("request_prompt_tokens", "Prompt tokens of requests that ended.")
        self._generated = tokens("request_generation_tokens", "Generated tokens of requests that ended.")
        self._ended = Counter(
            "llorch:request_success",
            "Requests that ended, by finish reason: stop, length, tool_calls, abort, or score of those for "
            "scores.",
            ("finished_reason",),
            registry=self._registry,
        )
        self._failed = Counter(
            "llorch:request_failure",
            "Requests that were refused or failed, by the error's class.",
            ("error",),
            registry=self._registry,
        )
        self._http = Counter(
            "llorch:http_requests",
            "Answers over HTTP, by route and status.",
            ("route", "status"),
            registry=self._registry,
        )
        for reason in (*_REASONS.values(), SCORE):
            self._ended.labels(reason)  # there from the start, at 0, so that rates have a beginning

    def watch(self, generator: TextGenerator) -> None:
        """Take a generator's own figures into every exposition from now on."""
        self._snapshot.generator = generator

    def expose(self) -> tuple[bytes, str]:
        """Return Prometheus' text of this moment and its content type."""
        return generate_latest(self._registry), CONTENT_TYPE_LATEST

    def count_http(self, route: str, status: int) -> None:
        """Count one answer over HTTP. Any thread."""
        self._http.labels(route, str(status)).inc()

    def begun(self, seen: Observed) -> None:
        """See the protocol: nothing is counted before the first token."""

    def produced(self, seen: Observed, tokens: int, gap_s: float | None) -> None:
        """Observe the time to the first token, or the gaps between later ones."""
        if gap_s is None:
            assert seen.first_s is not None
            self._first.observe(seen.first_s - seen.submitted_s)
            return
        for _ in range(tokens):  # guessed tokens come several at a time and share the time that they took
            self._between.observe(gap_s / tokens)

    def ended(self, seen: Observed, ending: Ending) -> None:
        """Observe what a whole request took, or count its failure."""
        if ending.completion is None:
            self._failed.labels(type(ending.error).__name__).inc()
            return
        completion, timings = ending.completion, ending.completion.timings
        self._ended.labels(SCORE if ending.scored else _REASONS[completion.reason]).inc()
        self._whole.observe(ending.at_s - seen.submitted_s)
        self._queue.observe(timings.queue_s)
        self._prompt.observe(completion.prompt_tokens)
        if seen.request.operation not in (SCORE, EMBED):
            self._generated.observe(completion.generated_tokens)
        if completion.generated_tokens:
            self._prefill.observe(timings.prefill_s)
            self._decode.observe(timings.decode_s)

    def close(self) -> None:
        """See the protocol: nothing is held back."""


class _Snapshot(Collector):
    """The generator's figures, read at the moment of a scrape."""

    def __init__(self) -> None:
        self.generator: TextGenerator | None = None

    def collect(self) -> Iterator[GaugeMetricFamily | CounterMetricFamily | InfoMetricFamily]:
        """Yield one metric after another; none before a generator is there."""
        if self.generator is None:
            return
        info, load = self.generator.model_info(), self.generator.load()
        yield InfoMetricFamily(
            "llorch:model",
            "What is served.",
            {
                "model_name": info.model_id,
                "fingerprint": info.fingerprint,
                "precision": info.precision,
                "provider": info.provider,
                "version": info.version,
            },
        )
        for name, text, value in _gauges(load):
            yield GaugeMetricFamily(f"llorch:{name}", text, value)
        for name, text, count in _counters(load):
            yield CounterMetricFamily(f"llorch:{name}", text, count)
        yield from _by_stage(load.stages)
        totals = totals_of(self.generator)
        if totals is not None:
            yield from _by_replica(totals.replicas)

    def describe(self) -> Iterable[GaugeMetricFamily]:
        """Return nothing, so that registering does not collect."""
        return ()


def _by_stage(stages: Sequence[StageTimes]) -> Iterator[CounterMetricFamily]:
    """Yield what each stage of a model that is cut into stages has done, under the label ``stage``."""
    if not stages:
        return
    calls = CounterMetricFamily("llorch:stage_calls", "Calls of a stage's graphs.", labels=("stage",))
    busy = CounterMetricFamily(
        "llorch:stage_busy_seconds", "Time that a stage was in calls.", labels=("stage",)
    )
    waiting = CounterMetricFamily(
        "llorch:stage_waiting_seconds",
        "Time that calls waited for a stage; the one they wait for is the bottleneck.",
        labels=("stage",),
    )
    for number, times in enumerate(stages):
        calls.add_metric((str(number),), times.calls)
        busy.add_metric((str(number),), times.busy_s)
        waiting.add_metric((str(number),), times.waiting_s)
    yield from (calls, busy, waiting)


def _by_replica(replicas: Sequence[ReplicaLoad]) -> Iterator[GaugeMetricFamily | CounterMetricFamily]:
    """Yield the figures of each replica that runs, under the label ``replica``."""
    yield GaugeMetricFamily("llorch:replicas", "Replicas that run.", len(replicas))
    if not replicas:
        return
    loads = [each.load for each in replicas]
    names = [(each.replica,) for each in replicas]
    for gauges in zip(*map(_gauges, loads), strict=True):
        name, text, _ = gauges[0]
        gauge = GaugeMetricFamily(f"llorch:replica_{name}", f"{text} By replica.", labels=("replica",))
        for labels, (_, _, value) in zip(names, gauges, strict=True):
            gauge.add_metric(labels, value)
        yield gauge
    for counters in zip(*map(_counters, loads), strict=True):
        name, text, _ = counters[0]
        counter = CounterMetricFamily(f"llorch:replica_{name}", f"{text} By replica.", labels=("replica",))
        for labels, (_, _, count) in zip(names, counters, strict=True):
            counter.add_metric(labels, count)
        yield counter
    memory = GaugeMetricFamily(
        "llorch:replica_memory_bytes", "Resident memory of the process. By replica.", labels=("replica",)
    )
    for each in replicas:
        memory.add_metric((each.replica,), each.memory_bytes)
    yield memory


def _gauges(load: Load) -> Iterator[tuple[str, str, float]]:
    used = load.kv_tokens_running + load.kv_tokens_idle
    yield "num_requests_running", "Requests that have a slot.", load.running
    yield "num_requests_waiting", "Requests that wait for a slot.", load.waiting
    yield "num_slots", "Requests that can run at once.", load.slots
    total = load.kv_tokens_total
    yield (
        "kv_cache_usage_perc",
        "Share of the KV cache that running requests use, 0 to 1.",
        _share(load.kv_tokens_running, total),
    )
    yield "kv_cache_filled_perc", "The same with what is kept for reuse.", _share(used, total)


def _share(part: int, whole: int) -> float:
    return part / whole if whole else 0.0


def _counters(load: Load) -> Iterator[tuple[str, str, int]]:
    yield "prompt_tokens", "Prompt tokens of requests that were started.", load.prompt_tokens
    yield "generation_tokens", "Tokens generated.", load.generated_tokens
    yield "prefix_cache_queries", "Prompt tokens looked up in the KV cache.", load.prompt_tokens
    yield "prefix_cache_hits", "Prompt tokens that the KV cache already held.", load.cached_tokens
    yield "spec_decode_num_draft_tokens", "Tokens guessed.", load.drafted_tokens
    yield "spec_decode_num_accepted_tokens", "Guessed tokens that were right.", load.accepted_tokens
