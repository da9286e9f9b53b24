"""Running streams and taking the time of every token's arrival; figures are computed afterwards."""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from llorch_serve.bench.workload import Workload
from llorch_serve.requests import GenerationRequest, GenerationUpdate, TextGenerator


@dataclass(slots=True)
class StreamRecord:
    """Arrival times of one stream's tokens, in seconds after the common start; tokens of one message share a
    time.

    cached_tokens: of its prompt, how many the KV cache held already; 0 where the backend is not told.
    """

    arrivals: list[float] = field(default_factory=list)
    cached_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Percentiles:
    """Median and 99th percentile, in milliseconds."""

    p50: float
    p99: float


@dataclass(frozen=True, slots=True)
class Figures:
    """Speed at a number of streams that start together.

    prefill_tokens_per_s: all prompt tokens over the time until every stream has its first token.
    decode_tokens_per_s: all later tokens over the time from there, added up over the streams.
    ttft_ms: time to first token. itl_ms: time between two tokens of a stream.
    """

    streams: int
    prefill_tokens_per_s: float
    decode_tokens_per_s: float
    ttft_ms: Percentiles
    itl_ms: Percentiles


class Backend(Protocol):
    """Runs requests that start together and records their tokens' arrivals."""

    def run(self, requests: Sequence[GenerationRequest]) -> list[StreamRecord]:
        """Return a record for each request, when all have ended. Raises the first error of any."""


class LocalBackend:
    """An engine in this process; times are taken on its own thread."""

    def __init__(self, generator: TextGenerator) -> None:
        self._generator = generator

    def run(self, requests: Sequence[GenerationRequest]) -> list[StreamRecord]:
        """See :class:`Backend`."""
        sink = _RecordingSink(requests)
        for request in requests:
            self._generator.submit(request, sink)
        sink.done.wait()
        if sink.error is not None:
            raise sink.error
        return [sink.records[request.request_id] for request in requests]


class _RecordingSink:
    def __init__(self, requests: Sequence[GenerationRequest]) -> None:
        self.records = {request.request_id: StreamRecord() for request in requests}
        self.done = threading.Event()
        self.error: Exception | None = None
        self._open = len(requests)
        self._start = time.perf_counter()

    def deliver(self, updates: list[GenerationUpdate]) -> None:
        now = time.perf_counter() - self._start
        for update in updates:
            record = self.records[update.request_id]
            record.arrivals += [now] * len(update.token_ids)
            if update.completion is not None:
                record.cached_tokens = update.completion.cached_tokens
            if update.is_last:
                self.error = self.error or update.error
                self._open -= 1
        if self._open == 0:
            self.done.set()


class RemoteBackend:
    """A worker behind gRPC; one thread a stream, times taken where the client receives."""

    def __init__(self, generate: Callable[[GenerationRequest], Iterator[GenerationUpdate]]) -> None:
        self._generate = generate

    def run(self, requests: Sequence[GenerationRequest]) -> list[StreamRecord]:
        """See :class:`Backend`."""
        records = [StreamRecord() for _ in requests]
        errors: list[Exception] = []
        together = threading.Barrier(len(requests))

        def follow(request: GenerationRequest, record: StreamRecord) -> None:
            try:
                updates = self._generate(request)
                together.wait()
                start = time.perf_counter()
                for update in updates:
                    if update.token_ids:
                        now = time.perf_counter() - start
                        record.arrivals += [now] * len(update.token_ids)
            except threading.BrokenBarrierError:
                pass  # another stream could not start, and has said why
            except Exception as error:  # noqa: BLE001 - raised again on the caller's thread
                errors.append(error)
                together.abort()

        threads = [
            threading.Thread(target=follow, args=pair, daemon=True)
            for pair in zip(requests, records, strict=True)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if errors:
            raise errors[0]
        return records


def measure(
    backend: Backend, work: Workload, streams: int, *, repeat: int, progress: Callable[[], None]
) -> list[Figures]:
    """Run ``streams`` streams once to warm up and ``repeat`` times for the record; return the figures of
    those.
    """
    runs = []
    for index in range(repeat + 1):
        requests = [work.request(str(uuid.uuid4())) for _ in range(streams)]
        records = backend.run(requests)
        if index > 0:
            runs.append(figures(records, prompt_tokens=len(work.prompt_ids)))
        progress()
    return runs


def figures(records: Sequence[StreamRecord], *, prompt_tokens: int) -> Figures:
    """Compute the figures of one run from its arrivals."""
    firsts = [record.arrivals[0] for record in records]
    all_started, end = max(firsts), max(record.arrivals[-1] for record in records)
    later = sum(time_ > all_started for record in records for time_ in record.arrivals)
    gaps = np.concatenate([_token_times(record.arrivals) for record in records])
    return Figures(
        streams=len(records),
        prefill_tokens_per_s=prompt_tokens * len(records) / all_started,
        decode_tokens_per_s=later / (end - all_started) if end > all_started else 0.0,
        ttft_ms=_percentiles(np.array(firsts)),
        itl_ms=_percentiles(gaps),
    )


def _token_times(arrivals: Sequence[float]) -> np.ndarray:
    """Return the time of each token after the first: those of one message share what passed since the one
    before.
    """
    moments, counts = np.unique(arrivals, return_counts=True)
    with_first = np.zeros(counts[0] - 1)
    return np.concatenate([with_first, np.repeat(np.diff(moments) / counts[1:], counts[1:])])


def _percentiles(seconds: np.ndarray) -> Percentiles:
    if not seconds.size:
        return Percentiles(0.0, 0.0)
    p50, p99 = np.percentile(seconds, [50, 99]) * 1000
    return Percentiles(float(p50), float(p99))
