"""Figures of ``llorch bench`` against an independent stopwatch that observes the same calls in the same run,
on the real model.
"""

from __future__ import annotations

import json
import shlex
import subprocess
import sys

import pytest

from support.harness.processes import PATIENCE_S, environment, llorch, with_scripts
from support.harness.stopwatch import (
    ModelCall,
    SeenCall,
    good_calls,
    offline_figures,
    proxied,
    serving_figures,
    take_run,
)
from tolerances import BENCH_AGREEMENT, BENCH_DELAY_MS

pytestmark = pytest.mark.real_model

WATCHED = ("-m", "support.harness.watched")
PROMPT, ANSWER = 256, 25

COUNTS = ("succeeded", "failed", "generated_tokens", "prompt_tokens")
RATES = ("duration_s", "requests_per_s", "output_tokens_per_s", "total_tokens_per_s")


def times(*parts: str) -> list[str]:
    return [f"{name}_{part}_ms" for name in ("ttft", "e2e", "tpot", "itl") for part in parts]


@pytest.mark.parametrize(
    ("load", "bundle", "cut"),
    [
        pytest.param(("--concurrency", "2"), 1, 0, id="closed", marks=pytest.mark.slow),
        pytest.param(("--concurrency", "2"), 4, 5, id="bundled tokens, and streams that break off"),
        pytest.param(("--request-rate", "1", "--seed", "2"), 1, 0, id="open"),
    ],
)
def test_serving(smollm2_worker, tmp_path, load, bundle, cut):
    """Two stopwatches, one in the client and one on the wire.

    The way between them is part of what the bench sees, and on a busy machine a process may wait long for its
    turn. So of the one on the wire those figures are compared that single delays hardly move, and times from
    a call's start may differ by such a delay; those to the first token are longer than on the wire.
    """
    log, limits = tmp_path / "calls", {"ttft": 60_000.0, "e2e": 120_000.0}
    flags = ("--prompt-tokens", PROMPT, "--max-tokens", ANSWER, "--repeat", "1", "--requests", "10", "--json")
    slo = [part for name, limit in limits.items() for part in ("--slo", f"{name}:{limit}")]
    with proxied(smollm2_worker("int8").address, bundle=bundle, cut=cut) as proxy:
        command = [*WATCHED, log, "bench", "--connect", proxy.address, *flags, *load, *slo]
        result = subprocess.run(
            [sys.executable, *map(str, command)],
            capture_output=True,
            text=True,
            check=True,
            env=with_scripts(environment()),
            timeout=PATIENCE_S,
        )
    (row,) = json.loads(result.stdout)["entries"][0]["rows"]
    bench = {name: figure["median"] for name, figure in row["figures"].items()}
    inside = [SeenCall(**json.loads(line)) for line in log.read_text().splitlines()]
    for calls, names in (
        (inside[1:], times("mean", "p50", "p90", "p99")),  # the first one warms up
        (proxy.calls[1:], ["e2e_mean_ms", "tpot_mean_ms", "itl_mean_ms"]),
    ):
        watch = serving_figures(calls)
        assert {name: bench[name] for name in COUNTS} == {name: watch[name] for name in COUNTS}
        for name in (*RATES, *names):
            delay = BENCH_DELAY_MS if name.startswith(("ttft", "e2e")) else 0.0
            assert bench[name] == pytest.approx(watch[name], rel=BENCH_AGREEMENT, abs=delay), name
        good = good_calls(calls, ttft_ms=limits["ttft"], e2e_ms=limits["e2e"])
        assert bench["good_share"] == len(good) / len(calls)
        assert bench["good_requests_per_s"] == pytest.approx(
            len(good) / watch["duration_s"], rel=BENCH_AGREEMENT
        )
        if cut:
            (failure,) = row["failures"]
            broken = [call for call in calls if not call.whole]
            assert (failure["status"], failure["requests"]) == ("DATA_LOSS", len(broken))
            assert failure["tokens"] == sum(count for call in broken for _, count in call.messages) > 0
            assert watch["failed"] == 2
            assert max(count for call in calls for _, count in call.messages) >= bundle
    assert 0 < bench["ttft_mean_ms"] - watch["ttft_mean_ms"] < BENCH_DELAY_MS


def test_offline(smollm2, tmp_path):
    log, wrapper = tmp_path / "calls", tmp_path / "watched-python"
    command = shlex.join([sys.executable, *WATCHED, str(log)])
    path = shlex.quote(with_scripts()["PYTHONPATH"])
    wrapper.write_text(f'#!/bin/sh\nexport PYTHONPATH={path}\nexec {command} "$@"\n')
    wrapper.chmod(0o755)
    flags = ("--tests", "mixed", "--prompt-tokens", PROMPT, "--max-tokens", ANSWER, "--repeat", "2")
    outcome = llorch(
        "bench", smollm2("int8"), "--provider", f"cpu@{wrapper}", *flags, "--streams", "1,2", "--json"
    )
    (entry,) = outcome.document()["entries"]
    calls = [ModelCall(**json.loads(line)) for line in log.read_text().splitlines()]
    for number in (1, 0):  # the last run is the first to be taken off
        for row in reversed(entry["rows"]):
            streams = row["test"]["streams"]
            run = take_run(calls, prompts=streams * PROMPT, answers=streams * (ANSWER - 1))
            watch = offline_figures(run, streams=streams, prompt=PROMPT, generated=ANSWER)
            for name, value in watch.items():
                assert row["figures"][name]["values"][number] == pytest.approx(value, rel=BENCH_AGREEMENT), (
                    name,
                    streams,
                )
