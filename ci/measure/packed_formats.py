"""Checkpoints that tools have quantised, exported as they are: divergence, size, time and memory of each.

``ci/measurement packed_formats FOLDER``, where FOLDER is what ``ci/make-quantised`` prints. Every checkpoint
in it is exported twice with ``--precision source``, with activations in fp32 and by default, and both are
compared with the values that it stands for, as ``llorch verify`` does. Prints a table in Markdown, and exits
with 1 where an answer departs by more than docs/packed.md says, or an artifact is larger than its source by
more than a twentieth.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Final

from llorch_export.checkpoint.folder import ModelFolder
from llorch_export.checkpoint.safetensors import weight_files
from llorch_export.config.fp8 import PACKING_FILES
from llorch_export.source.open import open_checkpoint
from llorch_export.verify.divergence import WINDOW
from llorch_export.verify.reference import Reference
from llorch_export.verify.sample_tokens import token_ids
from llorch_serve.artifact.folder import load_artifact
from llorch_serve.config import SessionConfig
from llorch_serve.fidelity.divergence import Divergence
from llorch_serve.fidelity.judging import SLOTS, Judge
from llorch_serve.loading.models import open_model

MOST_EXACT: Final = 1e-6
MOST_BY_DEFAULT: Final = 0.005
MOST_LARGER: Final = 1.05
_CHUNK: Final = 256


# A process that is started counts the memory of the one that starts it, so a small one stands between.
_WATCHED: Final = """
import os, sys
child = os.posix_spawn(sys.argv[1], sys.argv[1:], os.environ, file_actions=[(os.POSIX_SPAWN_DUP2, 2, 1)])
_, status, usage = os.wait4(child, 0)
print(usage.ru_maxrss)
sys.exit(os.waitstatus_to_exitcode(status))
"""


@dataclass(frozen=True, slots=True)
class Measured:
    """A checkpoint's row.

    becomes: what most of its matrices became by default, in words. exact_kl, kl: divergence with activations
        and cache in fp32, and by default, in nats; top1: by default. larger: the larger artifact's data over
        the source's weights. seconds, mebibytes: of the export by default, and its peak of memory.
    """

    name: str
    becomes: str
    exact_kl: float
    kl: float
    top1: float
    larger: float
    seconds: float
    mebibytes: float


def measured(source: Path, work: Path) -> Measured:
    """Export and verify one checkpoint."""
    exact, _, _ = exported(source, work / "exact", "--accuracy-level", "0")
    plain, seconds, peak = exported(source, work / "plain")
    exact_figures, figures = compared(source, (exact, plain))
    manifest = load_artifact(plain).manifest
    forms = manifest.source_forms or ()
    most = max(forms, key=lambda form: len(form.modules), default=None)
    stored = sum(path.stat().st_size for path in weight_files(ModelFolder(source)))
    kept = max(
        sum(path.stat().st_size for path in folder.iterdir() if path.suffix == ".data")
        for folder in (exact, plain)
    )
    return Measured(
        source.name,
        "" if most is None else most.becomes,
        exact_figures.kl,
        figures.kl,
        figures.top1,
        kept / stored,
        seconds,
        peak,
    )


def compared(source: Path, folders: Sequence[Path]) -> list[Divergence]:
    """Return how far each artifact is from the source's values, which are computed once for all of them."""
    artifacts = [load_artifact(folder) for folder in folders]
    reference = Reference(open_checkpoint(str(source)))
    config = SessionConfig(slots=SLOTS, max_context=WINDOW)
    sessions = [open_model(artifact, config, lambda report: None) for artifact in artifacts]
    judges = [
        Judge(session, artifact.manifest) for session, artifact in zip(sessions, artifacts, strict=True)
    ]
    ids, _ = token_ids(artifacts[0])
    for first in range(0, len(ids), WINDOW):
        piece = ids[first : first + WINDOW]
        expected = reference.logits(piece)
        for start in range(0, len(piece), _CHUNK):
            chunk = piece[start : start + _CHUNK]
            for judge in judges:
                judge.add(chunk, start, expected[start : start + len(chunk)])
    return [judge.result().worst for judge in judges]


def exported(source: Path, output: Path, *more: str) -> tuple[Path, float, float]:
    """Export in a process of its own; return the artifact, seconds, and the peak of memory in MiB."""
    command = [sys.executable, "-P", "-c", _WATCHED]
    command += [sys.executable, "-P", "-m", "llorch_serve", "export", str(source), "--output", str(output)]
    command += ["--precision", "source", "--json", *more]
    started = time.perf_counter()
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{source.name}: {done.stderr[-2000:]}")
    return output, time.perf_counter() - started, int(done.stdout) / 1024


def table(rows: list[Measured]) -> Iterator[str]:
    """Give lines of Markdown."""
    yield "| checkpoint | in the graph | KL, fp32 activations | KL | top-1 | of the source's size | s | MiB |"
    yield "|---|---|---|---|---|---|---|---|"
    for row in rows:
        figures = f"{row.exact_kl:.1g} | {row.kl:.2g} | {row.top1:.2%} | {row.larger:.3f}"
        yield f"| {row.name} | {row.becomes} | {figures} | {row.seconds:.1f} | {row.mebibytes:.0f} |"


def main() -> None:
    """Run everything; the table goes to stdout."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--only", default="", help="names of checkpoints, with commas between")
    arguments = parser.parse_args()
    wanted = arguments.only.split(",") if arguments.only else packed_folders(arguments.folder)
    rows = []
    for name in wanted:
        with tempfile.TemporaryDirectory() as work:
            rows.append(measured(arguments.folder / name, Path(work)))
        sys.stderr.write(f"{rows[-1]}\n")
        sys.stderr.flush()
    used = ", ".join(f"{name} {version(name)}" for name in ("onnxruntime", "transformers", "numpy"))
    sys.stdout.write("\n".join([f"{datetime.now(UTC):%Y-%m-%d}; {used}", "", *table(rows)]) + "\n")
    if problems := list(broken(rows)):
        sys.exit("\n".join(problems))


def packed_folders(folder: Path) -> list[str]:
    """Return the names of the checkpoints in a folder that are packed."""
    found = []
    for config in sorted(folder.glob("*/config.json")):
        sides = [config.parent / name for name in PACKING_FILES]
        if "quantization_config" in json.loads(config.read_text("utf-8")) or any(s.exists() for s in sides):
            found.append(config.parent.name)
    return found


def broken(rows: list[Measured]) -> Iterator[str]:
    """Give what does not hold."""
    for row in rows:
        if row.exact_kl > MOST_EXACT:
            yield f"{row.name}: {row.exact_kl:.2g} nats with activations in fp32, expected {MOST_EXACT:.2g}"
        if row.kl > MOST_BY_DEFAULT:
            yield f"{row.name}: {row.kl:.2g} nats, expected {MOST_BY_DEFAULT:.2g} at most"
        if row.larger > MOST_LARGER:
            yield f"{row.name}: {row.larger:.3f} of the source's size, expected {MOST_LARGER} at most"


if __name__ == "__main__":
    main()
