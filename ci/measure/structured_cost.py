"""What structured output costs per token: ``ci/measurement structured_cost ARTIFACT [STREAMS ...]``.

In one process, in turns: all requests free, all held to a JSON Schema, and half of each. Printed for each
number of
streams: milliseconds per token of free requests alone, of held ones, and of free ones beside held ones, as
    medians over
rounds, and the slow-down as the median of each round's own ratio.
"""

from __future__ import annotations

import json
import queue
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path

from llorch_serve.config import EngineConfig, SessionConfig
from llorch_serve.loading.worker import load_worker
from llorch_serve.requests import ChatMessage, ChatPrompt, Completion, GenerationRequest, GenerationUpdate
from llorch_serve.sampling.params import SamplingParams
from llorch_serve.structured.spec import JsonSchema
from llorch_serve.worker.worker import Worker

TOKENS = 96
ROUNDS = 7
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 4, "maxLength": 24},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "job": {"enum": ["baker", "nurse", "pilot", "teacher"]},
        "note": {"type": "string", "minLength": 20, "maxLength": 60},
    },
    "required": ["name", "age", "job", "note"],
    "additionalProperties": False,
}
FORM = JsonSchema(json.dumps({"type": "array", "items": PERSON, "minItems": 20}))  # never complete in TOKENS
PROMPT = ChatPrompt((ChatMessage("user", "List twenty people of a small town, with age and job."),))


class _Sink:
    def __init__(self) -> None:
        self.updates: queue.SimpleQueue[list[GenerationUpdate]] = queue.SimpleQueue()

    def deliver(self, updates: list[GenerationUpdate]) -> None:
        self.updates.put(updates)


def run(worker: Worker, held: Sequence[bool], *, seed: int) -> tuple[list[float], list[float]]:
    """Answer one request for each entry together; return milliseconds per token of the free and of the held
    ones.
    """
    sink = _Sink()
    for index, is_held in enumerate(held):
        params = SamplingParams(
            temperature=0.8,
            top_p=0.95,
            seed=seed + index,
            max_tokens=TOKENS,
            ignore_eos=True,
            structured=FORM if is_held else None,
        )
        worker.submit(GenerationRequest(str(index), PROMPT, params), sink)
    found: dict[str, Completion] = {}
    while len(found) < len(held):
        for update in sink.updates.get():
            assert update.error is None, update.error
            if update.completion is not None:
                found[update.request_id] = update.completion
    times: tuple[list[float], list[float]] = ([], [])
    for index, is_held in enumerate(held):
        completion = found[str(index)]
        assert completion.generated_tokens == TOKENS
        times[is_held].append(1000 * completion.timings.decode_s / (TOKENS - 1))
    return times


def main(folder: Path, streams: Sequence[int]) -> None:
    """Measure and print one line for each number of streams."""
    config = EngineConfig(session=SessionConfig(slots=max(streams), max_context=1024))
    worker = load_worker(folder, config, lambda _report: None)
    worker.warm_up()
    for count in streams:
        all_free, all_held = [False] * count, [True] * count
        mixed = [index % 2 == 1 for index in range(count)]
        run(worker, all_held, seed=0)
        rows = []
        for turn in range(ROUNDS):
            free, _ = run(worker, all_free, seed=turn)
            _, held = run(worker, all_held, seed=turn)
            beside, _ = run(worker, mixed, seed=turn) if count > 1 else (free, [])
            rows.append([statistics.mean(times) for times in (free, held, beside)])
        free, held, beside = (statistics.median(column) for column in zip(*rows, strict=True))
        slower_held = statistics.median(row[1] / row[0] - 1 for row in rows)
        slower_beside = statistics.median(row[2] / row[0] - 1 for row in rows)
        print(  # noqa: T201 - a script's output
            f"{count:3} streams: free {free:.2f} ms, held {held:.2f} ms ({slower_held:+.1%}), "
            f"free beside held {beside:.2f} ms ({slower_beside:+.1%})"
        )
    worker.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]), [int(value) for value in sys.argv[2:]] or [1, 8])
