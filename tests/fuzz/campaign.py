"""Fuzz all targets, as many at a time as there are processors: ``python -m fuzz.campaign [TARGET...]
--seconds N``.

Prints a row for each target, and exits with 1 if one was broken; the input that broke it is then kept under
``--found``.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from fuzz.limits import MEMORY_MIB, SECONDS
from fuzz.targets import TARGETS

_FIGURES = ("number_of_executed_units", "peak_rss_mb")


def run(target: str, seconds: int, found: Path) -> tuple[str, bool]:
    """Fuzz one target in a process of its own; return its row, and whether all was well."""
    log = found / f"{target}.log"
    command = [sys.executable, "-P", "-m", "fuzz", target, "--seconds", str(seconds), "--found", str(found)]
    with log.open("wb") as output:
        # Its folder is not on the path with -P, which is what the tests' own modules need.
        path = os.pathsep.join(
            [str(Path(__file__).parent.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
        )
        status = subprocess.run(
            command, stdout=output, stderr=subprocess.STDOUT, env=os.environ | {"PYTHONPATH": path}
        ).returncode
    text = log.read_text(errors="replace")
    figures = [re.findall(rf"stat::{name}:\s+(\d+)", text) for name in _FIGURES]
    runs, peak = (values[-1] if values else "?" for values in figures)
    outcome = "nothing found" if status == 0 else f"broken; see {log}"
    return f"| {target} | {seconds} s | {runs} | {peak} MiB | {outcome} |", status == 0


def main() -> int:
    """Run the campaign; return the exit code."""
    parser = argparse.ArgumentParser(prog="ci/fuzz", description=__doc__)
    parser.add_argument(
        "targets", nargs="*", metavar="TARGET", help=f"one of {', '.join(TARGETS)}; all if none is named"
    )
    parser.add_argument("--seconds", type=int, default=60, help="for each target (60)")
    parser.add_argument("--found", type=Path, default=Path(".cache/fuzz"), help="folder for logs and inputs")
    asked = parser.parse_args()
    if unknown := set(asked.targets) - set(TARGETS):
        parser.error(f"no target is called {', '.join(sorted(unknown))}; there are {', '.join(TARGETS)}")
    asked.found.mkdir(parents=True, exist_ok=True)
    print(f"an input may take {SECONDS:g} s of processor time, and a process {MEMORY_MIB} MiB")  # noqa: T201
    print("| target | time | inputs | most memory | |\n|---|---|---|---|---|")  # noqa: T201
    well = True
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        for row, fine in pool.map(
            lambda name: run(name, asked.seconds, asked.found), asked.targets or TARGETS
        ):
            print(row, flush=True)  # noqa: T201
            well = well and fine
    return 0 if well else 1


if __name__ == "__main__":
    sys.exit(main())
