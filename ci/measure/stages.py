"""Print what stages bring: a model in stages, each in a process with a core of its own, beside one process
with one core.

    ci/measurement stages WHOLE STAGED [STREAMS [DEPTH]]

WHOLE and STAGED are artifacts of one model, the second exported with --stages, cut where the stages are busy
alike at that depth: SmolLM2's default recipe with ``--stages 2,at=17`` after prompts of 512 tokens, and with
``at=18`` at depth 0, since the default cut counts bytes, and a step reads little of the embedding. Rounds
alternate, and medians are shown. Needs as many idle cores as there are stages; 8 streams after prompts of 512
tokens unless said otherwise, which is what ``ci/bench`` measures.
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from llorch_serve.artifact.folder import load_artifact
from llorch_serve.python_child import child_environment

ROUNDS = 5
TOKENS = 128

Run = dict[str, float]


def bench(folder: Path, cores: Sequence[int], streams: int, depth: int, *flags: str) -> Run:
    """Return the figures of one run on some cores, each stream with so many tokens before its answer."""
    command = [
        sys.executable, "-P", "-m", "llorch_serve", "bench", str(folder), "--tests", "decode",
        "--streams", str(streams), "--depth", str(depth), "--max-tokens", str(TOKENS), "--repeat", "1",
        "--json", *flags,
    ]  # fmt: skip
    done = subprocess.run(
        [shutil.which("taskset") or "taskset", "--cpu-list", ",".join(map(str, cores)), *command],
        check=True,
        capture_output=True,
        env=child_environment(),
    )
    (entry,) = json.loads(done.stdout)["entries"]
    (row,) = entry["rows"]
    return {name: figure["median"] for name, figure in row["figures"].items()}


def main(whole: Path, staged: Path, streams: int = 8, depth: int = 512) -> None:
    """Measure in turns, and print a line for each way and their ratio."""
    stages = len(load_artifact(staged).manifest.stages or ())
    cores = sorted(os.sched_getaffinity(0))[:stages]
    if len(cores) < stages:
        sys.exit(f"{stages} stages need as many cores, and {len(cores)} may be used here")
    ways = {
        "one process, one core": lambda: bench(whole, cores[:1], streams, depth),
        "a process and a core a stage": lambda: bench(staged, cores, streams, depth, "--stage-processes"),
    }
    runs: dict[str, list[Run]] = {name: [] for name in ways}
    for _ in range(ROUNDS):
        for name, run in ways.items():
            runs[name].append(run())
    speeds = []
    for name, found in runs.items():
        speeds.append(statistics.median(run["decode_tokens_per_s"] for run in found))
        busy = [
            f"{title.replace('_', ' ')} {statistics.median(run[title] for run in found):.0f} %"
            for title in found[0]
            if title.endswith("_busy")
        ]
        low, high = (pick(run["decode_tokens_per_s"] for run in found) for pick in (min, max))
        print(f"{name}: {speeds[-1]:.1f} tokens/s ({low:.1f}..{high:.1f}) {', '.join(busy)}")  # noqa: T201 - what it is for
    print(f"{streams} streams at depth {depth}, {stages} stages: {speeds[1] / speeds[0]:.2f} times")  # noqa: T201 - as above


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), *map(int, sys.argv[3:5]))
