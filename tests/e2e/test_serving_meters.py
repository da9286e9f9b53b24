"""The benchmark's figures of a worker under load beside the worker's own histograms of the same requests."""

from __future__ import annotations

import asyncio
import time

import pytest
from prometheus_client.parser import text_string_to_metric_families

from llorch_serve.bench.serving.arrivals import ClosedLoop
from llorch_serve.bench.serving.figures import compute_figures
from llorch_serve.bench.serving.load import LoadGenerator
from llorch_serve.bench.serving.over_grpc import GrpcCall
from llorch_serve.bench.serving.work import Lengths, drawn_jobs
from llorch_serve.client.asynchronous import AsyncWorkerClient
from support.fakes.generator import PATIENCE_S
from support.harness.http import send
from support.harness.processes import serving

pytestmark = pytest.mark.real_model

PROMPT, ANSWER = 256, 49


@pytest.fixture(scope="module")
def worker(smollm2):
    """A worker with metrics: its gRPC address, and the port of its HTTP front."""
    with serving(smollm2("int8"), "--http", "0", "--max-context", "1024") as process:
        port = int(process.command.wait_for_line(r"HTTP at http://\S+:(\d+)").group(1))
        yield process.address, port


def totals(port, *, ended=0):
    """Return the sums and counts of the worker's histograms, once ``ended`` requests are in them: they are
    told after their answers.
    """
    deadline = time.monotonic() + PATIENCE_S
    while (found := scrape(port))["llorch:e2e_request_latency_seconds_count"] < ended:
        assert time.monotonic() < deadline, f"of {ended} requests these are counted: {found}"
    return found


def scrape(port):
    families = text_string_to_metric_families(send(port, "GET", "/metrics").body.decode())
    names = ("time_to_first_token", "inter_token_latency", "e2e_request_latency")
    wanted = {f"llorch:{name}_seconds_{part}" for name in names for part in ("sum", "count")}
    return {s.name: s.value for family in families for s in family.samples if s.name in wanted}


async def load(address, clients, requests):
    jobs = drawn_jobs(
        Lengths(PROMPT, PROMPT), Lengths(ANSWER, ANSWER), tuple(range(1000, 1000 + PROMPT)), 49152, 0
    )
    async with AsyncWorkerClient(address) as client:
        await client.model_info()  # the connection is there before the clock starts
        generator = LoadGenerator(GrpcCall(client))
        return await generator.run(ClosedLoop(clients), jobs, requests=requests, duration_s=None)


@pytest.mark.parametrize(("clients", "requests"), [(1, 4), pytest.param(8, 16, marks=pytest.mark.slow)])
def test_means_agree_with_the_workers_own(worker, clients, requests):
    """The worker's clock starts when it has read a request and stops when it hands a token on.

    So a client's times to the first token and to the end are longer, by the way there and back and by how
    long a busy machine lets it wait: never shorter, and here at most 10 % longer. Between tokens both ways
    are the same, so that their difference alone is left of them, divided by the tokens of an answer: 3 %
    either way.
    """
    address, port = worker
    before = totals(port)
    run = asyncio.run(load(address, clients, requests))
    after = totals(port, ended=before["llorch:e2e_request_latency_seconds_count"] + requests)
    found = compute_figures(run, open_loop=False)

    def mean_ms(name):
        grown = {
            part: after[f"llorch:{name}_seconds_{part}"] - before[f"llorch:{name}_seconds_{part}"]
            for part in ("sum", "count")
        }
        return grown["sum"] / grown["count"] * 1000, grown["count"]

    assert found.succeeded == requests
    assert found.peak_in_flight == clients
    first, first_count = mean_ms("time_to_first_token")
    between, between_count = mean_ms("inter_token_latency")
    whole, whole_count = mean_ms("e2e_request_latency")
    assert (first_count, whole_count) == (requests, requests)
    assert between_count == requests * (ANSWER - 1)
    assert first < found.ttft_ms.mean < 1.1 * first
    assert whole < found.e2e_ms.mean < 1.1 * whole
    assert found.itl_ms.mean == pytest.approx(between, rel=0.03)
    assert found.tpot_ms.mean == pytest.approx(between, rel=0.03)
