"""Offline tests: which are run, what a run of each does, and figures against a stopwatch on the same model
calls.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from llorch_serve.bench import measure
from llorch_serve.bench.energy import EnergyMeter
from llorch_serve.bench.measure import LocalBackend, StreamRecord
from llorch_serve.bench.offline import DECODE_PROMPT, QUANTITIES, Offline, longest, plan_tests, summarise
from llorch_serve.bench.schema import OfflineTest
from llorch_serve.engine.capabilities import FULL
from llorch_serve.errors import UnsupportedError, UsageError
from llorch_serve.requests import GenerationRequest, TokenPrompt
from support.fakes.session import Call
from support.harness.worker import VOCAB, make_session, make_worker

NO_ENERGY = EnergyMeter((), "none")
MIXED = OfflineTest(work="mixed", prompt_tokens=8, generated_tokens=6, streams=2)


def test_every_work_at_every_depth_and_number_of_streams() -> None:
    tests = plan_tests(
        ["prefill", "decode", "mixed"], prompt_tokens=64, generated_tokens=16, depths=[0, 32], streams=[1, 8]
    )
    assert len(tests) == len(set(tests)) == 12
    assert {(test.prompt_tokens, test.generated_tokens) for test in tests if test.work == "prefill"} == {
        (64, 1)
    }
    decode = {(test.prompt_tokens, test.generated_tokens) for test in tests if test.work == "decode"}
    assert decode == {(DECODE_PROMPT, 16)}
    assert {(test.depth, test.streams) for test in tests} == {(0, 1), (0, 8), (32, 1), (32, 8)}
    assert longest(tests) == 32 + 64 + 16


@pytest.mark.parametrize(
    ("prompt", "depth", "says"),
    [(0, 0, "--prompt-tokens is 0"), (64, 15, "--depth is 15"), (1, 32, "the prompt has 1 tokens")],
)
def test_what_the_engine_cannot_measure_is_refused(prompt: int, depth: int, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        plan_tests(["mixed"], prompt_tokens=prompt, generated_tokens=4, depths=[0, depth], streams=[1])
    plan_tests(["mixed"], prompt_tokens=64, generated_tokens=4, depths=[0, 16], streams=[1])


class Played:
    """A backend that plays back arrivals, each request having had ``cached`` tokens, and keeps what is
    asked.
    """

    def __init__(self, arrivals: list[list[float]], cached: int = 0) -> None:
        self.asked: list[list[GenerationRequest]] = []
        self._arrivals = arrivals
        self._cached = cached

    def run(self, requests: Sequence[GenerationRequest]) -> list[StreamRecord]:
        self.asked.append(list(requests))
        return [StreamRecord(times, self._cached) for times in self._arrivals]


def prompts(requests: list[GenerationRequest]) -> list[tuple[int, ...]]:
    assert all(isinstance(request.prompt, TokenPrompt) for request in requests)
    return [request.prompt.token_ids for request in requests]  # type: ignore[union-attr]


def test_the_figures_of_each_work() -> None:
    arrivals = [[0.5, 0.75, 1.0], [1.0, 1.5, 2.0]]
    found = {
        work: Offline(Played(arrivals), (1, 2, 3), 256, NO_ENERGY).run(replace_work(work))
        for work in ("prefill", "decode", "mixed")
    }
    assert set(found["prefill"]) == {"prefill_tokens_per_s", "ttft_p50_ms", "ttft_p99_ms"}
    assert set(found["decode"]) == {"decode_tokens_per_s", "itl_p50_ms", "itl_p99_ms"}
    mixed = found["mixed"]
    assert mixed["prefill_tokens_per_s"] == 2 * 8 / 1.0
    assert mixed["decode_tokens_per_s"] == 2 / 1.0
    assert mixed["tokens_per_s"] == 2 * (8 + 3) / 2.0
    assert mixed["ttft_p50_ms"] == 750
    assert mixed["itl_p50_ms"] == pytest.approx(375)


def replace_work(work: str) -> OfflineTest:
    return OfflineTest(work=work, prompt_tokens=8, generated_tokens=3, streams=2)  # type: ignore[arg-type]


def test_energy_is_that_of_the_run_for_each_token() -> None:
    class Counter:
        name = "a counter"
        values = iter([100.0, 122.0])

        def joules(self) -> float:
            return next(self.values)

        def between(self, before: float, after: float) -> float:
            return after - before

    offline = Offline(Played([[1.0, 2.0, 3.0]] * 2), (1, 2), 256, EnergyMeter((Counter(),), None))
    assert offline.run(replace_work("mixed"))["joules_per_token"] == pytest.approx(22 / (2 * 11))


def test_a_filled_context_is_made_before_and_its_prompt_goes_on_from_it() -> None:
    backend = Played([[1.0, 2.0]] * 2, cached=16)
    test = OfflineTest(work="decode", prompt_tokens=2, generated_tokens=4, depth=16, streams=2)
    Offline(backend, (7, 8, 9), 256, NO_ENERGY).run(test)
    fill, run = backend.asked
    assert [request.sampling.max_tokens for request in fill] == [1, 1]
    assert [request.sampling.max_tokens for request in run] == [4, 4]
    for before, after in zip(prompts(fill), prompts(run), strict=True):
        assert (len(before), len(after)) == (16, 18)
        assert after[:16] == before
        assert before[1:5] == (8, 9, 7, 8)
    assert len({ids[0] for ids in prompts(run)}) == 2, "two streams share a prefix"


def test_prompts_of_later_runs_share_no_prefix_with_earlier_ones() -> None:
    backend = Played([[1.0, 2.0]] * 2)
    offline = Offline(backend, (7, 8), 256, NO_ENERGY)
    for _ in range(4):
        offline.run(replace_work("prefill"))
    firsts = [ids[0] for asked in backend.asked for ids in prompts(asked)]
    assert len(set(firsts)) == 8


@pytest.mark.parametrize(("depth", "cached"), [(16, 15), (16, 0), (0, 20)])
def test_a_context_that_is_not_taken_up_is_not_measured(depth: int, cached: int) -> None:
    test = OfflineTest(work="prefill", prompt_tokens=4, generated_tokens=1, depth=depth, streams=1)
    with pytest.raises(UnsupportedError, match=f"takes up {cached}"):
        Offline(Played([[1.0]], cached), (1, 2), 256, NO_ENERGY).run(test)


def test_figures_are_summarised_with_their_spread() -> None:
    found = summarise([{"ttft_p50_ms": value} for value in (3.0, 1.0, 2.0)])["ttft_p50_ms"]
    assert (found.median, found.low, found.high, found.values) == (2.0, 1.0, 3.0, (3.0, 1.0, 2.0))
    assert (found.unit, found.better) == QUANTITIES["ttft_p50_ms"]
    assert summarise([]) == {}


class Stopwatch:
    """A clock that stands still but for model calls, and its own record of them. offset: what it shows at
    first.
    """

    def __init__(self) -> None:
        self.now = 50.0
        self.calls: list[tuple[str, int, float]] = []
        self._lock = threading.Lock()

    def take(self, call: Call) -> None:
        rows = len(call.token_ids)
        took = 0.010 * rows if call.kind == "prefill" else 0.004 + 0.001 * rows
        with self._lock:
            self.now += took
            self.calls.append((call.kind, rows, took))

    def __call__(self) -> float:
        return self.now

    def sum(self, kind: str) -> float:
        return sum(took for name, _, took in self.calls if name == kind)


@pytest.fixture
def watched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Stopwatch, Offline]]:
    watch = Stopwatch()
    monkeypatch.setattr(measure.time, "perf_counter", watch)
    worker = make_worker(tmp_path, make_session(before_call=watch.take))
    yield watch, Offline(LocalBackend(worker), tuple(range(40, 60)), VOCAB, NO_ENERGY)
    worker.close()


@pytest.mark.parametrize("streams", [1, 3])
def test_prefill_agrees_with_a_stopwatch_on_the_calls(
    watched: tuple[Stopwatch, Offline], streams: int
) -> None:
    watch, offline = watched
    test = OfflineTest(work="prefill", prompt_tokens=12, generated_tokens=1, streams=streams)
    values = offline.run(test)
    assert values["prefill_tokens_per_s"] == pytest.approx(12 * streams / watch.sum("prefill"), rel=0.03)


def test_decode_agrees_with_a_stopwatch_on_the_calls(watched: tuple[Stopwatch, Offline]) -> None:
    watch, offline = watched
    values = offline.run(OfflineTest(work="decode", prompt_tokens=2, generated_tokens=20, streams=1))
    decode = [took for kind, _, took in watch.calls if kind == "decode"]
    assert values["decode_tokens_per_s"] == pytest.approx(len(decode) / sum(decode), rel=0.03)
    assert values["itl_p50_ms"] == pytest.approx(1000 * decode[0], rel=0.03)


def test_behind_a_filled_context_only_the_rest_is_timed(watched: tuple[Stopwatch, Offline]) -> None:
    watch, offline = watched
    offline.run(OfflineTest(work="prefill", prompt_tokens=4, generated_tokens=1, streams=2))
    watch.calls.clear()
    test = OfflineTest(work="prefill", prompt_tokens=8, generated_tokens=1, depth=20, streams=2)
    values = offline.run(test)
    timed = 2 * 8 * 0.010
    assert watch.sum("prefill") == pytest.approx(timed + 2 * 20 * 0.010)
    assert values["prefill_tokens_per_s"] == pytest.approx(2 * 8 / timed, rel=0.03)


def test_an_engine_without_reuse_is_measured_without_depth_alone(tmp_path: Path) -> None:
    session = make_session(capabilities=replace(FULL, prefix_reuse=False))
    worker = make_worker(tmp_path, session)
    offline = Offline(LocalBackend(worker), (1, 2, 3), VOCAB, NO_ENERGY)
    try:
        assert offline.run(MIXED)["tokens_per_s"] > 0
        with pytest.raises(UnsupportedError, match="leave --depth out"):
            offline.run(OfflineTest(work="decode", prompt_tokens=2, generated_tokens=4, depth=16, streams=1))
    finally:
        worker.close()
