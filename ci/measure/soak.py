"""A worker at saturation for as long as is wanted: 64 clients on 8 slots, with a queue too short for all of
them.

    ci/measurement soak ARTIFACT [--minutes 20] [--output FILE.json]

Prints what is asked of the worker and what was found, writes the measurements as JSON, and exits with 1 where
something does not hold. Speed is compared with the engine alone, which does the same work before and after,
in this process and without gRPC. Means something on a machine with nothing else to do.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import msgspec
import numpy as np
import typer

from llorch_serve.artifact.folder import load_artifact
from llorch_serve.bench.measure import LocalBackend, RemoteBackend
from llorch_serve.client.blocking import WorkerClient
from llorch_serve.config import EngineConfig, SessionConfig
from llorch_serve.python_child import module_command
from llorch_serve.terminal.opening import open_worker
from measure.soak_clients import CYCLE, Seen, Work
from measure.watching import SPARE, Footprint, Watched, settled, watching
from support.harness.processes import WorkerProcess, serving, with_scripts

CLIENTS = 64
SLOTS = 8
QUEUE = 48  # slots and queue together have no room for all clients: some are refused at any time
WINDOWS = 10
MEMORY_ROOM = 8 * 2**20  # bytes; 1 KiB kept by each of 10,000 requests would be more
HEALTH_P99_MS = 50.0
SHARE_OF_ALONE = 0.95


@dataclass(frozen=True, slots=True)
class Soaked:
    """What a run found. since, until: the measured time. alone: tokens per second of the engine, before and
    after.
    """

    since: float
    until: float
    seen: Seen
    watched: Watched
    before: Footprint
    after: Footprint
    alone: tuple[float, ...]

    @property
    def windows(self) -> list[int]:
        """The most resident bytes in each tenth of the measured time."""
        step = (self.until - self.since) / WINDOWS
        return [
            max(size for at, size in self.watched.memory if 0 <= at - self.since - number * step <= step)
            for number in range(WINDOWS)
        ]


@dataclass(frozen=True, slots=True)
class Check:
    """One line of the table."""

    what: str
    found: str
    asked: str
    holds: bool


def judge(run: Soaked) -> list[Check]:
    """Return everything that is asked, with what was found."""
    failures, checked = run.seen.failures, len(run.watched.kept_ms) + len(run.watched.new_ms)
    first, later = min(run.windows[:2]), run.windows[2:]
    share = run.seen.rate(run.since, run.until) / statistics.mean(run.alone)
    return [
        Check(
            f"failures beside {run.seen.answers:,} answers and {run.seen.refused:,} RESOURCE_EXHAUSTED",
            "; ".join(f"{count} {words}" for words, count in failures.items()) or "0",
            "0",
            not failures and run.seen.answers > 0,
        ),
        Check(
            f"health checks that were not SERVING, of {checked:,}",
            "; ".join(run.watched.unwell[:3]) or "0",
            "0",
            not run.watched.unwell and checked > 0,
        ),
        *(
            _timed(times, name)
            for name, times in (("kept", run.watched.kept_ms), ("new", run.watched.new_ms))
        ),
        Check(
            "resident memory without the mapped weights: highest in the lower of the first two tenths, and "
            "in a later one",
            f"{first / 2**20:.1f} MiB, {(max(later) - first) / 2**20:+.1f} MiB",
            f"at most {MEMORY_ROOM / 2**20:+.0f} MiB",
            max(later) <= first + MEMORY_ROOM,
        ),
        Check(
            f"tokens per second, and alone before and after ({', '.join(f'{r:.1f}' for r in run.alone)})",
            f"{run.seen.rate(run.since, run.until):.1f}, {share:.3f} of alone",
            f"at least {SHARE_OF_ALONE:.2f}",
            share >= SHARE_OF_ALONE,
        ),
        Check(
            f"threads and descriptors afterwards, from {run.before.threads} and {run.before.descriptors}",
            f"{run.after.threads} and {run.after.descriptors}",
            f"at most {SPARE} more",
            run.after.within(run.before),
        ),
    ]


def _timed(times: list[float], name: str) -> Check:
    p50, p99 = np.percentile(times, [50, 99])
    return Check(
        f"health on a {name} connection: median and 99th percentile of {len(times):,}",
        f"{p50:.1f} and {p99:.1f} ms",
        f"99th below {HEALTH_P99_MS:.0f} ms",
        bool(p99 < HEALTH_P99_MS),
    )


def alone(folder: Path, work: Work, *, slots: int, cycles: int) -> float:
    """Return tokens per second of the engine without gRPC, with all of ``cycles`` times 64 requests waiting
    at once.

    Counted until the last of them has started, so that all slots are taken all the time.
    """
    worker = open_worker(
        folder, EngineConfig(session=SessionConfig(slots=slots, huge_pages=None)), tokenizer=None
    )
    try:
        worker.warm_up()
        records = LocalBackend(worker).run([work.request(index) for index in range(cycles * CYCLE)])
    finally:
        worker.close()
    until = max(record.arrivals[0] for record in records)
    return sum(at <= until for record in records for at in record.arrivals) / until


def load(
    worker: WorkerProcess, work: Work, *, seconds: float = 0.0, requests: int = 0
) -> tuple[float, float, Seen, Watched, Footprint, Footprint]:
    """Load a worker for so many seconds, or with so many requests.

    Returns the measured time's begin and end, what the clients and whoever watches saw, and the worker's
    footprint before and after. A tenth of the seconds, two minutes at most, warms up.
    """
    pid = worker.command.process.pid
    before = Footprint.of(pid)
    arguments = (CLIENTS, requests, work.vocabulary, work.longest_prompt, work.longest_answer)
    command = module_command(sys.executable, "measure.soak_clients", worker.address, *map(str, arguments))
    with (
        subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=with_scripts(),
        ) as clients,
        watching(worker.address, pid) as watched,
    ):
        begun = time.monotonic()
        if seconds:
            try:
                code = clients.wait(seconds)
                raise RuntimeError(f"the clients ended early, with code {code}")
            except subprocess.TimeoutExpired:
                pass
        ended = time.monotonic()
        told, _ = clients.communicate()
    seen = msgspec.json.decode(told, type=Seen)
    return begun + min(120.0, seconds / 10), ended, seen, watched, before, settled(pid, before)


def soak(folder: Path, minutes: float) -> Soaked:
    """Measure the engine alone, the worker under load, and the engine again."""
    work = Work(load_artifact(folder).manifest.model.vocab_size, longest_prompt=512, longest_answer=128)
    cycles = max(1, min(2, round(minutes)))
    first = alone(folder, work, slots=SLOTS, cycles=cycles)
    with serving(folder, "--slots", SLOTS, "--max-queued-requests", QUEUE) as worker:
        with WorkerClient(worker.address) as client:  # every slot as full as it will ever be
            RemoteBackend(client.generate).run([work.longest(10**9 + slot) for slot in range(SLOTS)])
        since, until, seen, watched, before, after = load(worker, work, seconds=60 * minutes)
    last = alone(folder, work, slots=SLOTS, cycles=cycles)
    return Soaked(since, until, seen, watched, before, after, (first, last))


def table(checks: list[Check]) -> str:
    """Return the checks as a table in Markdown."""
    rows = ["| what | found | asked | |", "|---|---|---|---|"]
    rows += [f"| {c.what} | {c.found} | {c.asked} | {'holds' if c.holds else 'FAILS'} |" for c in checks]
    return "\n".join(rows)


def main(
    artifact: Path,
    minutes: Annotated[float, typer.Option(min=0.1)] = 20.0,
    output: Annotated[Path, typer.Option(help="Where measurements go as JSON.")] = Path("soak.json"),
) -> None:
    """Soak a worker and say whether it holds what is asked."""
    run = soak(artifact, minutes)
    checks = judge(run)
    output.write_bytes(msgspec.json.format(msgspec.json.encode({"checks": checks, "run": run})))
    typer.echo(table(checks))
    raise typer.Exit(0 if all(check.holds for check in checks) else 1)


if __name__ == "__main__":
    typer.run(main)
