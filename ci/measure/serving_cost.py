"""What the ways into a worker cost: tokens per second through gRPC and HTTP beside the engine alone, and two
waits.

    ci/measurement serving_cost ARTIFACT [--restarts 3] [--rounds 3] [--stream-interval auto] [--output
    FILE.json]

Every round runs the same work on the engine alone (in this process), through gRPC and through HTTP (a worker
process; this one is the client, on the same processors), in an order that turns from round to round. What is
asked of gRPC is asked with the least that reads its streams, as over HTTP; beside it stands llorch's own
client, whose processor time is the engine's loss too. Ratios are taken within a round. A process keeps a
speed of its own, some percent apart from another's, so engine and worker are started several times. Each
time, with the worker idle: the first token of a short prompt, and how long a slot stays taken once its call
is cancelled. Means something on a machine with nothing else to do.
"""

from __future__ import annotations

import functools
import http.client
import itertools
import json
import socket
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer

from llorch_serve.bench.measure import LocalBackend
from llorch_serve.bench.workload import Workload, text_prompt
from llorch_serve.client.blocking import WorkerClient
from llorch_serve.config import EngineConfig, SessionConfig
from llorch_serve.requests import GenerationRequest, TokenPrompt
from llorch_serve.rpc import worker_pb2 as pb
from llorch_serve.rpc.convert import write_generation_request
from llorch_serve.terminal.opening import open_worker
from measure.threads import together
from support.harness.processes import PATIENCE_S, serving
from support.harness.raw_http2 import Streams, connected

STREAMS = (1, 8)
PROMPT_TOKENS = 16
PYTHON_CLIENT = "gRPC, Python's client"
WAYS = ("alone", "gRPC", PYTHON_CLIENT, "HTTP")
ASKED = {("gRPC", 1): 0.92, ("gRPC", 8): 0.97, ("HTTP", 1): 0.88, ("HTTP", 8): 0.95}
WAIT_MS = 100.0
ENDLESS = 4000  # tokens, of answers that are cancelled

Run = Callable[[list[GenerationRequest]], float]
"""Does requests that start together; returns the seconds until the last token has come."""


@dataclass(slots=True)
class Costs:
    """Tokens per second by way and number of streams, one for each round; milliseconds of each wait."""

    speeds: dict[str, list[float]] = field(default_factory=dict)
    waits: dict[str, list[float]] = field(default_factory=dict)

    def ratios(self, way: str, streams: int) -> list[float]:
        """Return a way's share of the engine's own speed, round by round."""
        pairs = zip(self.speeds[f"{way}, {streams}"], self.speeds[f"alone, {streams}"], strict=True)
        return [found / alone for found, alone in pairs]


class OverHttp:
    """The least that reads a streamed completion: the standard library, a connection for each stream."""

    def __init__(self, port: int) -> None:
        self._port = port

    def chunks(self, request: GenerationRequest) -> Iterator[Any]:
        """Yield the chunks of an answer as they come. An iterator that is closed early hangs up."""
        assert isinstance(request.prompt, TokenPrompt)
        body = {
            "prompt": list(request.prompt.token_ids),
            "max_tokens": request.sampling.max_tokens,
            "temperature": request.sampling.temperature,
            "ignore_eos": True,
            "stream": True,
        }
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=PATIENCE_S)
        try:
            connection.request(
                "POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"}
            )
            response = connection.getresponse()
            if response.status != 200:
                raise RuntimeError(response.read().decode())
            for line in response:
                if line.startswith(b"data: {"):
                    yield msgspec.json.decode(line[6:])
        finally:
            connection.close()


class LeastGrpc:
    """The least that reads streams over gRPC: frames of one connection, whose messages are counted and not
    read.
    """

    def __init__(self, connection: socket.socket) -> None:
        self._streams = Streams(connection)

    def run(self, requests: list[GenerationRequest]) -> float:
        """Do requests that start together; return the seconds until the last token has come."""
        messages = [
            pb.GenerateStreamRequest(request=write_generation_request(request)) for request in requests
        ]
        begun = time.perf_counter()
        answers = self._streams.messages("/llorch.v1.GenerationService/GenerateStream", messages)
        seconds = time.perf_counter() - begun
        for request, answer in zip(requests, answers, strict=True):
            tokens = sum(len(pb.GenerateStreamResponse.FromString(message).token_ids) for message in answer)
            if tokens != request.sampling.max_tokens:
                raise RuntimeError(f"{tokens} tokens came, expected {request.sampling.max_tokens}")
        return seconds


def at_once(follow: Callable[[GenerationRequest], object]) -> Run:
    """Return what runs a way's requests on a thread each."""
    return lambda requests: together([functools.partial(follow, request) for request in requests])


def alone(backend: LocalBackend) -> Run:
    """Return what runs requests on the engine in this process."""

    def run(requests: list[GenerationRequest]) -> float:
        begun = time.perf_counter()
        backend.run(requests)
        return time.perf_counter() - begun

    return run


def measure_speeds(ways: dict[str, Run], work: Workload, rounds: int, costs: Costs) -> None:
    """Fill in speeds; a round before the first is not counted."""
    names, numbers = list(ways), itertools.count()
    for round_ in range(rounds + 1):
        for streams in STREAMS:
            for turn in range(len(names)):
                way = names[(turn + round_) % len(names)]
                requests = [work.request(f"request-{next(numbers)}") for _ in range(streams)]
                seconds = ways[way](requests)
                if round_ > 0:
                    costs.speeds.setdefault(f"{way}, {streams}", []).append(
                        streams * work.max_tokens / seconds
                    )


def measure_waits(
    client: WorkerClient, over_http: OverHttp, work: Workload, times: int, costs: Costs
) -> None:
    """Fill in waits, by turns over gRPC and HTTP, with nothing else going on."""
    ways: dict[str, Callable[[GenerationRequest], Iterator[Any]]] = {
        "gRPC": client.generate,
        "HTTP": over_http.chunks,
    }
    endless = Workload(work.prompt_ids, ENDLESS, work.vocab_size)
    for number in range(times + 1):
        for way, open_stream in ways.items():
            begun = time.perf_counter()
            stream = open_stream(endless.request(f"wait-{way}-{number}"))
            next(stream)
            first_ms = 1000 * (time.perf_counter() - begun)
            for _ in range(8):
                next(stream)
            assert client.load().running == 1
            begun = time.perf_counter()
            stream.close()  # type: ignore[attr-defined]  # both are generators
            while client.load().running:
                if time.perf_counter() - begun > PATIENCE_S:
                    raise RuntimeError("a cancelled request keeps its slot")
            free_ms = 1000 * (time.perf_counter() - begun)
            if number > 0:
                costs.waits.setdefault(f"first token, {way}", []).append(first_ms)
                costs.waits.setdefault(f"cancel to free slot, {way}", []).append(free_ms)


def measure(
    artifact: Path, costs: Costs, *, rounds: int, times: int, answer: int, interval: str = "auto"
) -> None:
    """Start an engine and a worker, and measure everything."""
    engine = open_worker(
        artifact, EngineConfig(session=SessionConfig(slots=max(STREAMS), huge_pages=None)), tokenizer=None
    )
    try:
        engine.warm_up()
        prompt = text_prompt(PROMPT_TOKENS, engine.tokenize)
        work = Workload(prompt, answer, engine.model_info().vocab_size)
        with (
            serving(artifact, "--slots", max(STREAMS), "--http", 0, "--stream-interval", interval) as worker,
            WorkerClient(worker.address) as client,
            connected(worker.address, PATIENCE_S) as connection,
        ):
            over_http = OverHttp(int(worker.command.wait_for_line(r"HTTP at http://\S+:(\d+)").group(1)))
            ways = {
                "alone": alone(LocalBackend(engine)),
                "gRPC": LeastGrpc(connection).run,
                PYTHON_CLIENT: at_once(lambda request: list(client.generate(request))),
                "HTTP": at_once(lambda request: list(over_http.chunks(request))),
            }
            measure_speeds(ways, work, rounds, costs)
            measure_waits(client, over_http, work, times, costs)
    finally:
        engine.close()


def table(costs: Costs) -> str:
    """Return medians with the least and the most, beside what is asked."""
    lines = ["| | streams | tokens/s | of alone | asked |", "|---|---|---|---|---|"]
    for way in WAYS:
        for streams in STREAMS:
            share = "" if way == "alone" else spread(costs.ratios(way, streams), ".3f")
            asked = f"at least {ASKED[way, streams]:.2f}" if (way, streams) in ASKED else ""
            speed = spread(costs.speeds[f"{way}, {streams}"], ".1f")
            lines.append(f"| {way} | {streams} | {speed} | {share} | {asked} |")
    lines += ["", "| idle worker, prompt of 16 tokens | ms | asked |", "|---|---|---|"]
    lines += [
        f"| {wait} | {spread(found, '.1f')} | below {WAIT_MS:.0f} |" for wait, found in costs.waits.items()
    ]
    return "\n".join(lines)


def spread(values: list[float], shape: str) -> str:
    """Return the median, with the least and the most."""
    return f"{statistics.median(values):{shape}} ({min(values):{shape}} to {max(values):{shape}})"


def missed(costs: Costs) -> list[str]:
    """Return what is asked and not held, by medians."""
    found = [
        f"{way} at {streams}"
        for (way, streams), least in ASKED.items()
        if statistics.median(costs.ratios(way, streams)) < least
    ]
    return found + [wait for wait, values in costs.waits.items() if statistics.median(values) >= WAIT_MS]


def main(
    artifact: Path,
    restarts: Annotated[int, typer.Option(min=1, help="Starts of engine and worker.")] = 3,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds after each.")] = 3,
    times: Annotated[int, typer.Option(min=1, help="How often each wait is measured after each.")] = 7,
    answer: Annotated[int, typer.Option(min=2, help="Tokens of each answer.")] = 128,
    stream_interval: Annotated[str, typer.Option(help="The worker's.")] = "auto",
    output: Annotated[Path, typer.Option(help="Where measurements go as JSON.")] = Path("serving_cost.json"),
) -> None:
    """Measure and print; exit with 1 where a median misses what is asked."""
    costs = Costs()
    for _ in range(restarts):
        measure(artifact, costs, rounds=rounds, times=times, answer=answer, interval=stream_interval)
    output.write_bytes(msgspec.json.format(msgspec.json.encode(costs)))
    typer.echo(table(costs))
    if found := missed(costs):
        typer.echo(f"missed: {', '.join(found)}", err=True)
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
