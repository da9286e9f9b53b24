"""A command that answers one prompt, from its start to its first token and to its end, beside llama.cpp's.

    ci/measurement first_token ARTIFACT PYTHON FILE.gguf [RUNS [FLAG...]]

PYTHON is an interpreter that has llama-cpp-python (``ci/peers``), FLAG is of ``llorch generate``. Both
commands tokenise the same short text, answer greedily with NEW_TOKENS and end; they run by turns, each once
before anything counts, so that their files are in the page cache. The processor time and the peak of
resident memory are the system's own figures for the whole process. Medians over the runs.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Sequence
from dataclasses import astuple
from pathlib import Path

from bench_peers.markdown import table
from bench_peers.processes import FirstOutput, first_output
from llorch_serve.python_child import module_command

TEXT = "Once upon a time"
NEW_TOKENS = 8
RUNS = 9
_LLAMA_CPP = Path(__file__).with_name("run_llamacpp.py")


_HEADER = ("", "first token, s", "whole command, s", "processor time, s", "peak, MiB")


def medians(runs: Sequence[FirstOutput]) -> list[float]:
    """Return the median of each figure, in the order of the class."""
    return [statistics.median(figures) for figures in zip(*map(astuple, runs), strict=True)]


def shown(ours: Sequence[FirstOutput], theirs: Sequence[FirstOutput]) -> str:
    """Return a table of both commands, and of how many times llama.cpp's figures ours are."""
    found = {"llorch": medians(ours), "llama.cpp": medians(theirs)}
    rows = [
        (name, f"{first:.2f}", f"{whole:.2f}", f"{processor:.2f}", f"{peak:.0f}")
        for name, (first, whole, processor, peak) in found.items()
    ]
    ratios = (f"{above / below:.2f}" for above, below in zip(*found.values(), strict=True))
    return table(_HEADER, [*rows, ("ratio", *ratios)])


def main(arguments: Sequence[str]) -> None:
    """Measure and print a table."""
    artifact, python, file, *rest = arguments
    runs, flags = int(rest[0]) if rest else RUNS, rest[1:]
    prompt = ("--prompt", TEXT, "--max-tokens", str(NEW_TOKENS), "--temperature", "0")
    ours = module_command(sys.executable, "llorch_serve", "generate", artifact, *prompt, *flags)
    theirs = [python, str(_LLAMA_CPP), "answer", file, TEXT, str(NEW_TOKENS)]
    found: tuple[list[FirstOutput], list[FirstOutput]] = ([], [])
    for number in range(runs + 1):
        for command, kept in zip((ours, theirs), found, strict=True):
            measured = first_output(*command)
            if number:
                kept.append(measured)
    print(shown(*found))  # noqa: T201 - a script's output


if __name__ == "__main__":
    main(sys.argv[1:])
