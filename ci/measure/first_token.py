"""A command that answers one prompt, from its start to its first token and to its end, beside llama.cpp's.

    ci/measurement first_token ARTIFACT PYTHON FILE.gguf [RUNS [FLAG...]]

PYTHON is an interpreter that has llama-cpp-python (``ci/peers``), FLAG is of ``llorch generate``. Both
commands tokenise the same short text, answer greedily with NEW_TOKENS and end; they run by turns, each once
before anything counts, so that their files are in the page cache. The processor time and the peak of
resident memory are the system's own figures for the whole process. Medians over the runs.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path

from llorch_serve.python_child import module_command

TEXT = "Once upon a time"
NEW_TOKENS = 8
RUNS = 9
_LLAMA_CPP = Path(__file__).with_name("run_llamacpp.py")


@dataclass(frozen=True, slots=True)
class Run:
    """One command. first, whole: seconds until the first byte of its answer, and until it has ended.
    processor: seconds of processor time, of user and system together. peak: MiB that were resident at most.
    """

    first: float
    whole: float
    processor: float
    peak: float


def run(command: Sequence[str]) -> Run:
    """Run a command and measure it. Raises RuntimeError if it fails, or answers nothing."""
    began = time.perf_counter()
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        assert process.stdout is not None
        answer = os.read(process.stdout.fileno(), 1)
        first = time.perf_counter() - began
        process.stdout.read()
        _, status, used = os.wait4(process.pid, 0)
        whole = time.perf_counter() - began
        process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode or not answer:
        raise RuntimeError(f"{command} ended with {process.returncode} after {answer!r}")
    return Run(first, whole, used.ru_utime + used.ru_stime, used.ru_maxrss / 2**10)


def median(runs: Sequence[Run]) -> Run:
    """Return the median of each figure."""
    return Run(*(statistics.median(getattr(each, field.name) for each in runs) for field in fields(Run)))


def table(ours: Run, theirs: Run) -> str:
    """Return a table of both commands, and of how many times llama.cpp's figures ours are."""
    lines = [
        "| | first token, s | whole command, s | processor time, s | peak, MiB |",
        "|---|---|---|---|---|",
    ]
    for name, each in (("llorch", ours), ("llama.cpp", theirs)):
        lines.append(
            f"| {name} | {each.first:.2f} | {each.whole:.2f} | {each.processor:.2f} | {each.peak:.0f} |"
        )
    ratios = (getattr(ours, field.name) / getattr(theirs, field.name) for field in fields(Run))
    lines.append(f"| ratio | {' | '.join(f'{ratio:.2f}' for ratio in ratios)} |")
    return "\n".join(lines)


def main(arguments: Sequence[str]) -> None:
    """Measure and print a table."""
    artifact, python, file, *rest = arguments
    runs, flags = int(rest[0]) if rest else RUNS, rest[1:]
    prompt = ("--prompt", TEXT, "--max-tokens", str(NEW_TOKENS), "--temperature", "0")
    ours = module_command(sys.executable, "llorch_serve", "generate", artifact, *prompt, *flags)
    theirs = [python, str(_LLAMA_CPP), "answer", file, TEXT, str(NEW_TOKENS)]
    found: tuple[list[Run], list[Run]] = ([], [])
    for number in range(runs + 1):
        for command, kept in zip((ours, theirs), found, strict=True):
            measured = run(command)
            if number:
                kept.append(measured)
    print(table(*map(median, found)))  # noqa: T201 - a script's output


if __name__ == "__main__":
    main(sys.argv[1:])
