"""What Ray and a front cost, and what choosing by prompts brings, on replicas of one core each.

    ci/measurement cluster ARTIFACT [--rounds 5] [--prompt-tokens 512] [--answer-tokens 128]

On this machine: two replicas of one core and eight slots behind a front, beside one worker with two threads
and sixteen slots. Prints tokens of answers per second at 8 and 16 clients, round by round by turns, with
prompts and answers as long as those of ``ci/bench`` unless said otherwise; the processor time
that the front's process takes for each message of a stream; the time to the first token beside a worker of
one thread; and of six conversations of four turns, how many of the tokens were cached that could have been,
by prompts and by the power of two. This process is the client. Means something on a machine with nothing else
to do.

``--front ROUTER`` is what it starts itself: a cluster, the replicas and a front, until it is told to stop.
"""

from __future__ import annotations

import asyncio
import functools
import random
import re
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated
from unittest import mock

import psutil
import typer

from llorch_serve.artifact.folder import load_artifact
from llorch_serve.client.blocking import WorkerClient
from llorch_serve.cluster import deploy as deploying
from llorch_serve.cluster.actor import ReplicaActor
from llorch_serve.cluster.front_model import open_front_model
from llorch_serve.cluster.handles import find_replicas
from llorch_serve.cluster.routed_generator import open_routed
from llorch_serve.cluster.settings import ReplicaSettings
from llorch_serve.cluster.spec import ModelSpec, ReplicaRange, llorch_version
from llorch_serve.config import EngineConfig, SessionConfig
from llorch_serve.engine.reuse import ROWS_LEFT, common_prefix
from llorch_serve.lifecycle.serving import serve
from llorch_serve.requests import Completion, GenerationRequest, TokenPrompt
from llorch_serve.rpc.server import ServerConfig
from llorch_serve.sampling.params import SamplingParams
from measure.threads import together
from support.cluster import ray_cluster
from support.harness.processes import WorkerProcess, serving

MODEL = "measured"
REPLICAS = 2
SLOTS = 8
CONTEXT = 2048
CLIENTS = (8, 16)
REQUESTS = 3  # of each client in a round
ASKED = {8: 0.60, 16: 0.95}
FIRST_TOKENS = 20  # times that a first token is waited for in a round
FIRST_PROMPT_TOKENS = 16
CONVERSATIONS, TURNS = 6, 4
CONVERSATION_SLOTS = 4
START_S = 600.0
ROUTERS = {
    "prompts": "llorch_serve.cluster.router.PrefixRouter",
    "two": "ray.serve._private.request_router:PowerOfTwoChoicesRequestRouter",
}


def run_front(artifact: Path, router: str, slots: int) -> None:
    """Serve the artifact by replicas of one core until a signal comes."""
    fingerprint = load_artifact(artifact).manifest.fingerprint
    settings = ReplicaSettings(
        model=MODEL,
        artifact=str(artifact),
        fingerprint=fingerprint,
        version=llorch_version(),
        cores=1,
        engine=EngineConfig(session=SessionConfig(slots=slots, max_context=CONTEXT, huge_pages=None)),
    )
    chosen = {"request_router_class": ROUTERS[router]}
    with ray_cluster(), mock.patch.object(deploying, "_ROUTING", chosen):
        deploying.deploy([ModelSpec(settings, ReplicaRange(REPLICAS, REPLICAS))], ReplicaActor)
        deploying.await_running([MODEL], START_S, lambda _: None)
        replicas = find_replicas(MODEL, fingerprint)
        asyncio.run(
            serve(
                lambda: open_routed(replicas, lambda told: open_front_model(artifact, told)),
                ServerConfig(port=0, drain_timeout_s=1),
                on_ready=lambda address: _say(f"serving replicas at {address}"),
            )
        )


def _say(line: str) -> None:
    sys.stderr.write(line + "\n")
    sys.stderr.flush()


@dataclass(frozen=True, slots=True)
class Work:
    """What a client asks for, in tokens."""

    prompt_tokens: int
    answer_tokens: int


@dataclass(frozen=True, slots=True)
class Front:
    """A process that :func:`run_front` runs in. address: HOST:PORT."""

    address: str
    pid: int


@contextmanager
def fronting(artifact: Path, router: str, slots: int = SLOTS) -> Iterator[Front]:
    """Start replicas and their front; end them afterwards. Raises RuntimeError if they do not come up."""
    command = [sys.executable, "-P", "-m", "measure.cluster", artifact, "--front", router, "--slots"]
    process = subprocess.Popen([*map(str, command), str(slots)], stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    try:
        lines: list[str] = []
        for line in process.stderr:
            lines.append(line)
            if match := re.match(r"serving .* at (\S+)$", line):
                # What it still says must be read, or it would stop at a full pipe.
                threading.Thread(target=process.stderr.read, daemon=True).start()
                yield Front(match[1], process.pid)
                return
        raise RuntimeError("".join(lines))
    finally:
        process.terminate()
        process.wait(60)


def request(name: str, ids: Sequence[int], tokens: int) -> GenerationRequest:
    """Return a request for so many tokens, the likeliest ones."""
    sampling = SamplingParams(temperature=0, repetition_penalty=1, max_tokens=tokens, ignore_eos=True)
    return GenerationRequest(name, TokenPrompt(tuple(ids)), sampling)


@dataclass(slots=True)
class Answer:
    """What came of a request. messages: of its stream."""

    first_s: float = 0.0
    messages: int = 0
    ids: list[int] = field(default_factory=list)
    completion: Completion | None = None


def ask(client: WorkerClient, asked: GenerationRequest) -> Answer:
    """Send a request, and read its answer to the end."""
    answer, begun = Answer(), time.perf_counter()
    for update in client.generate(asked):
        if not answer.messages:
            answer.first_s = time.perf_counter() - begun
        answer.messages += 1
        answer.ids += update.token_ids
        answer.completion = update.completion or answer.completion
    return answer


def closed_loop(address: str, clients: int, work: Work, seed: int) -> tuple[float, int]:
    """Return tokens of answers per second of so many clients, each of which sends one request after another,
    and the messages that came.
    """
    answers: list[Answer] = []
    connections = [WorkerClient(address) for _ in range(clients)]

    def one(number: int) -> None:
        draw = random.Random(1000 * seed + number)
        for turn in range(REQUESTS):
            ids = [draw.randrange(1000, 40_000) for _ in range(work.prompt_tokens)]
            asked = request(f"{seed}-{number}-{turn}", ids, work.answer_tokens)
            answers.append(ask(connections[number], asked))

    seconds = together([functools.partial(one, number) for number in range(clients)])
    for connection in connections:
        connection.close()
    assert all(len(answer.ids) == work.answer_tokens for answer in answers)
    return work.answer_tokens * len(answers) / seconds, sum(answer.messages for answer in answers)


def measure_speed(front: Front, worker: WorkerProcess, work: Work, rounds: int) -> Iterator[str]:
    """Give lines about tokens per second and the front's processor time."""
    process = psutil.Process(front.pid)
    for clients in CLIENTS:
        ratios, speeds, spent, messages = [], [], 0.0, 0
        for round_ in range(rounds + 1):
            found: dict[str, float] = {}
            ways = [("front", front.address), ("worker", worker.address)]
            for name, address in ways if round_ % 2 else reversed(ways):
                before = sum(process.cpu_times()[:2])
                found[name], came = closed_loop(address, clients, work, round_)
                if name == "front" and round_:
                    spent += sum(process.cpu_times()[:2]) - before
                    messages += came
            if round_:
                ratios.append(found["front"] / found["worker"])
                speeds.append((found["front"], found["worker"]))
        front_speed, worker_speed = (statistics.median(each) for each in zip(*speeds, strict=True))
        yield (
            f"{clients} clients: {front_speed:.0f} tokens/s, worker {worker_speed:.0f}; ratio "
            f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f}), asked "
            f"{ASKED[clients]}; the front's process: {1000 * spent / messages:.2f} ms a message "
            f"({messages} messages)"
        )


def measure_first(front: Front, worker: WorkerProcess, rounds: int) -> str:
    """Return a line about the time to the first token. worker: with one thread, as a replica has."""
    medians = [first_tokens(front, worker, round_) for round_ in range(rounds + 1)][1:]
    front_ms, worker_ms = (statistics.median(each) for each in zip(*medians, strict=True))
    added = [one - other for one, other in medians]
    return (
        f"first token: {front_ms:.1f} ms, worker of one thread {worker_ms:.1f} ms; added "
        f"{statistics.median(added):.1f} ms ({min(added):.1f} to {max(added):.1f}), asked at most 15"
    )


def first_tokens(front: Front, worker: WorkerProcess, seed: int) -> tuple[float, float]:
    """Return the median times to the first token in milliseconds, the front's and the worker's, by turns."""
    waits: dict[str, list[float]] = {"front": [], "worker": []}
    with WorkerClient(front.address) as one, WorkerClient(worker.address) as other:
        for number in range(FIRST_TOKENS):
            draw = random.Random(1000 * seed + number)
            ways = [("front", one), ("worker", other)]
            for name, client in ways if number % 2 else reversed(ways):
                ids = [draw.randrange(1000, 40_000) for _ in range(FIRST_PROMPT_TOKENS)]
                waits[name].append(1000 * ask(client, request(f"first-{seed}-{number}", ids, 2)).first_s)
    return statistics.median(waits["front"]), statistics.median(waits["worker"])


def share_cached(address: str, seed: int) -> float:
    """Return the share of reusable tokens that were cached in conversations which go on at once."""
    cached, reusable = [0], [0]

    def talk(number: int) -> None:
        draw = random.Random(1000 * seed + number)
        history: list[int] = []
        with WorkerClient(address) as client:
            for turn in range(TURNS):
                said = [draw.randrange(1000, 40_000) for _ in range(draw.randint(8, 60))]
                prompt = history + said
                wanted = prompt[: max(0, len(prompt) - ROWS_LEFT)]
                reusable[0] += common_prefix(wanted, history[:-1])
                answer = ask(client, request(f"{seed}-{number}-{turn}", prompt, draw.randint(8, 60)))
                assert answer.completion is not None
                cached[0] += answer.completion.cached_tokens
                history = prompt + answer.ids
                time.sleep(draw.uniform(0, 0.5))

    together([functools.partial(talk, number) for number in range(CONVERSATIONS)])
    return cached[0] / reusable[0]


def main(
    artifact: Path,
    rounds: Annotated[int, typer.Option(min=1)] = 5,
    prompt_tokens: Annotated[int, typer.Option(min=1)] = 512,
    answer_tokens: Annotated[int, typer.Option(min=2)] = 128,
    front: Annotated[str | None, typer.Option(help="prompts or two")] = None,
    slots: int = SLOTS,
) -> None:
    """Measure, or be a front."""
    if front is not None:
        run_front(artifact.resolve(), front, slots)
        return
    flags = ("--slots", str(REPLICAS * SLOTS), "--max-context", str(CONTEXT))
    with fronting(artifact, "prompts") as replicas:
        with serving(artifact, "--threads", "2", *flags) as worker:
            for line in measure_speed(replicas, worker, Work(prompt_tokens, answer_tokens), rounds):
                typer.echo(line)
        with serving(artifact, "--threads", "1", *flags) as worker:
            typer.echo(measure_first(replicas, worker, rounds))
    for router, name in (("prompts", "by prompts"), ("two", "power of two")):
        with fronting(artifact, router, CONVERSATION_SLOTS) as replicas:
            shares = [share_cached(replicas.address, seed) for seed in range(rounds)]
        typer.echo(
            f"six conversations of four turns, {name}: {statistics.median(shares):.1%} of reusable tokens "
            f"cached ({min(shares):.1%} to {max(shares):.1%})"
        )


if __name__ == "__main__":
    typer.run(main)
