"""Whether a worker's memory stays where it is while requests of random lengths come and go.

    ci/measurement many_requests ARTIFACT [LONGEST]

Starts a worker of its own, sends 2,000 requests from eight clients and prints resident memory at each 200.
Prompts have up to LONGEST tokens (1,000 if not said), short ones more often; what is asked for is the same in
every run.
"""

from __future__ import annotations

import itertools
import queue
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import psutil

from llorch_serve.client.blocking import WorkerClient
from llorch_serve.requests import GenerationRequest, TokenPrompt
from llorch_serve.sampling.params import SamplingParams
from support.harness.processes import serving

REQUESTS = 2000
WINDOW = 200
CLIENTS = 8


def random_request(
    index: int, *, vocabulary: int, longest_prompt: int, longest_answer: int
) -> GenerationRequest:
    """Return request ``index``: lengths drawn log-uniformly, every other one greedy."""
    draw = np.random.default_rng(index)
    length, wanted = (int(most ** draw.random()) for most in (longest_prompt, longest_answer))
    prompt = tuple(int(token) for token in draw.integers(0, vocabulary, length))
    sampling = SamplingParams(
        temperature=float(index % 2), seed=index, max_tokens=wanted, ignore_eos=bool(index % 3)
    )
    return GenerationRequest(f"request-{index}", TokenPrompt(prompt), sampling)


def resident_memory(
    address: str, pid: int, make: Callable[[int], GenerationRequest], *, requests: int = REQUESTS
) -> list[int]:
    """Send requests and return the process's resident bytes after each window of :data:`WINDOW` that have
    ended.
    """
    process, numbers = psutil.Process(pid), itertools.count()
    readings: queue.SimpleQueue[int | Exception] = queue.SimpleQueue()

    def client() -> None:
        try:
            with WorkerClient(address) as worker:
                for index in iter(lambda: next(numbers), None):
                    if index >= requests:
                        return
                    assert list(worker.generate(make(index)))[-1].completion is not None
                    readings.put(process.memory_info().rss)
        except Exception as error:  # noqa: BLE001 - raised again by whoever reads
            readings.put(error)

    threads = [threading.Thread(target=client, name=f"client-{n}") for n in range(CLIENTS)]
    for thread in threads:
        thread.start()
    found: list[int] = []
    for _ in range(requests):
        reading = readings.get(timeout=600)
        if isinstance(reading, Exception):
            raise reading
        found.append(reading)
    for thread in threads:
        thread.join()
    return [max(found[start : start + WINDOW]) for start in range(0, requests, WINDOW)]


def main(folder: Path, longest: int) -> None:
    """Measure and print."""
    with serving(folder, "--slots", CLIENTS, "--max-context", longest + 100) as worker:
        with WorkerClient(worker.address) as client:
            vocabulary = client.model_info().vocab_size
        windows = resident_memory(
            worker.address,
            worker.command.process.pid,
            lambda index: random_request(
                index, vocabulary=vocabulary, longest_prompt=longest, longest_answer=64
            ),
        )
    for number, most in enumerate(windows, 1):
        print(f"{WINDOW * number:5} requests: {most / 2**20:7.1f} MiB")  # noqa: T201 - a script's output


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 1000)
