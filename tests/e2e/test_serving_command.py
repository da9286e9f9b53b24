"""``llorch bench --connect`` under load: against a tiny model's worker, and fakes that bundle, fail and
refuse.
"""

from __future__ import annotations

import json
import threading
from dataclasses import replace

import pytest

from llorch_serve.errors import NonFiniteLogitsError, QueueFullError
from llorch_serve.requests import GenerationUpdate
from llorch_serve.terminal import bench_serving
from llorch_serve.terminal.serving_fronts import read_tls
from support.builders.certificates import make_certificates
from support.fakes.generator import FakeGenerator
from support.harness.http import running_front
from support.harness.processes import llorch_here, serving
from support.harness.rpc import running_server

QUICK = ("--prompt-tokens", "20", "--max-tokens", "9", "--repeat", "2", "--requests", "6")


class Bundling(FakeGenerator):
    """Answers in steps of 1, then ``size`` tokens; every ``fails_every``-th request breaks off after its
    first step.
    """

    def __init__(self, size=4, fails_every=0, **how):
        super().__init__(**how)
        self._size = size
        self._fails_every = fails_every
        self._numbers = {}

    def _advance(self, request_id, live):
        number = self._numbers.setdefault(request_id, len(self._numbers))
        if self._fails_every and number % self._fails_every == 0 and live.produced:
            return GenerationUpdate(request_id, "", (), error=NonFiniteLogitsError("logits are not finite"))
        parts = [
            super(Bundling, self)._advance(request_id, live)
            for _ in range(self._size if live.produced else 1)
        ]
        return replace(
            parts[-1],
            text="".join(part.text for part in parts),
            token_ids=tuple(token for part in parts for token in part.token_ids),
        )


def bench(address, *flags):
    outcome = llorch_here("bench", "--connect", address, *QUICK, *flags, "--json")
    document = outcome.document()
    (entry,) = document["entries"]
    return entry["rows"]


def medians(row):
    return {name: figure["median"] for name, figure in row["figures"].items()}


def test_closed_loops_of_a_worker(tiny_worker):
    one, four = bench(tiny_worker.address, "--concurrency", "1,4", "--slo", "e2e:60000")
    assert (one["test"]["concurrency"], four["test"]["concurrency"]) == (1, 4)
    for row in (one, four):
        found = medians(row)
        assert (found["succeeded"], found["failed"], found["generated_tokens"]) == (6, 0, 6 * 9)
        assert (found["prompt_tokens"], found["good_share"]) == (6 * 20, 1)
        assert 0 < found["ttft_p50_ms"] < found["e2e_p50_ms"]
        assert found["itl_mean_ms"] == pytest.approx(found["tpot_mean_ms"])
        assert len(row["figures"]["requests_per_s"]["values"]) == 2
    assert medians(one)["peak_in_flight"] == 1
    assert medians(four)["peak_in_flight"] == 4


def test_an_open_loop_of_a_worker(tiny_worker):
    (row,) = bench(tiny_worker.address, "--request-rate", "200", "--spread", "0.5", "--seed", "3")
    found = medians(row)
    assert found["succeeded"] == 6
    assert 0 <= found["late_mean_ms"] <= found["late_max_ms"]
    assert row["test"]["seed"] == 3


def test_a_duration_instead_of_a_number(tiny_worker):
    flags = (
        "--prompt-tokens",
        "5",
        "--max-tokens",
        "2",
        "--repeat",
        "1",
        "--concurrency",
        "2",
        "--duration",
        "0.3",
    )
    outcome = llorch_here("bench", "--connect", tiny_worker.address, *flags, "--json")
    (row,) = outcome.document()["entries"][0]["rows"]
    assert medians(row)["duration_s"] >= 0.3
    assert row["test"]["duration_s"] == 0.3


def test_a_block_for_people(tiny_worker):
    outcome = llorch_here("bench", "--connect", tiny_worker.address, *QUICK, "--concurrency", "2")
    assert outcome.code == 0, outcome
    assert "closed loop, 2 clients, 6 requests, 20 + 9 tokens" in outcome.stdout
    assert [line.split()[0] for line in outcome.stdout.splitlines() if line.startswith("  ")][2:] == [
        "ms",
        "TTFT",
        "TPOT",
        "ITL",
        "gap",
        "E2E",
    ]


def test_every_form_of_the_report(tiny_worker, tmp_path):
    files = {form: tmp_path / f"report.{form}" for form in ("csv", "markdown", "html")}
    flags = [part for form, path in files.items() for part in (f"--{form}", path)]
    outcome = llorch_here("bench", "--connect", tiny_worker.address, *QUICK, "--concurrency", "1", *flags)
    assert outcome.code == 0, outcome
    for path in files.values():
        text = path.read_text()
        assert "closed" in text
        assert "ttft" in text.lower()
    assert "late_p90_ms" not in files["markdown"].read_text()
    assert "ttft_p90_ms" in files["csv"].read_text()


def test_a_datasets_prompts_are_sent(tmp_path):
    path = tmp_path / "prompts.jsonl"
    rows = [
        {"prompt": "Once"},
        {"prompt": [5, 6], "max_tokens": 3},
        {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 5},
    ]
    path.write_text("\n".join(map(json.dumps, rows)))
    generator = FakeGenerator()
    flags = ("--max-tokens", "7", "--repeat", "1", "--requests", "3", "--concurrency", "1", "--dataset", path)
    with running_server(generator) as running:
        outcome = llorch_here("bench", "--connect", running.address, *flags, "--json")
    (row,) = outcome.document()["entries"][0]["rows"]
    assert row["test"]["dataset"].startswith("prompts.jsonl ")
    assert "prompt_tokens" not in row["test"] or row["test"]["prompt_tokens"] is None
    # The first request warms up.
    asked = [(request.sampling.max_tokens, request.sampling.ignore_eos) for request in generator.submitted]
    assert asked == [(7, True), (3, True), (5, True), (7, True)]
    assert medians(row)["generated_tokens"] == 3 + 5 + 7


@pytest.mark.parametrize("way", ["grpc", "http"])
def test_bundles_and_broken_streams_are_counted_right(way):
    generator = Bundling(fails_every=3)
    if way == "grpc":
        with running_server(generator) as running:
            (row,) = bench(running.address, "--concurrency", "1")
    else:
        with running_front(generator) as front:
            (row,) = bench(f"http://127.0.0.1:{front.port}", "--concurrency", "1")
        generator.close()
    found = medians(row)
    # Of the 13 requests the 1st, 4th, 7th, 10th and 13th broke off after a token; the first one is not
    # counted.
    assert (found["succeeded"], found["failed"]) == (4, 2)
    assert found["generated_tokens"] == 4 * 9
    run = {name: figure["values"][0] for name, figure in row["figures"].items()}
    assert run["output_tokens_per_s"] * run["duration_s"] == pytest.approx(36)
    (failure,) = row["failures"]
    assert failure["requests"] == 4
    assert failure["status"] == ("INTERNAL" if way == "grpc" else "non_finite_logits")
    assert "not finite" in failure["example"]
    # A failure may overtake the first token within the worker.
    assert failure["tokens"] == (failure["after_first_token"] if way == "grpc" else 0)
    assert ("itl_mean_ms" in found) == (way == "grpc")
    if way == "grpc":
        assert run["itl_mean_ms"] == pytest.approx(run["tpot_mean_ms"])


@pytest.mark.parametrize("way", ["grpc", "http"])
def test_refusals_are_counted_by_status(way):
    """Three clients and room for one request, which goes on until the other two have been refused five
    times.
    """
    generator = FakeGenerator(capacity=1, free_running=False)
    generator.step(9)  # for the request that warms up

    def go_on():
        generator.wait_for(lambda g: len(g.submitted) == 1 + 6)
        generator.run_freely()

    thread = threading.Thread(target=go_on)
    thread.start()
    flags = ("--concurrency", "3", "--repeat", "1")
    if way == "grpc":
        with running_server(generator) as running:
            (row,) = bench(running.address, *flags)
    else:
        with running_front(generator) as front:
            (row,) = bench(f"http://127.0.0.1:{front.port}", *flags)
        generator.close()
    thread.join()
    found = medians(row)
    assert (found["succeeded"], found["failed"]) == (1, 5)
    (failure,) = row["failures"]
    assert failure["status"] == ("RESOURCE_EXHAUSTED" if way == "grpc" else "HTTP 429")
    assert (failure["requests"], failure["after_first_token"], failure["tokens"]) == (5, 0, 0)


def test_when_nothing_succeeds_the_command_fails():
    generator = FakeGenerator()
    generator.fail_submit = QueueFullError("the queue is full", retry_after_s=1)
    with running_server(generator) as running:
        outcome = llorch_here("bench", "--connect", running.address, *QUICK, "--concurrency", "2")
    assert outcome.code == 7
    assert "6 RESOURCE_EXHAUSTED (the queue is full" in outcome.error()


def test_a_worker_with_a_token_over_http_and_grpc(tiny):
    with serving(tiny, "--http", "0", LLORCH_API_TOKEN="secret") as worker:
        url = worker.command.wait_for_line(r"HTTP at (http://\S+:\d+)").group(1)
        rows = bench(f"{url}/v1", "--concurrency", "2", "--token", "secret")
        assert medians(bench(worker.address, "--concurrency", "2", "--token", "secret")[0])["succeeded"] == 6
        refused = llorch_here("bench", "--connect", url, *QUICK, "--concurrency", "2", "--token", "wrong")
    (row,) = rows
    found = medians(row)
    assert (found["succeeded"], found["generated_tokens"], found["prompt_tokens"]) == (6, 54, 120)
    assert row["test"]["http"] is True
    assert refused.code == 7
    assert "401" in refused.error()


def test_chats_over_http(tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"messages": [{"role": "user", "content": "Hi"}]}\n{"prompt": "Once"}\n')
    generator = FakeGenerator()
    flags = ("--max-tokens", "7", "--repeat", "1", "--requests", "4", "--concurrency", "1", "--dataset", path)
    with running_front(generator) as front:
        outcome = llorch_here("bench", "--connect", f"http://127.0.0.1:{front.port}", *flags, "--json")
    generator.close()
    (row,) = outcome.document()["entries"][0]["rows"]
    assert medians(row)["generated_tokens"] == 4 * 7
    assert medians(row)["ttft_p50_ms"] > 0


def test_over_https(tmp_path):
    certificates = make_certificates(tmp_path)
    tls = read_tls(certificates.server_cert, certificates.server_key, None)
    generator = FakeGenerator()
    with running_front(generator, tls=tls) as front:
        url = f"https://127.0.0.1:{front.port}"
        (row,) = bench(url, "--concurrency", "2", "--tls-ca", certificates.ca)
        stranger = llorch_here("bench", "--connect", url, *QUICK, "--concurrency", "2")
        mutual = ("--tls-cert", certificates.client_cert, "--tls-key", certificates.client_key)
        refused = llorch_here("bench", "--connect", url, *QUICK, "--concurrency", "2", *mutual)
    generator.close()
    assert medians(row)["succeeded"] == 6
    assert stranger.code == 7
    assert "CERTIFICATE_VERIFY_FAILED" in stranger.error()
    assert refused.code == 2
    assert "--tls-cert" in refused.error()


def test_a_late_client_is_said(monkeypatch, tiny_worker):
    monkeypatch.setattr(bench_serving, "_LATE_SHARE", -1.0)
    flags = ("--request-rate", "200")
    outcome = llorch_here("bench", "--connect", tiny_worker.address, *QUICK, *flags)
    assert "this client itself sent requests up to" in outcome.stderr
    monkeypatch.setattr(bench_serving, "_LATE_SHARE", 1e9)
    assert "itself" not in llorch_here("bench", "--connect", tiny_worker.address, *QUICK, *flags).stderr


def test_more_clients_than_slots_is_said(tiny_worker):
    flags = (
        "--prompt-tokens",
        "5",
        "--max-tokens",
        "2",
        "--repeat",
        "1",
        "--concurrency",
        "9",
        "--requests",
        "9",
    )
    outcome = llorch_here("bench", "--connect", tiny_worker.address, *flags)
    assert outcome.code == 0
    assert "8 slots" in outcome.stderr


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (("--concurrency", "1", "--streams", "1"), "--streams"),
        (("--concurrency", "1", "--prompt-tokens", "100", "--max-tokens", "100"), "128"),
        (("--concurrency", "1", "--prompt-tokens", "90", "--max-tokens", "20", "--spread", "0.9"), "128"),
        (("--concurrency", "1", "--dataset", "/no/such/file"), "/no/such/file"),
        (("--concurrency", "1", "--prompt-tokens", "0"), "--prompt-tokens"),
        (("--requests", "3"), "--requests has no effect"),
    ],
)
def test_what_cannot_be_measured_is_a_usage_error(tiny_worker, flags, named):
    outcome = llorch_here("bench", "--connect", tiny_worker.address, *flags)
    assert outcome.code == 2
    assert named in outcome.error()


@pytest.mark.parametrize(
    ("address", "flags", "named"),
    [
        ("http://127.0.0.1:1", (), "--concurrency or --request-rate"),
        ("http://127.0.0.1:1/v2", ("--concurrency", "1"), "http://127.0.0.1:8080"),
        ("ftp://127.0.0.1:1", ("--concurrency", "1"), "http://127.0.0.1:8080"),
        ("http://127.0.0.1:1", ("--concurrency", "1", "--wait", "1"), "--wait"),
    ],
)
def test_addresses_that_cannot_be_are_usage_errors(address, flags, named):
    outcome = llorch_here("bench", "--connect", address, *flags)
    assert outcome.code == 2
    assert named in outcome.error()


def test_no_worker_at_all():
    for address in ("127.0.0.1:1", "http://127.0.0.1:1"):
        outcome = llorch_here("bench", "--connect", address, "--concurrency", "1")
        assert outcome.code == 7
        assert "127.0.0.1:1" in outcome.error()


def test_loads_need_a_worker(tiny):
    outcome = llorch_here("bench", tiny, "--concurrency", "1")
    assert outcome.code == 2
    assert "--connect" in outcome.error()


def test_reports_of_loads_can_be_compared(tiny_worker, tmp_path):
    flags = ("--concurrency", "2", "--slo", "e2e:60000", "--json")
    for name in ("before", "after"):
        outcome = llorch_here("bench", "--connect", tiny_worker.address, *QUICK, *flags)
        (tmp_path / name).write_text(outcome.stdout)
    pair = ("bench", "compare", tmp_path / "before", tmp_path / "after")
    outcome = llorch_here(*pair, "--fail-under", "0.0001")
    assert outcome.code == 0, outcome
    assert "closed loop, 2 clients, 6 requests" in outcome.stdout
    document = llorch_here(*pair, "--fail-under", "0", "--figure", "ttft_p99_ms", "--json").document()
    assert [ratio["figure"] for ratio in document["ratios"] if ratio["judged"]] == ["ttft_p99_ms"]
