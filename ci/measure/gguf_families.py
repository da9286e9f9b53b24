"""Files of every family, from llama.cpp's own converter: run by llama.cpp, by llorch and by transformers.

``ci/measurement gguf_families PYTHON SOURCES WORK [--only TEXT]``, started by ``ci/compare-llamacpp
--families``, where PYTHON has llama-cpp-python and SOURCES are llama.cpp's. The models are those of
``tests/support/builders/arch_rows*.py``, tiny and random. It prints a table in Markdown, and exits with 1
where llorch reads a file otherwise than llama.cpp does, for no reason that is named here.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final

import gguf
import numpy as np

from llorch_serve.errors import ArtifactError
from llorch_serve.fidelity.divergence import DivergenceSum, Logits
from measure.compare_llamacpp import LlamaCpp, note
from measure.gguf_family_rows import BY_HAND, DIFFERENT, FOLDERS, IN_ONE, REFUSED
from support.builders.checkpoints import write_gguf, write_hf_folder
from support.builders.tiny_exports import all_logits, export_tiny, random_ids
from support.oracles.stepwise import reference

TOKENS: Final = 128
# In nats. llama.cpp takes GELU from a table in float16; without it the divergence is 1e-11 or less.
MOST: Final = 1e-6
_CONVERTER: Final = Path(__file__).with_name("convert_gguf.py")
_SIDE: Final = Path(__file__).with_name("run_llamacpp.py")
_REASON: Final = re.compile(r"error loading model: (.+)|GGML_ASSERT\((.+)")


@dataclass(frozen=True, slots=True)
class Case:
    """A model: its folder for transformers, and its file, or why the converter does not write one."""

    name: str
    folder: Path
    file: Path
    problem: str | None = None


@dataclass(frozen=True, slots=True)
class Distance:
    """How far logits are apart: mean KL in nats, equal likeliest tokens (0..1), largest difference."""

    kl: float
    top1: float
    largest: float


@dataclass(frozen=True, slots=True)
class Row:
    """A line of the table. theirs: ours from llama.cpp's; reference: ours from transformers' of the folder.

    problem: why there is nothing to compare with llama.cpp.
    """

    name: str
    architecture: str
    theirs: Distance | None
    reference: Distance | None
    problem: str = ""

    @property
    def reason(self) -> str:
        """Why it may differ from llama.cpp, or not be read."""
        return REFUSED.get(self.name) or DIFFERENT.get(self.name, "")

    @property
    def broken(self) -> str:
        """What does not hold; empty if all does."""
        if self.problem:
            return "" if self.reason or not self.problem.startswith("llorch") else self.problem
        assert self.theirs is not None
        if self.theirs.kl <= MOST:
            return "is named as different, and is not" if self.reason else ""
        if self.name in DIFFERENT and self.reference is not None and self.reference.kl <= MOST:
            return ""
        return f"{self.theirs.kl:.2g} nats from llama.cpp"


def written(work: Path, sources: str, only: str) -> list[Case]:
    """Write all folders and files."""
    cases = [Case(name, work / f"{i:03d}", work / f"{i:03d}.gguf") for i, name in enumerate(FOLDERS)]
    cases = [case for case in cases if only in case.name]
    for case in cases:
        write_hf_folder(case.folder, FOLDERS[case.name])
        case.file.unlink(missing_ok=True)
    pairs = json.dumps([[str(case.folder), str(case.file)] for case in cases])
    command = [sys.executable, "-P", _CONVERTER, sources]
    done = subprocess.run(command, input=pairs, capture_output=True, text=True, check=False)
    found = [json.loads(line) for line in done.stdout.splitlines()]
    if len(found) != len(cases):
        sys.exit(f"llama.cpp's converter ended with {done.returncode}:\n{done.stderr[-2000:]}")
    converted = [
        Case(case.name, case.folder, case.file, f"the converter: {problem}" if problem else None)
        for case, problem in zip(cases, found, strict=True)
    ]
    return converted + list(_by_hand(work, only))


def _by_hand(work: Path, only: str) -> Iterator[Case]:
    for index, (name, (overrides, metadata)) in enumerate(BY_HAND.items()):
        if only in name:
            folder, file = work / f"by-hand-{index}", work / f"by-hand-{index}.gguf"
            write_hf_folder(folder, overrides)
            in_one = name.endswith(IN_ONE)
            yield Case(name, folder, write_gguf(file, overrides, metadata=metadata, fused_qkv=in_one))


def measured(python: str, case: Case) -> Row:
    """Run one model three times."""
    if case.problem:
        return Row(case.name, "", None, None, case.problem)
    architecture = gguf.GGUFReader(case.file).fields["general.architecture"].contents()
    try:
        artifact = export_tiny(case.file, case.file.with_suffix(".artifact"), force=True)
    except ArtifactError as error:
        return Row(case.name, architecture, None, None, f"llorch: {str(error).replace(f'{case.file}: ', '')}")
    ids = random_ids(min(TOKENS, artifact.manifest.context_length))
    ours = all_logits(artifact, ids)
    whole = distance(reference(case.folder, ids), ours)
    theirs = run(python, case.file, ids)
    if isinstance(theirs, str):
        return Row(case.name, architecture, None, whole, f"llama.cpp: {theirs}")
    return Row(case.name, architecture, distance(theirs, ours), whole)


def run(python: str, file: Path, ids: list[int]) -> Logits | str:
    """Return llama.cpp's logits of every position, or why it does not run the file."""
    output = file.with_suffix(".npy")
    command = [python, _SIDE, "logits", file, output]
    done = subprocess.run(command, input=json.dumps([ids]), capture_output=True, text=True, check=False)
    if done.returncode == 0:
        logits: Logits = np.load(output)
        return logits
    reason = _REASON.search(done.stderr)
    return (reason[1] or reason[2]) if reason else f"it ended with {done.returncode}"


def distance(expected: Logits, found: Logits) -> Distance:
    """Compare logits of every position, [tokens, vocabulary]."""
    total = DivergenceSum()
    total.add(expected, found)
    figures = total.result()
    return Distance(max(figures.kl, 0.0), figures.top1, float(np.abs(expected - found).max()))


def table(rows: list[Row]) -> Iterator[str]:
    """Give lines of Markdown."""
    yield "| model | file | KL from llama.cpp | top-1 | largest difference | KL from transformers | |"
    yield "|---|---|---|---|---|---|---|"
    for row in rows:
        near, whole = row.theirs, row.reference
        figures = f"{near.kl:.1g} | {near.top1:.1%} | {near.largest:.1g}" if near else " | | "
        remark = row.reason or row.problem
        lost = "" if whole is None else f"{whole.kl:.1g}"
        yield f"| {row.name} | {row.architecture} | {figures} | {lost} | {remark.replace('|', '/')[:160]} |"


def main() -> None:
    """Run everything; the table goes to stdout."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("python")
    parser.add_argument("sources")
    parser.add_argument("work", type=Path)
    parser.add_argument("--only", default="", help="models whose name holds this text")
    arguments: Any = parser.parse_args()
    arguments.work.mkdir(parents=True, exist_ok=True)
    rows = []
    for case in written(arguments.work, arguments.sources, arguments.only):
        rows.append(measured(arguments.python, case))
        note(".")
    used = ", ".join(f"{name} {version(name)}" for name in ("onnxruntime", "transformers"))
    lines = [f"llama-cpp-python {LlamaCpp(arguments.python).version()}, {used}", "", *table(rows)]
    sys.stdout.write("\n".join(lines) + "\n")
    if problems := [f"{row.name}: {row.broken}" for row in rows if row.broken]:
        sys.exit("\n".join(problems))


if __name__ == "__main__":
    main()
