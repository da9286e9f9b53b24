"""What a decode step costs as context and streams grow, as a table and a picture.

    ci/measurement step_cost ARTIFACT PICTURE.png

Runs the session alone, without scheduler and sampling, over a cache that a real prompt has filled. Needs an
idle machine and, with eight streams of 4,096 tokens, a gigabyte.
"""

from __future__ import annotations

import statistics
import sys
import time
from pathlib import Path

from matplotlib.figure import Figure

from llorch_serve.config import SessionConfig
from llorch_serve.loading.models import load_model, open_model
from llorch_serve.worker.served import ServedSession

CONTEXTS = (128, 512, 1024, 2048, 4096)
STREAMS = (1, 2, 4, 8, 16, 32)
LONGEST_BATCH = 8 * CONTEXTS[-1]  # tokens over all streams, for which the cache must have room
STEPS = 12
PASSES = 3

Costs = dict[tuple[int, int], float]


def measure(session: ServedSession) -> Costs:
    """Return seconds per step, the median over all steps, by streams and context; passes go through all of
    them in turn.
    """
    most = CONTEXTS[-1]
    for start in range(0, most, 256):
        session.prefill(0, [100 + i % 400 for i in range(start, start + 256)], start)
    filled = {0: most}
    times: dict[tuple[int, int], list[float]] = {}
    for _ in range(PASSES):
        for streams in STREAMS:
            for context in CONTEXTS:
                if streams * context > LONGEST_BATCH:
                    continue
                for slot in range(streams):
                    if filled.get(slot, 0) < context:
                        session.copy_slot(0, slot, context)
                        filled[slot] = context
                for step in range(STEPS + 2):
                    began = time.perf_counter()
                    session.decode([200 + step] * streams, [context] * streams)
                    if step >= 2:  # the first ones bind buffers and wake threads
                        times.setdefault((streams, context), []).append(time.perf_counter() - began)
    return {key: statistics.median(values) for key, values in times.items()}


def draw(costs: Costs, path: Path) -> None:
    """Write the picture: milliseconds of a step against context and against streams."""
    figure = Figure(figsize=(11, 4.5), layout="constrained")
    by_context, by_streams = figure.subplots(1, 2)
    for streams in STREAMS:
        at = [context for context in CONTEXTS if (streams, context) in costs]
        label = f"{streams} stream{'s' if streams > 1 else ''}"
        by_context.plot(at, [1000 * costs[streams, c] for c in at], marker="o", label=label)
    for context in CONTEXTS:
        at = [streams for streams in STREAMS if (streams, context) in costs]
        by_streams.plot(
            at, [1000 * costs[s, context] / s for s in at], marker="o", label=f"context {context:,}"
        )
    by_context.set(xlabel="tokens of context, each stream", ylabel="ms a step")
    by_context.set_xlim(right=1.4 * CONTEXTS[-1])  # room for the legend
    by_streams.set(xlabel="streams", ylabel="ms a token", xscale="log")
    by_streams.set_xticks(STREAMS, [str(s) for s in STREAMS])
    for axes in (by_context, by_streams):
        axes.set_ylim(bottom=0)
        axes.grid(visible=True, alpha=0.3)
        axes.legend()
    figure.savefig(path, dpi=110, format="png", metadata={"Software": None})


def main(folder: Path, picture: Path) -> None:
    """Measure, print a table and draw."""
    config = SessionConfig(slots=max(STREAMS), max_context=CONTEXTS[-1] + 1, huge_pages=None)
    session = open_model(load_model(folder), config, lambda report: None)
    costs = measure(session)
    print("| streams | " + " | ".join(f"{context:,}" for context in CONTEXTS) + " |")  # noqa: T201 - a script's output
    print("|" + " --- |" * (len(CONTEXTS) + 1))  # noqa: T201 - as above
    for streams in STREAMS:
        cells = [f"{1000 * costs[streams, c]:.1f}" if (streams, c) in costs else "" for c in CONTEXTS]
        print(f"| {streams} | " + " | ".join(cells) + " |")  # noqa: T201 - as above
    draw(costs, picture)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
