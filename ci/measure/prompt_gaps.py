"""How long a running stream waits while a long prompt arrives, and what that prompt's rate loses.

    ci/measurement prompt_gaps ARTIFACT [TOKENS]

Prints the prompt's tokens per second alone and beside one running stream, and that stream's longest gap
between two tokens, for three rounds. Needs an idle machine and a context of more than TOKENS (4,000 if not
said).
"""

from __future__ import annotations

import itertools
import sys
import threading
import time
from pathlib import Path

from llorch_serve.config import EngineConfig, SessionConfig
from llorch_serve.loading.worker import load_worker
from llorch_serve.requests import Abort, GenerationRequest, GenerationUpdate, TokenPrompt
from llorch_serve.sampling.params import SamplingParams
from llorch_serve.worker.worker import Worker

ROUNDS = 3


class Arrivals:
    """Notes when tokens of one request arrive."""

    def __init__(self) -> None:
        self.times: list[float] = []
        self.first = threading.Event()
        self.last = threading.Event()
        self.abort: Abort | None = None

    def deliver(self, updates: list[GenerationUpdate]) -> None:
        """Take a step's updates."""
        for update in updates:
            self.times += [time.perf_counter()] * len(update.token_ids)
            self.first.set()
            if update.is_last:
                self.last.set()


def submit(worker: Worker, name: str, prompt: tuple[int, ...], tokens: int) -> Arrivals:
    """Start a greedy request that no stop token ends."""
    sink = Arrivals()
    params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
    sink.abort = worker.submit(GenerationRequest(name, TokenPrompt(prompt), params), sink)
    return sink


def main(folder: Path, length: int) -> None:
    """Measure and print."""
    config = EngineConfig(
        SessionConfig(slots=2, max_context=length + 100, huge_pages=None), prefix_cache=False
    )
    worker = load_worker(folder, config, lambda _report: None)
    long = tuple(100 + i % 400 for i in range(length))
    submit(worker, "warm-up", long, 1).last.wait()
    for index in range(ROUNDS):
        start = time.perf_counter()
        alone = submit(worker, f"alone {index}", long, 1)
        alone.last.wait()
        rate = length / (alone.times[0] - start)
        stream = submit(worker, f"stream {index}", (5, 6, 7), length)
        stream.first.wait()
        time.sleep(0.5)  # until it runs steadily
        start = time.perf_counter()
        beside = submit(worker, f"beside {index}", long, 1)
        beside.last.wait()
        assert stream.abort is not None
        stream.abort()
        stream.last.wait()
        during = [t for t in stream.times if start - 0.1 < t < beside.times[0] + 0.1]
        gap = max(later - earlier for earlier, later in itertools.pairwise(during))
        loaded = length / (beside.times[0] - start)
        print(  # noqa: T201 - a script's output
            f"alone {rate:.0f} tokens/s, beside a stream {loaded:.0f} ({loaded / rate:.2f}), longest gap "
            f"{1000 * gap:.0f} ms"
        )
    worker.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 4000)
