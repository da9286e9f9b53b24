"""llorch beside llama.cpp on the same weights: divergence against bits per weight, and what carrying GGUF
blocks over costs.

``ci/measurement compare_llamacpp PYTHON WORK REAL PICTURE [--seeds 0,1,2]``, started by
``ci/compare-llamacpp``, where PYTHON has llama-cpp-python, WORK keeps what was trained and quantised, and
REAL is a published GGUF file. It trains small Llamas, lets llama.cpp quantise them, prints tables in
Markdown, draws the first seed's points into PICTURE, and exits with 1 where a claim of docs/precision.md does
not hold.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

import numpy as np

from llorch_export.frontier.measure import (
    OURS,
    WIDENED,
    Point,
    candidates,
    frontier,
    gguf_bits_per_weight,
    recipe_candidates,
    token_windows,
)
from llorch_export.frontier.picture import draw
from llorch_export.options import ExportOptions
from llorch_export.pipeline import export
from llorch_export.recipes.kl_limits import KL_LIMIT
from llorch_export.source.open import open_checkpoint
from llorch_export.verify.divergence import Verification, verify
from llorch_export.verify.reference import Reference
from llorch_serve.fidelity.divergence import DivergenceSum
from llorch_serve.python_child import foreign_code_command
from support.builders import gguf_from_folder, trained_llama

KINDS = ("Q4_0", "Q4_K_S", "Q4_K_M", "Q5_0", "Q5_K_M", "Q6_K", "Q8_0")
REAL_KINDS = ("Q4_0", "Q5_0", "Q8_0")  # rows of 576 weights rule K-quants out
EVERY_SEED = ("int4", "int4 affine", "int4 hqq", "int8")
RECIPES = ("int4-gptq", "int4-mixed")
LLAMA_CPP = "llama.cpp"
DRAWN_BITS = 10.0
SIDE = Path(__file__).with_name("run_llamacpp.py")


@dataclass(frozen=True, slots=True)
class LlamaCpp:
    """llama.cpp in an interpreter of its own."""

    python: str

    def quantised(self, source: Path, folder: Path, kind: str) -> Path:
        """Return the file in ``folder`` that holds ``source`` as ``kind``, made if it is not there."""
        target = folder / f"{kind}.gguf"
        if not target.exists():
            partial = target.with_suffix(".partial")
            self._run("quantize", str(source), str(partial), kind)
            partial.rename(target)
        return target

    def pure(self, source: Path, target: Path, kind: str, matrices: dict[str, int]) -> Path:
        """Write ``target``, whose matrices are all of the type that ``kind`` stands for, and return it.

        matrices: the row lengths of the matrices of ``source``, by name.
        """
        self._run("pure", str(source), str(target), kind, stdin=json.dumps(matrices))
        return target

    def logits(self, path: Path, windows: list[list[int]]) -> np.ndarray:
        """Return logits of every position, [tokens, vocabulary]."""
        with tempfile.TemporaryDirectory() as folder:
            output = Path(folder) / "logits.npy"
            self._run("logits", str(path), str(output), stdin=json.dumps(windows))
            return np.load(output)

    def _run(self, *arguments: str, stdin: str = "") -> None:
        done = subprocess.run(
            [self.python, SIDE, *arguments], input=stdin, capture_output=True, text=True, check=False
        )
        if done.returncode:
            sys.exit(f"{' '.join(arguments)} failed with {done.returncode}:\n{done.stderr[-2000:]}")

    def version(self) -> str:
        """Return the version of llama-cpp-python."""
        command = foreign_code_command(self.python, "import llama_cpp; print(llama_cpp.__version__)")
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def trained(work: Path, seed: int) -> Path:
    """Return the folder of the Llama of ``seed``, trained if it is not there."""
    folder = work / f"small-{seed}"
    if not (folder / "calibration.txt").exists():  # which is written last
        trained_llama.write(folder, seed)
    return folder


def points(llama_cpp: LlamaCpp, folder: Path, files: list[Path], *, all_recipes: bool) -> list[Point]:
    """Measure our recipes, the files run by llama.cpp, and their weights widened, on text the model has not
    seen.
    """
    text = (folder / "heldout.txt").read_text(encoding="utf-8")
    ours = [pair for pair in candidates(str(folder)) if all_recipes or pair[0] in EVERY_SEED]
    chosen = ours + recipe_candidates(str(folder), RECIPES, folder / "calibration.txt")
    found = frontier(str(folder), chosen, files, text, lambda: note("."))
    checkpoint = open_checkpoint(str(folder))
    windows, reference = token_windows(checkpoint, text), Reference(checkpoint)
    expected = np.concatenate([reference.logits(window) for window in windows])
    for path in files:
        total = DivergenceSum()
        total.add(expected, llama_cpp.logits(path, windows))
        figures = total.result()
        bits = gguf_bits_per_weight(path, checkpoint)
        found.append(Point(path.name, bits, figures.kl, figures.top1, LLAMA_CPP))
    return sorted(found, key=lambda point: point.bits_per_weight)


def carried(path: Path) -> Verification:
    """Hold an artifact of a GGUF file's own blocks against its dequantised weights."""
    with tempfile.TemporaryDirectory() as folder:
        artifact = Path(folder) / "artifact"
        export(
            ExportOptions(source=str(path), output=artifact, precision="source"),
            lambda phase, done, total: None,
        )
        return verify(artifact, str(path), lambda phase, done, total: None)


def frontier_table(by_seed: dict[int, list[Point]]) -> Iterator[str]:
    """Give lines: recipes and files by size, their divergence for each seed."""
    first = next(iter(by_seed.values()))
    yield f"| | run by | bits per weight | {' | '.join(f'KL, seed {seed}' for seed in by_seed)} | top-1 |"
    yield f"|---|---|---|{'---|' * len(by_seed)}---|"
    for point in first:
        run_by = "transformers, in fp32" if point.series == WIDENED else point.series
        divergences = " | ".join(divergence(found, point) for found in by_seed.values())
        yield f"| {point.label} | {run_by} | {point.bits_per_weight:.3f} | {divergences} | {point.top1:.2%} |"


def divergence(measured: list[Point], like: Point) -> str:
    """Return the cell of another seed; most recipes are measured for the first one alone."""
    same = [p for p in measured if (p.label, p.series) == (like.label, like.series)]
    return f"{same[0].kl:.3g}" if same else ""


def carried_table(found: dict[str, dict[str, Verification]]) -> Iterator[str]:
    """Give lines: types of blocks, and the divergence of each model's artifact."""
    yield f"| | {' | '.join(found)} |"
    yield f"|---|{'---|' * len(found)}"
    for kind in KINDS:
        cells = (f"{by_kind[kind].kl:.2g}" if kind in by_kind else "" for by_kind in found.values())
        yield f"| {kind} | {' | '.join(cells)} |"


def broken(by_seed: dict[int, list[Point]], found: dict[str, dict[str, Verification]]) -> Iterator[str]:
    """Give what does not hold: int4 and int4-gptq against Q4_K_M on every seed, blocks carried over against
    their limit.
    """
    for seed, measured in by_seed.items():
        for label in ("int4", "int4-gptq"):
            ours = find(measured, label, OURS)
            for series in (LLAMA_CPP, WIDENED):
                theirs = find(measured, "Q4_K_M.gguf", series)
                if ours.kl > theirs.kl or ours.bits_per_weight > theirs.bits_per_weight:
                    yield f"seed {seed}: {ours} is not below {theirs}"
    for model, by_kind in found.items():
        for kind, result in by_kind.items():
            if result.kl > KL_LIMIT["source"]:
                yield f"{model}: {kind} carried over diverges by {result.kl:.3g}"


def find(measured: list[Point], label: str, series: str) -> Point:
    """Return the point of that name."""
    return next(point for point in measured if (point.label, point.series) == (label, series))


def note(text: str) -> None:
    """Show progress."""
    sys.stderr.write(text)
    sys.stderr.flush()


def main() -> None:
    """Run everything; tables go to stdout."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("python")
    parser.add_argument("work", type=Path)
    parser.add_argument("real", type=Path)
    parser.add_argument("picture", type=Path)
    parser.add_argument(
        "--seeds", default="0,1,2,3", type=lambda text: [int(part) for part in text.split(",")]
    )
    parser.add_argument("--frontier", action="store_true", help="leave out blocks that are carried over")
    arguments = parser.parse_args()
    llama_cpp = LlamaCpp(arguments.python)
    by_seed: dict[int, list[Point]] = {}
    found: dict[str, dict[str, Verification]] = {}
    if not arguments.frontier:
        place = arguments.work / "gguf-real"
        place.mkdir(exist_ok=True)
        files = {kind: llama_cpp.quantised(arguments.real, place, kind) for kind in REAL_KINDS}
        found[f"{arguments.real.stem}, widened first"] = {kind: carried(path) for kind, path in files.items()}
        note(f"{arguments.real.stem} is measured\n")
    for seed in arguments.seeds:
        folder = trained(arguments.work, seed)
        place = arguments.work / f"gguf-{seed}"
        place.mkdir(exist_ok=True)
        whole = gguf_from_folder.convert(folder, place / "F32.gguf")
        files = {kind: llama_cpp.quantised(whole, place, kind) for kind in KINDS}
        by_seed[seed] = points(llama_cpp, folder, list(files.values()), all_recipes=not by_seed)
        if not arguments.frontier:
            found[f"small Llama, seed {seed}"] = {kind: carried(path) for kind, path in files.items()}
        lines = frontier_table({seed: by_seed[seed]})
        note(f" seed {seed} is measured\n" + "\n".join(lines) + "\n")
    first = by_seed[arguments.seeds[0]]
    near = [point for point in first if point.series != WIDENED and point.bits_per_weight < DRAWN_BITS]
    draw(near, arguments.picture)
    used = ", ".join(f"{name} {version(name)}" for name in ("onnxruntime", "transformers", "torch", "numpy"))
    lines = [
        f"{datetime.now(UTC):%Y-%m-%d}; llama-cpp-python {llama_cpp.version()}, {used}",
        "",
        *frontier_table(by_seed),
        *(["", *carried_table(found)] if found else []),
    ]
    sys.stdout.write("\n".join(lines) + "\n")
    if problems := list(broken(by_seed, found)):
        sys.exit("\n".join(problems))


if __name__ == "__main__":
    main()
