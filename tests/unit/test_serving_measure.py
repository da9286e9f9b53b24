"""Rows of a report from load on a fake worker, on a virtual clock, and what is shown of them."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncGenerator, Callable, Sequence

import msgspec
import pytest

from llorch_serve.bench.schema import Row, ServingTest
from llorch_serve.bench.serving.blocks import describe_load, describe_row
from llorch_serve.bench.serving.measure import measure
from llorch_serve.bench.serving.records import CallError, Piece, Usage
from llorch_serve.bench.serving.work import Job
from llorch_serve.errors import WorkerError
from llorch_serve.requests import TokenPrompt
from support.fakes.virtual_time import run_virtually

CLOSED = ServingTest(arrivals="closed", prompt_tokens=7, generated_tokens=5, concurrency=2, requests=8)


def bundled(scripts: Sequence[Sequence[tuple[float, int]]]):
    """A worker that answers with the scripts in turn: waits, then sends so many tokens; -1 fails there."""
    turn = itertools.cycle(scripts)

    async def call(job: Job) -> AsyncGenerator[Piece]:
        script, sent = next(turn), 0
        for place, (wait, tokens) in enumerate(script, 1):
            await asyncio.sleep(wait)
            if tokens < 0:
                raise CallError("INTERNAL", "out of luck")
            sent += tokens
            yield Piece(tokens, Usage(7, 2, sent) if place == len(script) else None)

    return call


def measured(
    call: Callable[[Job], AsyncGenerator[Piece]], test: ServingTest = CLOSED, repeat: int = 2
) -> Row:
    jobs = itertools.repeat(Job(TokenPrompt((1,)), 5))
    return run_virtually(
        lambda clock: measure(test, call, jobs, repeat=repeat, progress=lambda: None, clock=clock)
    )


def median(row: Row, name: str) -> float:
    return row.figures[name].median


def test_bundles_count_by_token():
    """Two clients, each of whose answers is 1 token after 0.2 s, then 4 in one message 0.4 s later."""
    row = measured(bundled([[(0.2, 1), (0.4, 4)]]))
    assert median(row, "ttft_p50_ms") == pytest.approx(200)
    assert median(row, "e2e_p99_ms") == pytest.approx(600)
    assert median(row, "tpot_mean_ms") == pytest.approx(100)
    assert [median(row, f"itl_{part}_ms") for part in ("mean", "p50", "p99", "max")] == pytest.approx(
        [100] * 4
    )
    assert median(row, "gap_p50_ms") == pytest.approx(400)
    assert median(row, "duration_s") == pytest.approx(4 * 0.6)
    assert median(row, "output_tokens_per_s") == pytest.approx(8 * 5 / 2.4)
    assert median(row, "total_tokens_per_s") == pytest.approx(8 * 12 / 2.4)
    assert median(row, "requests_per_s") == pytest.approx(8 / 2.4)
    assert (median(row, "succeeded"), median(row, "failed")) == (8, 0)
    assert (median(row, "prompt_tokens"), median(row, "cached_tokens")) == (56, 16)
    assert row.failures == ()
    assert not any(name.startswith(("late", "good")) for name in row.figures)


def test_a_stream_that_breaks_off_is_a_failure_and_no_goodput():
    """Every second answer sends 4 of its 5 tokens, faster than the others, and fails."""
    test = msgspec.structs.replace(CLOSED, concurrency=1, limits_ms={"ttft": 200.5, "e2e": 700.0})
    row = measured(bundled([[(0.2, 1), (0.4, 4)], [(0.01, 4), (0.39, -1)]]), test, repeat=1)
    assert (median(row, "succeeded"), median(row, "failed")) == (4, 4)
    assert median(row, "duration_s") == pytest.approx(4 * 0.6 + 4 * 0.4)
    assert median(row, "output_tokens_per_s") == pytest.approx(4 * 5 / 4.0)
    assert median(row, "good_tokens_per_s") == pytest.approx(4 * 5 / 4.0)
    assert median(row, "good_requests_per_s") == pytest.approx(4 / 4.0)
    assert median(row, "good_share") == pytest.approx(0.5)
    assert median(row, "ttft_p50_ms") == pytest.approx(200)
    (failure,) = row.failures
    assert (failure.status, failure.requests, failure.after_first_token, failure.tokens) == (
        "INTERNAL",
        4,
        4,
        16,
    )
    assert failure.example == "out of luck"


def test_failures_of_all_runs_are_together():
    row = measured(bundled([[(0.2, 5)], [(0.1, -1)]]), repeat=3)
    assert sum(failure.requests for failure in row.failures) == sum(row.figures["failed"].values)
    assert len(row.figures["failed"].values) == 3


def test_the_first_request_is_not_counted():
    first = itertools.count()

    async def call(job: Job) -> AsyncGenerator[Piece]:
        await asyncio.sleep(0.1 if next(first) else 99.0)
        yield Piece(5, Usage(7, 0, 5))

    assert median(measured(call), "e2e_max_ms") == pytest.approx(100)
    assert next(first) == 1 + 2 * 8


def test_open_loops_draw_new_moments_for_each_run_and_the_same_for_the_same_seed():
    def late(seed: int) -> tuple[float, ...]:
        test = ServingTest(
            arrivals="open",
            prompt_tokens=7,
            generated_tokens=5,
            rate_per_s=4.0,
            burstiness=1.0,
            seed=seed,
            requests=30,
        )
        return measured(bundled([[(0.2, 5)]]), test).figures["duration_s"].values

    assert late(1) == late(1)
    assert late(1) != late(3)
    assert late(1)[1] == pytest.approx(late(2)[0])
    assert late(1)[1] != pytest.approx(late(1)[0])


def test_an_open_loop_tells_how_late_the_client_was():
    test = ServingTest(
        arrivals="open",
        prompt_tokens=7,
        generated_tokens=5,
        rate_per_s=4.0,
        burstiness=1.0,
        seed=0,
        requests=5,
    )
    row = measured(bundled([[(0.2, 5)]]), test)
    assert row.figures["late_max_ms"].median == pytest.approx(0, abs=0.01)
    assert row.figures["late_p99_ms"].better is None


def test_single_tokens_have_no_times_between_them():
    row = measured(bundled([[(0.2, 1)]]))
    assert not any(name.startswith(("tpot", "itl", "gap")) for name in row.figures)
    assert "TPOT" not in describe_row(row)


def test_a_run_without_a_whole_answer_is_an_error_with_its_statuses():
    with pytest.raises(WorkerError, match=r"no request succeeded: 8 INTERNAL \(out of luck\)"):
        measured(bundled([[(0.1, -1)]]))


def test_a_run_in_which_nothing_was_due_is_an_error():
    test = ServingTest(
        arrivals="open",
        prompt_tokens=7,
        generated_tokens=5,
        rate_per_s=0.001,
        burstiness=1.0,
        seed=0,
        duration_s=0.5,
    )
    with pytest.raises(WorkerError, match="no request was due"):
        measured(bundled([[(0.1, 5)]]), test)


def test_a_row_can_be_written_and_read():
    row = measured(bundled([[(0.2, 5)], [(0.1, -1)]]))
    assert msgspec.json.decode(msgspec.json.encode(row), type=Row) == row


def test_what_a_person_sees():
    test = msgspec.structs.replace(CLOSED, concurrency=1, limits_ms={"tpot": 100.5, "e2e": 700.0})
    lines = describe_row(measured(bundled([[(0.2, 1), (0.4, 4)], [(0.01, 4), (0.39, -1)]]), test, repeat=1))
    assert lines.splitlines() == [
        "closed loop, 1 client, 8 requests, 7 + 5 tokens, tpot <= 100.5 ms, e2e <= 700 ms",
        "  requests  1/s: 4 whole and 4 failed in 4.0 s, at most 1 in flight",
        "  tokens    5/s generated, 12/s with prompts; 8 of 28 prompt tokens were cached",
        "  goodput   1 requests/s, 5 tokens/s: 50.0% of the requests kept every limit",
        "  ms                 mean        p50        p90        p99        max",
        "  TTFT             200.00     200.00     200.00     200.00     200.00",
        "  TPOT             100.00     100.00     100.00     100.00     100.00",
        "  ITL              100.00     100.00     100.00     100.00     100.00",
        "  gap              400.00     400.00     400.00     400.00     400.00",
        "  E2E              600.00     600.00     600.00     600.00     600.00",
        "  failed    4 INTERNAL, 4 of them after their first token (16 tokens, counted nowhere else): out "
        "of luck",
    ]


@pytest.mark.parametrize(
    ("test", "words"),
    [
        (CLOSED, "closed loop, 2 clients, 8 requests, 7 + 5 tokens"),
        (
            ServingTest(
                arrivals="open",
                prompt_tokens=512,
                generated_tokens=64,
                spread=0.5,
                rate_per_s=2.5,
                burstiness=1.0,
                seed=3,
                duration_s=30.0,
                http=True,
            ),
            "open loop, 2.5 requests/s (Poisson), for 30 s, 512 + 64 tokens +-50%, seed 3 over HTTP",
        ),
        (
            ServingTest(
                arrivals="open",
                dataset="prompts.jsonl 0123456789ab",
                generated_tokens=64,
                rate_per_s=2.0,
                burstiness=0.5,
                seed=0,
                requests=10,
            ),
            "open loop, 2 requests/s (burstiness 0.5), 10 requests, prompts of prompts.jsonl 0123456789ab "
            "with up to 64 tokens "
            "unless they say otherwise, seed 0",
        ),
    ],
)
def test_a_test_in_words(test: ServingTest, words: str):
    assert describe_load(test) == words
