"""The speed of two checkouts of llorch beside each other, by turns of seconds, so that a machine whose speed
wanders within a minute slows both alike.

    ci/measurement two_versions BEFORE AFTER ARTIFACT [PAIRS]

One worker of each checkout stays up; the one that is not asked is idle. Both get the same requests: a prompt
of 512 tokens, one stream, and eight at once, through gRPC. The worker of a pair that comes first alternates.
Prints for each kind of work the median of the pairs' ratios, AFTER to BEFORE, with a 95 % interval of that
median by resampling; a ratio above 1 says that AFTER is faster.
"""

from __future__ import annotations

import concurrent.futures
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import grpc
import numpy as np

from llorch_serve.rpc import worker_pb2 as pb
from llorch_serve.rpc.worker_pb2_grpc import GenerationServiceStub

STREAMS = 8
PROMPT_TOKENS = 512
DECODED_TOKENS = 128
LATENCY_S = 120.0


@dataclass(frozen=True, slots=True)
class Worker:
    """A running worker of one checkout."""

    process: subprocess.Popen[str]
    stub: GenerationServiceStub


def start(checkout: Path, artifact: Path) -> Worker:
    """Start a worker of the code in ``checkout``. Raises RuntimeError if it does not come up."""
    process = subprocess.Popen(
        [
            sys.executable,
            "-P",
            "-m",
            "llorch_serve",
            "serve",
            "--port",
            "0",
            "--slots",
            str(STREAMS),
            artifact,
        ],
        env={**os.environ, "PYTHONPATH": f"{checkout / 'serve'}:{checkout / 'export'}"},
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stderr is not None
    for line in process.stderr:
        if found := re.match(r"serving .* at (\S+)", line):
            address = found.group(1).rstrip(",.;")
            threading.Thread(target=process.stderr.read, daemon=True).start()  # a full pipe would stop it
            return Worker(process, GenerationServiceStub(grpc.insecure_channel(address)))
    raise RuntimeError(f"the worker of {checkout} ended with status {process.wait()}")


def answer(worker: Worker, ids: list[int], tokens: int) -> None:
    """Stream one greedy answer of exactly ``tokens`` tokens."""
    request = pb.GenerateRequest(
        input=pb.Input(tokens=pb.TokenInput(ids=ids)),
        sampling=pb.Sampling(temperature=0, max_tokens=tokens, ignore_eos=True),
    )
    stream = worker.stub.GenerateStream(pb.GenerateStreamRequest(request=request), timeout=LATENCY_S)
    made = sum(len(message.token_ids) for message in stream)
    assert made == tokens, f"{made} tokens came, expected {tokens}"


def prompt(random: np.random.Generator, length: int) -> list[int]:
    """Return a prompt that no cache holds yet."""
    return [int(token) for token in random.integers(1000, 30000, length)]


def prefill(worker: Worker, seed: int) -> None:
    """A prompt of 512 tokens, and one token."""
    answer(worker, prompt(np.random.default_rng(seed), PROMPT_TOKENS), 1)


def decode_one(worker: Worker, seed: int) -> None:
    """One stream after a short prompt."""
    answer(worker, prompt(np.random.default_rng(seed), 8), DECODED_TOKENS)


def decode_eight(worker: Worker, seed: int) -> None:
    """Eight streams at once."""
    with concurrent.futures.ThreadPoolExecutor(STREAMS) as pool:
        prompts = [prompt(np.random.default_rng([seed, i]), 8) for i in range(STREAMS)]
        list(pool.map(lambda ids: answer(worker, ids, DECODED_TOKENS), prompts))


WORK: tuple[Callable[[Worker, int], None], ...] = (prefill, decode_one, decode_eight)


def seconds(work: Callable[[Worker, int], None], worker: Worker, seed: int) -> float:
    """Return how long a worker takes for a piece of work."""
    begin = time.perf_counter()
    work(worker, seed)
    return time.perf_counter() - begin


def interval(ratios: np.ndarray) -> tuple[float, float]:
    """Return the central 95 % of the medians of 2,000 resamples (the bootstrap's percentile interval)."""
    random = np.random.default_rng(0)
    medians = np.median(random.choice(ratios, (2000, len(ratios))), axis=1)
    low, high = np.percentile(medians, [2.5, 97.5])
    return float(low), float(high)


def compare(before: Worker, after: Worker, pairs: int) -> None:
    """Measure and print. The first pair of each kind warms both workers up and does not count."""
    ratios: dict[str, list[float]] = {work.__name__: [] for work in WORK}
    for pair in range(pairs + 1):
        for work in WORK:
            order = (before, after) if pair % 2 else (after, before)
            taken = {id(worker): seconds(work, worker, pair) for worker in order}
            if pair:
                ratios[work.__name__].append(taken[id(before)] / taken[id(after)])
    for name, found in ratios.items():
        low, high = interval(np.array(found))
        median = np.median(found)
        print(f"{name}: {median:.3f} ({low:.3f} to {high:.3f}) over {len(found)} pairs")  # noqa: T201


def main() -> None:
    """Run from the command line."""
    checkouts, artifact = [Path(name).resolve() for name in sys.argv[1:3]], Path(sys.argv[3]).resolve()
    workers: list[Worker] = []
    try:
        workers += (start(checkout, artifact) for checkout in checkouts)
        compare(workers[0], workers[1], int(sys.argv[4]) if len(sys.argv) > 4 else 40)
    finally:
        for worker in workers:
            worker.process.terminate()
            worker.process.wait()


if __name__ == "__main__":
    main()
