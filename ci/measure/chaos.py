"""What becomes of a worker whose clients die, stall, half-close, flood it, or whose manager is gone, as a
table.

    ci/measurement chaos ARTIFACT [--times 20] [--output FILE.json]

Every attack meets a worker that answers neighbours meanwhile. A row says how often it was done, what the
attacker and the neighbours saw, and how long the worker took until it held nothing of the attacker any more.
Exits with 1 where something was
lost: a neighbour's answer that was not the one it has alone, a call that ended without a status, a slot,
    thread or descriptor
that was not free again, health that took longer than 50 ms, or more memory than strangers may make a worker
take.
"""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from measure.chaos_attacks import ATTACKS
from measure.chaos_ends import ENDS
from measure.chaos_field import Row, Sizes, field_of
from measure.chaos_strangers import STRANGERS
from measure.watching import SPARE, settled

REAL = Sizes(long_prompt=1500, answer=64, endless=6000, health_ms=50.0, attack_s=30.0)


def table(rows: list[Row]) -> str:
    """Return the rows as a table in Markdown."""
    lines = [
        "| attack | times | what came of it | free again: median, most | lost |",
        "|---|---|---|---|---|",
    ]
    for row in rows:
        freed = row.freed_ms
        times = f"{statistics.median(freed):.0f}, {max(freed):.0f} ms" if freed else ""
        lines.append(
            f"| {row.attack} | {row.times:,} | {row.saw} | {times} | "
            f"{'; '.join(dict.fromkeys(row.lost)) or 'nothing'} |"
        )
    return "\n".join(lines)


def run(artifact: Path, sizes: Sizes, times: int) -> tuple[list[Row], str]:
    """Make every attack so many times; return the rows, and what the worker was like before and after all of
    them.
    """
    with field_of(artifact, sizes) as ground:
        rows = [attack(ground, times) for attack in ATTACKS]
        after = settled(ground.pid, ground.footprint)
        summary = (
            f"Neighbours got {ground.answers} answers, each the one it has alone. "
            f"Threads {ground.footprint.threads} before and {after.threads} after, "
            f"descriptors {ground.footprint.descriptors} and {after.descriptors} (at most {SPARE} more are "
            f"asked)."
        )
    return rows + [end(artifact, sizes) for end in (*ENDS, *STRANGERS)], summary


def main(
    artifact: Path,
    times: Annotated[int, typer.Option(min=1, help="How often each attack is made.")] = 20,
    output: Annotated[Path, typer.Option(help="Where measurements go as JSON.")] = Path("chaos.json"),
) -> None:
    """Attack a worker and say what came of it."""
    rows, summary = run(artifact, REAL, times)
    output.write_bytes(msgspec.json.format(msgspec.json.encode(rows)))
    typer.echo(f"{table(rows)}\n\n{summary}")
    raise typer.Exit(1 if any(row.lost for row in rows) else 0)


if __name__ == "__main__":
    typer.run(main)
