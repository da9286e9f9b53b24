"""Every type of GGUF block, as llama.cpp runs a file of it and as llorch does.

``ci/measurement gguf_types PYTHON WORK``, started by ``ci/compare-llamacpp --types``, where PYTHON has
llama-cpp-python. It trains a small Llama into WORK if it is not there, lets llama.cpp write all its matrices
in one type after the other, prints a table in Markdown, and exits with 1 where an artifact of the file's own
blocks is not what docs/precision.md says.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Final, Literal

import numpy as np

from llorch_export.checkpoint.gguf_parts import part_paths, read_parts
from llorch_export.formats.targets import TARGETS
from llorch_export.frontier.measure import gguf_bits_per_weight, token_windows
from llorch_export.options import ExportOptions
from llorch_export.pipeline import export
from llorch_export.quantize.repack import carried_form
from llorch_export.source.open import open_checkpoint
from llorch_export.verify.reference import Reference
from llorch_serve.artifact.folder import load_artifact
from llorch_serve.fidelity.divergence import DivergenceSum, Logits
from measure.compare_llamacpp import LlamaCpp, note, trained
from support.builders import gguf_from_folder
from support.builders.tiny_exports import all_logits

# All that llama.cpp's quantizer makes.
TYPES: Final = (
    "Q1_0", "IQ1_S", "IQ1_M", "TQ1_0", "TQ2_0", "IQ2_XXS", "Q2_0", "IQ2_XS", "IQ2_S", "Q2_K", "IQ3_XXS",
    "IQ3_S", "Q3_K", "MXFP4", "IQ4_XS", "IQ4_NL", "Q4_0", "Q4_K", "Q4_1", "Q5_0", "Q5_K", "Q5_1",
    "Q6_K", "Q8_0",
)  # fmt: skip
# llama.cpp's name of a file of that type, where it is not the type's own.
FILES: Final = {"Q3_K": "Q3_K_M", "Q4_K": "Q4_K_S", "Q5_K": "Q5_K_S", "MXFP4": "MXFP4_MOE"}
SPLIT_KIND: Final = "Q4_K"
# Divergence with activations in float32 from the file's own weights, in nats: types without an offset come
# over exactly, offsets are rounded to a part of a step.
MOST_EXACT: Final = 1e-9
MOST_WITH_OFFSETS: Final = 1e-5
MOST_BY_DEFAULT: Final = 0.005


@dataclass(frozen=True, slots=True)
class Measured:
    """A type's row: divergences in nats.

    files: how many hold the model.
    theirs: llama.cpp's run from the weights in fp32. exact: ours with activations in float32, from the same;
        ours: ours by default, from the same. apart: ours with activations in float32 from llama.cpp's run.
    """

    kind: str
    files: int
    bits: float
    theirs: float
    exact: float
    ours: float
    apart: float
    top1: float


def measured(llama_cpp: LlamaCpp, folder: Path, kind: str, source: Path) -> Measured:
    """Measure a file of one type on a text that its model has not seen."""
    checkpoint = open_checkpoint(str(source))
    windows = token_windows(checkpoint, (folder / "heldout.txt").read_text(encoding="utf-8"))
    reference = Reference(checkpoint)
    expected = np.concatenate([reference.logits(window) for window in windows])
    theirs = llama_cpp.logits(source, windows)
    exact, ours = (exported_logits(source, windows, level) for level in (0, 4))
    return Measured(
        kind,
        len(part_paths(source)),
        gguf_bits_per_weight(source, checkpoint),
        divergence(expected, theirs)[0],
        divergence(expected, exact)[0],
        divergence(expected, ours)[0],
        divergence(theirs, exact)[0],
        divergence(expected, ours)[1],
    )


def exported_logits(source: Path, windows: list[list[int]], level: Literal[0, 4]) -> Logits:
    """Return the logits of every position of an artifact of the file's own blocks, [tokens, vocabulary]."""
    output = source.with_suffix(f".level-{level}")
    options = ExportOptions(str(source), output, precision="source", accuracy_level=level, force=True)
    export(options, lambda phase, done, total: None)
    artifact = load_artifact(output)
    return np.concatenate([all_logits(artifact, window) for window in windows])


def divergence(expected: Logits, found: Logits) -> tuple[float, float]:
    """Return the mean KL(expected || found) in nats, and how often both prefer the same token."""
    total = DivergenceSum()
    total.add(expected, found)
    figures = total.result()
    return figures.kl, figures.top1


def table(rows: list[Measured]) -> Iterator[str]:
    """Give lines of Markdown."""
    yield (
        "| type | files | bits per weight | in the graph | llama.cpp | llorch, fp32 activations | llorch "
        "| top-1 | llorch, fp32 activations, from llama.cpp |"
    )
    yield "|---|---|---|---|---|---|---|---|---|"
    for row in rows:
        figures = f"{row.theirs:.2g} | {row.exact:.1g} | {row.ours:.2g} | {row.top1:.2%} | {row.apart:.2g}"
        form = carried_form(row.kind, TARGETS["cpu"].carried_bits)
        yield f"| {row.kind} | {row.files} | {row.bits:.2f} | {form} | {figures} |"


def broken(rows: list[Measured]) -> Iterator[str]:
    """Give what does not hold."""
    for row in rows:
        limit = MOST_EXACT if carried_form(row.kind).endswith("exactly") else MOST_WITH_OFFSETS
        if row.exact > limit:
            yield f"{row.kind}: {row.exact:.2g} nats with activations in fp32, expected {limit:.2g} at most"
        if row.ours > MOST_BY_DEFAULT:
            yield f"{row.kind}: {row.ours:.2g} nats, expected {MOST_BY_DEFAULT:.2g} at most"


def main() -> None:
    """Run everything; the table goes to stdout."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("python")
    parser.add_argument("work", type=Path)
    parser.add_argument("--only", default=",".join(TYPES), type=lambda text: text.split(","))
    arguments = parser.parse_args()
    llama_cpp = LlamaCpp(arguments.python)
    folder = trained(arguments.work, 0)
    place = arguments.work / "gguf-types"
    place.mkdir(exist_ok=True)
    whole = gguf_from_folder.convert(folder, place / "F32.gguf")
    matrices = {name: row.shape[-1] for name, row in read_parts(whole).tensors.items() if len(row.shape) == 2}
    rows = []
    for kind in arguments.only:
        source = llama_cpp.pure(whole, place / f"{kind}.gguf", FILES.get(kind, kind), matrices)
        rows.append(measured(llama_cpp, folder, kind, source))
        note(f"{kind} ")
    parts = gguf_from_folder.convert(folder, place / "F32-split.gguf", tensors_a_part=10)
    # llama.cpp takes the name without the number and keeps the parts.
    llama_cpp.pure(parts, place / SPLIT_KIND, FILES[SPLIT_KIND], matrices)
    source = min(place.glob(f"{SPLIT_KIND}-00001-of-*.gguf"))
    rows.append(measured(llama_cpp, folder, SPLIT_KIND, source))
    used = ", ".join(f"{name} {version(name)}" for name in ("onnxruntime", "transformers", "numpy"))
    lines = [
        f"{datetime.now(UTC):%Y-%m-%d}; llama-cpp-python {llama_cpp.version()}, {used}",
        "",
        *table(rows),
    ]
    sys.stdout.write("\n".join(lines) + "\n")
    if problems := list(broken(rows)):
        sys.exit("\n".join(problems))


if __name__ == "__main__":
    main()
