"""Memory, disk and time of batches by their length, with answers that cost nothing.

    ci/measurement batch_lines [LINES...]

For each length (by default 100,000 and 1,000,000), order and way of writing: seconds to plan, to run, and to
find all done again; what the work folder holds; and the peak of memory, each in a process of its own.
Memory is bounded where it stays the same for ten times the lines; disk and time go with the number of lines.
TMPDIR says where files lie meanwhile, about 1.5 GB for a million lines.
"""

from __future__ import annotations

import asyncio
import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from llorch_serve.batch.answering import LineAnswer, Usage
from llorch_serve.batch.header import make_header
from llorch_serve.batch.journal import open_journal
from llorch_serve.batch.lines import BatchLine, LineForm
from llorch_serve.batch.opening import open_source
from llorch_serve.batch.place import hold_output
from llorch_serve.batch.plan import Order, make_plan
from llorch_serve.batch.run import Limits, run_batch

LINES = (100_000, 1_000_000)
WAYS = ((Order.GIVEN, False), (Order.LONGEST, False), (Order.PREFIX, False), (Order.PREFIX, True))
ANSWER = b'{"choices":[{"index":0,"message":{"role":"assistant","content":"' + b"word " * 40 + b'"}}]}'


class Instant:
    """Answers at once, in one round of the event loop."""

    async def answer(self, line: BatchLine) -> LineAnswer:
        """Answer a line."""
        await asyncio.sleep(0)
        return LineAnswer(200, f"req-{line.number}", ANSWER, None, Usage(50, 40))


def write_input(path: Path, lines: int) -> None:
    """Write a file of chats, of ten questions each about a text."""
    with path.open("w") as file:
        for number in range(lines):
            text = f"Text number {number // 10}. " + "All of it matters here. " * 12
            messages = [
                {"role": "system", "content": text},
                {"role": "user", "content": f"Question {number % 10}?"},
            ]
            body = {"model": "m", "messages": messages, "max_tokens": 40 + number * 31 % 100}
            line = {"custom_id": f"request-{number}", "method": "POST"}
            line |= {"url": "/v1/chat/completions", "body": body}
            file.write(json.dumps(line) + "\n")


def lines_in(path: Path) -> int:
    """Return how many lines a file has."""
    with path.open("rb") as file:
        return sum(1 for _ in file)


def measure(source: Path, order: Order, *, ordered: bool) -> None:
    """Run one batch in this process, and print what it took."""
    output = source.with_name("out.jsonl")
    began = time.monotonic()
    with (
        hold_output(output) as place,
        open_source(source, place.work_folder) as lines,
        make_plan(lines, LineForm(), place.work_folder, order) as plan,
    ):
        planned = time.monotonic()
        disk = sum(path.stat().st_size for path in place.work_folder.iterdir())
        header = make_header(plan.input_sha256, {}, "model", ordered=ordered)
        with open_journal(place, header, plan, retry_failed=False) as journal:
            summary = asyncio.run(run_batch(plan, journal, Instant(), Limits(lines_in_flight=16)))
        ran = time.monotonic()
        with open_journal(place, header, plan, retry_failed=False) as journal:
            assert journal.answered == lines_in(source)
    found = time.monotonic()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    way = f"{order.value}{', ordered' if ordered else ''}"
    sys.stdout.write(
        f"{summary.answered:>11,} lines, {way:<15}: plan {planned - began:.1f} s, run {ran - planned:.1f} s, "
        f"find again {found - ran:.1f} s, "
        f"work folder {disk / 2**20:7.1f} MiB, peak {peak:6.1f} MiB\n"
    )


def main(arguments: list[str]) -> None:
    """Measure all ways, or the one that a child is asked for."""
    if arguments and arguments[0] == "--child":
        measure(Path(arguments[1]), Order(arguments[2]), ordered=arguments[3] == "ordered")
        return
    for lines in [int(one) for one in arguments] or LINES:
        with tempfile.TemporaryDirectory() as folder:
            source = Path(folder) / "in.jsonl"
            write_input(source, lines)
            for order, ordered in WAYS:
                way = [str(source), order.value, "ordered" if ordered else "as-done"]
                subprocess.run(
                    [sys.executable, "-P", "-m", "measure.batch_lines", "--child", *way], check=True
                )
                for path in source.parent.glob("out.jsonl*"):
                    path.unlink()


if __name__ == "__main__":
    main(sys.argv[1:])
