"""Figures of a benchmark, from arrival times that were chosen so that every number can be worked out by
hand.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import cast

import pytest

from llorch_serve.bench.measure import (
    LocalBackend,
    Percentiles,
    RemoteBackend,
    StreamRecord,
    figures,
    measure,
)
from llorch_serve.bench.resources import peak_rss_mib, software
from llorch_serve.bench.workload import Workload, sample_text, text_prompt
from llorch_serve.engine.sequence import FinishReason
from llorch_serve.errors import InvalidRequestError, ProviderError, UsageError
from llorch_serve.requests import (
    Completion,
    GenerationRequest,
    GenerationUpdate,
    Prompt,
    TextGenerator,
    TextPrompt,
    Timings,
    TokenPrompt,
    UpdateSink,
)
from llorch_serve.worker.local import stream
from support.harness.worker import make_session, make_worker


def test_one_stream() -> None:
    found = figures([StreamRecord([0.5, 0.6, 0.7, 0.9])], prompt_tokens=100)
    assert found.streams == 1
    assert found.prefill_tokens_per_s == pytest.approx(200)
    assert found.decode_tokens_per_s == pytest.approx(3 / 0.4)
    assert found.ttft_ms == Percentiles(pytest.approx(500), pytest.approx(500))
    assert found.itl_ms.p50 == pytest.approx(100)
    assert found.itl_ms.p99 == pytest.approx(198)  # 98 % of the way from 100 to 200


def test_several_streams_count_from_when_the_last_has_started() -> None:
    records = [StreamRecord([1.0, 1.5, 2.0, 2.5]), StreamRecord([2.0, 2.5, 3.0]), StreamRecord([1.5, 4.0])]
    found = figures(records, prompt_tokens=10)
    assert found.prefill_tokens_per_s == pytest.approx(30 / 2.0)
    # After 2.0 s: one token of the first stream, two of the second, one of the third, until 4.0 s.
    assert found.decode_tokens_per_s == pytest.approx(4 / 2.0)
    assert found.ttft_ms.p50 == pytest.approx(1500)
    assert found.ttft_ms.p99 == pytest.approx(1990)
    assert found.itl_ms.p50 == pytest.approx(500)


def test_tokens_of_one_message_share_the_time_that_they_took() -> None:
    found = figures([StreamRecord([1.0, 2.0, 2.0])], prompt_tokens=8)
    assert found.decode_tokens_per_s == pytest.approx(2 / 1.0)
    assert found.itl_ms == Percentiles(pytest.approx(500), pytest.approx(500))
    with_first = figures([StreamRecord([1.0, 1.0, 2.0])], prompt_tokens=8)
    assert with_first.itl_ms.p50 == pytest.approx(500)  # of 0 and 1000
    assert with_first.decode_tokens_per_s == pytest.approx(1 / 1.0)


def test_nothing_after_the_first_token_is_no_speed_and_no_division_by_zero() -> None:
    found = figures([StreamRecord([1.0])], prompt_tokens=8)
    assert (found.decode_tokens_per_s, found.itl_ms) == (0.0, Percentiles(0.0, 0.0))


class Recorded:
    """A backend that plays back arrivals and keeps the requests."""

    def __init__(self, runs: Sequence[list[float]]) -> None:
        self._runs = iter(runs)
        self.requests: list[GenerationRequest] = []

    def run(self, requests: Sequence[GenerationRequest]) -> list[StreamRecord]:
        self.requests += requests
        arrivals = next(self._runs)
        return [StreamRecord(arrivals) for _ in requests]


def test_the_first_run_warms_up_and_the_others_count() -> None:
    backend = Recorded([[9.0, 99.0], [1.0, 2.0], [2.0, 2.1], [4.0, 4.5]])
    progress = itertools.count()
    found = measure(
        backend, Workload((1, 2, 3), 2, 256), 2, repeat=3, progress=lambda: next(progress) and None
    )
    assert [run.prefill_tokens_per_s for run in found] == pytest.approx(
        [2 * 3 / 1.0, 2 * 3 / 2.0, 2 * 3 / 4.0]
    )
    assert [run.ttft_ms.p50 for run in found] == pytest.approx([1000, 2000, 4000])
    assert next(progress) == 4
    assert len({request.request_id for request in backend.requests}) == 2 * 4


def test_the_work_is_greedy_and_of_fixed_length() -> None:
    work = Workload((4, 5, 6), 7, 256)
    request = work.request("r")
    assert isinstance(request.prompt, TokenPrompt)
    assert request.prompt.token_ids[1:] == (5, 6)
    sampling = request.sampling
    assert (sampling.temperature, sampling.repetition_penalty) == (0, 1)
    assert (sampling.max_tokens, sampling.ignore_eos) == (7, True)
    prompts = [request.prompt, *(work.request(f"r{i}").prompt for i in range(255))]
    assert {prompt.token_ids[0] for prompt in prompts} == set(range(256)), "two prompts share a prefix"


@pytest.mark.parametrize("kind", ["local", "remote"])
def test_backends_record_every_token_of_every_stream(tmp_path: Path, kind: str) -> None:
    session = make_session()
    worker = make_worker(tmp_path, session)
    work = Workload((40, 41, 42), 6, 256)
    try:
        backend = LocalBackend(worker) if kind == "local" else RemoteBackend(lambda r: stream(worker, r))
        records = backend.run([work.request(f"r{i}") for i in range(5)])
    finally:
        worker.close()
    assert len(records) == 5
    for record in records:
        assert len(record.arrivals) == 6
        assert record.arrivals == sorted(record.arrivals)
        assert record.arrivals[0] > 0


@pytest.mark.parametrize("kind", ["local", "remote"])
def test_a_streams_error_is_the_runs(tmp_path: Path, kind: str) -> None:
    def fail(_call: object) -> None:
        raise ProviderError("no luck")

    worker = make_worker(tmp_path, make_session(before_call=fail))
    try:
        backend = LocalBackend(worker) if kind == "local" else RemoteBackend(lambda r: stream(worker, r))
        with pytest.raises(ProviderError, match="no luck"):
            backend.run([Workload((1,), 2, 256).request(f"r{i}") for i in range(2)])
        with pytest.raises(InvalidRequestError):
            backend.run([Workload((1, 999), 2, 16).request("r")])
    finally:
        worker.close()


def test_remote_streams_start_together() -> None:
    asked: list[str] = []

    def generate(request: GenerationRequest) -> Iterator[GenerationUpdate]:
        asked.append(request.request_id)
        return updates(request.request_id)

    def updates(name: str) -> Iterator[GenerationUpdate]:
        assert len(asked) == 4, "a stream began before all had been asked for"
        yield GenerationUpdate(name, "", (1, 2))
        yield GenerationUpdate(name, "", (3,))

    records = RemoteBackend(generate).run([Workload((1,), 3, 256).request(f"r{i}") for i in range(4)])
    for record in records:
        first, second, third = record.arrivals
        assert first == second <= third


def test_a_stream_that_cannot_start_ends_the_others() -> None:
    def generate(request: GenerationRequest) -> Iterator[GenerationUpdate]:
        if request.request_id == "r2":
            raise ProviderError("no luck")
        return iter(())

    with pytest.raises(ProviderError, match="no luck"):
        RemoteBackend(generate).run([Workload((1,), 3, 256).request(f"r{i}") for i in range(4)])


def test_local_tokens_of_one_update_share_a_time() -> None:
    class Generator:
        def submit(self, request: GenerationRequest, sink: UpdateSink) -> None:
            done = Completion(FinishReason.LENGTH, None, 1, 3, 0, Timings(0, 0, 0))
            sink.deliver([GenerationUpdate(request.request_id, "", (1, 2))])
            sink.deliver([GenerationUpdate(request.request_id, "", (3,), done)])

    backend = LocalBackend(cast("TextGenerator", Generator()))
    (record,) = backend.run([Workload((1,), 3, 256).request("r")])
    first, second, third = record.arrivals
    assert first == second <= third


def tokenize(prompt: Prompt) -> tuple[tuple[int, ...], str]:
    assert isinstance(prompt, TextPrompt)
    return (1, 2, 3), prompt.text


def test_a_prompt_of_any_length_is_made_from_the_sample_text() -> None:
    assert text_prompt(2, tokenize) == (1, 2)
    assert text_prompt(7, tokenize) == (1, 2, 3, 1, 2, 3, 1)
    assert len(sample_text()) > 5000
    with pytest.raises(UsageError, match="--prompt-tokens is 0"):
        text_prompt(0, tokenize)


def test_peak_memory_is_in_mib() -> None:
    assert 10 < peak_rss_mib() < 100_000


def test_software_is_what_decides_speed() -> None:
    names = [name.split()[0] for name in software()]
    assert names[0] == "llorch"
    assert names[-1] == "Python"
    assert "onnxruntime" in names
