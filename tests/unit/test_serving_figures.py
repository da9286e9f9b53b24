"""Figures of serving from times that were chosen so that every number can be worked out by hand."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from llorch_serve.bench.serving.figures import (
    Failures,
    Goodput,
    Summary,
    compute_figures,
    itl_s,
    summarise,
    tpot_s,
)
from llorch_serve.bench.serving.records import Arrival, LoadRun, RequestRecord, Usage


def whole(
    arrivals: Sequence[tuple[float, int | None]],
    *,
    due: float = 0.0,
    sent: float | None = None,
    end: float | None = None,
    prompt: int = 10,
    cached: int = 0,
    generated: int = 0,
) -> RequestRecord:
    """Return a request whose answer is whole; it ends with its last message unless ``end`` says otherwise."""
    return RequestRecord(
        scheduled_s=due,
        sent_s=due if sent is None else sent,
        ended_s=arrivals[-1][0] if end is None else end,
        arrivals=[Arrival(at, count) for at, count in arrivals],
        usage=Usage(prompt, cached, generated),
    )


def broken(
    arrivals: Sequence[tuple[float, int]], *, status: str, end: float, message: str = ""
) -> RequestRecord:
    record = RequestRecord(0.0, 0.0, arrivals=[Arrival(at, count) for at, count in arrivals])
    record.fail(end, status, message)
    return record


def figures(*records: RequestRecord, duration: float = 10.0, open_loop: bool = False, **limits: float):
    return compute_figures(LoadRun(records, duration), limits_ms=limits or None, open_loop=open_loop)


def same(value: float) -> Summary:
    return Summary(*(pytest.approx(value) for _ in range(5)))


def test_one_request_token_by_token():
    found = figures(whole([(0.5, 1), (0.6, 1), (0.7, 1), (0.9, 1)], end=1.0))
    assert found.ttft_ms == same(500)
    assert found.e2e_ms == same(1000)
    assert found.tpot_ms == same(400 / 3)
    assert found.itl_ms is not None
    assert found.itl_ms.mean == pytest.approx(400 / 3)
    assert found.itl_ms.p50 == pytest.approx(100)
    assert found.itl_ms.p90 == pytest.approx(180)  # 80 % of the way from 100 to 200
    assert found.itl_ms.p99 == pytest.approx(198)
    assert found.itl_ms.max == pytest.approx(200)
    assert found.gap_ms == found.itl_ms


def test_tokens_of_one_message_share_the_time_that_they_took():
    record = whole([(0.5, 1), (0.8, 3), (1.0, 1), (1.4, 4)])
    assert itl_s(record) == pytest.approx([0.1, 0.1, 0.1, 0.2, 0.1, 0.1, 0.1, 0.1])
    assert tpot_s(record) == pytest.approx(0.9 / 8)
    found = figures(record)
    assert found.generated_tokens == 9
    assert found.gap_ms is not None
    assert (found.gap_ms.mean, found.gap_ms.max) == (pytest.approx(300), pytest.approx(400))


def test_a_first_message_of_several_tokens_has_one_first_token():
    record = whole([(0.5, 3), (0.9, 2)])
    assert itl_s(record) == pytest.approx([0, 0, 0.2, 0.2])
    assert tpot_s(record) == pytest.approx(0.4 / 4)
    assert figures(record).ttft_ms == same(500)


@pytest.mark.parametrize("bundles", [[1] * 12, [4, 4, 4], [1, 11], [12], [2, 1, 5, 4]])
def test_however_tokens_are_bundled_their_times_make_up_the_whole(bundles: list[int]):
    arrivals: list[tuple[float, int | None]] = []
    for count in bundles:
        arrivals.append(((arrivals[-1][0] if arrivals else 0.2) + 0.03 * count, count))
    times = itl_s(whole(arrivals))
    assert times is not None
    assert len(times) == 11
    assert sum(times) == pytest.approx(arrivals[-1][0] - arrivals[0][0])
    assert tpot_s(whole(arrivals)) == pytest.approx(sum(times) / 11)


def test_one_token_has_no_time_per_token():
    found = figures(whole([(0.5, 1)]))
    assert (found.tpot_ms, found.itl_ms, found.gap_ms) == (None, None, None)
    assert found.e2e_ms == same(500)


def test_latency_counts_from_when_a_request_was_due():
    found = figures(whole([(2.0, 1), (2.5, 1)], due=1.0, sent=1.75), open_loop=True)
    assert found.ttft_ms == same(1000)
    assert found.e2e_ms == same(1500)
    assert found.late_ms == same(750)
    assert figures(whole([(2.0, 1)])).late_ms is None


def test_rates_are_over_the_whole_run():
    found = figures(
        whole([(1.0, 1), (2.0, 4)]), whole([(3.0, 2), (4.0, 3)], prompt=20, cached=8), duration=4.0
    )
    assert (found.requests, found.succeeded, found.failed) == (2, 2, 0)
    assert (found.prompt_tokens, found.cached_tokens, found.generated_tokens) == (30, 8, 10)
    assert found.requests_per_s == pytest.approx(2 / 4)
    assert found.output_tokens_per_s == pytest.approx(10 / 4)
    assert found.total_tokens_per_s == pytest.approx(40 / 4)


def test_failed_requests_count_nowhere_but_among_failures():
    good = whole([(0.5, 1), (1.0, 4)])
    found = figures(
        good,
        broken([(0.1, 2), (0.2, 5)], status="UNAVAILABLE", end=0.3, message="shutting down"),
        broken([], status="UNAVAILABLE", end=0.4),
        broken([], status="RESOURCE_EXHAUSTED", end=0.1, message="the queue is full"),
        e2e=5000,
    )
    alone = figures(good, e2e=5000)
    assert (found.requests, found.succeeded, found.failed) == (4, 1, 3)
    assert list(found.failures.items()) == [
        ("UNAVAILABLE", Failures(2, 1, 7, "shutting down")),
        ("RESOURCE_EXHAUSTED", Failures(1, 0, 0, "the queue is full")),
    ]
    for name in ("ttft_ms", "tpot_ms", "itl_ms", "gap_ms", "e2e_ms", "generated_tokens", "prompt_tokens"):
        assert getattr(found, name) == getattr(alone, name), name
    assert (found.output_tokens_per_s, found.requests_per_s) == (5 / 10, 1 / 10)
    assert found.goodput is not None
    assert (found.goodput.tokens_per_s, found.goodput.share) == (5 / 10, 1 / 4)


def test_a_run_in_which_all_failed_has_no_latencies():
    found = figures(broken([(0.1, 2)], status="INTERNAL", end=0.3), ttft=1)
    assert (found.ttft_ms, found.tpot_ms, found.itl_ms, found.gap_ms, found.e2e_ms) == (None,) * 5
    assert found.goodput == Goodput({"ttft": 1}, 0, 0.0, 0.0, 0.0)


def test_goodput_counts_answers_within_every_limit():
    records = [
        whole([(0.200, 1), (0.250, 1)]),  # at both limits exactly
        whole([(0.201, 1), (0.210, 1)]),  # first token too late
        whole([(0.100, 1), (0.151, 1)]),  # tokens too slow
        whole([(0.100, 1), (0.150, 2)], end=0.9),  # ends too late
        whole([(0.200, 1)]),  # a single token cannot be too slow
    ]
    found = figures(*records, duration=2.0, ttft=200, tpot=50.00001, e2e=800).goodput
    assert found is not None
    assert (found.requests, found.share) == (2, 2 / 5)
    assert (found.requests_per_s, found.tokens_per_s) == (1.0, 1.5)
    assert figures(*records).goodput is None


@pytest.mark.parametrize(("limit", "good"), [({"ttft": 200}, 4), ({"tpot": 50.5}, 4), ({"e2e": 300}, 4)])
def test_each_limit_alone(limit: dict[str, float], good: int):
    records = [
        whole([(0.200, 1), (0.250, 1)]),
        whole([(0.201, 1), (0.210, 1)]),
        whole([(0.100, 1), (0.151, 1)]),
        whole([(0.100, 1), (0.150, 2)], end=0.9),
        whole([(0.200, 1)]),
    ]
    found = figures(*records, **limit).goodput
    assert found is not None
    assert found.requests == good


def test_limits_count_from_when_a_request_was_due():
    late = whole([(2.0, 1), (2.1, 1)], due=1.0, sent=1.95)
    found = figures(late, ttft=500).goodput
    assert found is not None
    assert found.requests == 0


def test_where_messages_do_not_say_how_many_tokens_they_carry():
    record = whole([(0.5, None), (0.7, None), (1.3, None)], generated=9)
    found = figures(record)
    assert found.generated_tokens == 9
    assert found.tpot_ms == same(800 / 8)
    assert found.itl_ms is None
    assert found.gap_ms is not None
    assert found.gap_ms.mean == pytest.approx(400)


def test_a_failed_stream_that_does_not_say_has_no_tokens():
    record = RequestRecord(0.0, 0.0, arrivals=[Arrival(0.5, None)])
    record.fail(0.6, "server_error", "bug")
    assert figures(record).failures["server_error"] == Failures(1, 1, 0, "bug")


def test_most_requests_in_flight():
    records = [
        whole([(2.0, 1)], due=0.0),
        whole([(3.0, 1)], due=1.0),
        whole([(4.0, 1)], due=2.0),  # sent as the first ends
        broken([], status="X", end=0.5),
    ]
    assert figures(*records).peak_in_flight == 2


def test_percentiles_are_interpolated():
    found = summarise([0.001, 0.002, 0.003, 0.004, 0.005])
    assert found == Summary(
        pytest.approx(3), pytest.approx(3), pytest.approx(4.6), pytest.approx(4.96), pytest.approx(5)
    )
    assert summarise([]) is None
