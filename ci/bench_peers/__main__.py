"""``ci/bench``: rounds of ours and the peers by turns, then the page, the picture and the measurements as
JSON.
"""

from __future__ import annotations

import datetime
import functools
import json
import shlex
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Final

import msgspec
import typer

from bench_peers import ours, peers
from bench_peers.cli import run_command
from bench_peers.contestant import Closeness, Contestant, Work
from bench_peers.machine import this_machine
from bench_peers.models import PeersFolder
from bench_peers.page import DOCUMENT, PAGE, picture_of, with_run, written
from bench_peers.picture import draw
from bench_peers.reference import reference
from bench_peers.results import DECODE, Document, Run, Subject, read_runs
from bench_peers.rounds import run_rounds
from llorch_serve.artifact.folder import load_artifact
from llorch_serve.bench.workload import text_prompt
from llorch_serve.errors import UsageError
from llorch_serve.fidelity.reference_file import ReferenceFile
from llorch_serve.providers import usable_cpus
from llorch_serve.terminal.console import say
from llorch_serve.text.tokenizer import Tokenizer
from llorch_serve.worker.prompts import COUNTED_TOKENS, PromptEncoder

CACHE: Final = Path(__file__).resolve().parents[2] / ".cache" / "bench"


class _Size(msgspec.Struct, frozen=True):
    """How much a run does. positions: tokens that fidelity is measured on."""

    prompt_tokens: int
    new_tokens: int
    positions: int
    rounds: int
    output: Path


_FULL: Final = _Size(prompt_tokens=512, new_tokens=128, positions=2048, rounds=3, output=PAGE.parent)
_QUICK: Final = _Size(prompt_tokens=32, new_tokens=8, positions=64, rounds=1, output=CACHE / "quick")


def command(
    gguf: Annotated[Path, typer.Option(help="The GGUF file that all is made from. ci/bench sets it.")],
    peers_folder: Annotated[Path, typer.Option("--peers", help="What ci/peers printed. ci/bench sets it.")],
    quick: Annotated[
        bool,
        typer.Option(
            "--quick", help="One round with few tokens, to see that all works; into .cache/bench/quick."
        ),
    ] = False,
    rounds: Annotated[
        int, typer.Option(min=3, help="Rounds; every engine has one turn in each. --quick has one.")
    ] = _FULL.rounds,
    only: Annotated[
        list[str] | None,
        typer.Option(
            help="Measure this engine or recipe of ours alone; may be repeated. The page names the command."
        ),
    ] = None,
) -> None:
    """Measure llorch beside its peers and write docs/performance.md, performance.json and a picture.

    The figures replace those of the last run on the same kind of machine, which is who made the CPU and its
    instruction sets. A full run takes about half an hour on two cores, and means something on a machine with
    nothing else to do.
    """
    size = _QUICK if quick else msgspec.structs.replace(_FULL, rounds=rounds)
    size.output.mkdir(parents=True, exist_ok=True)
    # Read now: one that cannot be read is found out before the work. A quick run stands by itself.
    others = [] if quick else read_runs(size.output / DOCUMENT)
    recipes = ours.all_recipes(CACHE)
    rivals = peers.all_peers(PeersFolder(peers_folder), gguf)
    if only:
        everyone: list[Contestant] = [*recipes, *rivals]
        known = [one.label for one in everyone]
        if set(only) - set(known) or ours.DEFAULT not in only:
            raise UsageError(
                f"--only takes {', '.join(known)}, with {ours.DEFAULT} among them; found {', '.join(only)}"
            )
        recipes = [one for one in recipes if one.label in only]
        rivals = [one for one in rivals if one.label in only]
    for recipe in recipes:
        say(f"exporting {recipe.label}")
        recipe.export(gguf)
    run = _measure(size, recipes, rivals, gguf, only or [])
    _write(run, others, size.output)


def _measure(
    size: _Size, recipes: list[ours.Recipe], rivals: list[peers.Peer], gguf: Path, only: list[str]
) -> Run:
    machine = this_machine()
    default = next(recipe for recipe in recipes if recipe.label == ours.DEFAULT)
    threads = usable_cpus()
    with tempfile.TemporaryDirectory(prefix="llorch-bench-") as folder:
        scratch = Path(folder)
        streams = tuple(metric.streams for metric in DECODE)
        work = work_of(default.folder, scratch, size.prompt_tokens, size.new_tokens, streams)
        say("the reference")
        kept = reference(gguf, default.folder, CACHE / f"reference-{size.positions}", size.positions)
        everyone: list[Contestant] = [*recipes, *rivals]
        # Before the rounds, so that an engine that does not work is found out in minutes.
        close = [_closeness(one, kept, scratch, threads) for one in everyone]
        found = run_rounds(recipes, rivals, default, work, size.rounds, say)
    subjects = [
        Subject(one.label, one.ours, found.rounds[0][one.label][0].version, one.made, near.kl, near.top1)
        for one, near in zip(everyone, close, strict=True)
    ]
    return Run(
        date=datetime.datetime.now(datetime.UTC).date().isoformat(),
        command=shlex.join(["ci/bench", *_flags(size), *(f"--only={label}" for label in only)]),
        machine=machine,
        threads=threads,
        prompt_tokens=size.prompt_tokens,
        new_tokens=size.new_tokens,
        positions=len(kept.header.token_ids),
        oracle=kept.header.oracle,
        subjects=subjects,
        rounds=found.rounds,
        first_token_s=found.first_token_s,
        gains_of=default.label,
        gains=found.gains,
    )


def _flags(size: _Size) -> list[str]:
    if size == _QUICK:
        return ["--quick"]
    return [] if size.rounds == _FULL.rounds else ["--rounds", str(size.rounds)]


def work_of(
    artifact_folder: Path, scratch: Path, prompt_tokens: int, new_tokens: int, streams: tuple[int, ...]
) -> Work:
    """Return the work with a prompt of English text, encoded by an artifact's tokenizer; ``scratch`` holds
    its file.
    """
    artifact = load_artifact(artifact_folder)
    encoder = PromptEncoder(artifact, Tokenizer.load(artifact.tokenizer_path))
    encode = functools.partial(encoder.encode, context=COUNTED_TOKENS)
    ids = text_prompt(prompt_tokens, encode)
    file = scratch / "prompt.json"
    file.write_text(json.dumps(ids), encoding="ascii")
    return Work(ids, file, new_tokens, streams, repeat=1, threads=usable_cpus())


def _closeness(one: Contestant, kept: ReferenceFile, scratch: Path, threads: int) -> Closeness:
    say(f"fidelity of {one.label}")
    return one.closeness(kept, scratch, threads)


def _write(run: Run, others: Sequence[Run], folder: Path) -> None:
    runs = with_run(others, run)
    picture = folder / picture_of(run)
    draw(run, picture)
    encoded = msgspec.json.format(msgspec.json.encode(Document(runs=runs)), indent=1)
    (folder / DOCUMENT).write_bytes(encoded + b"\n")
    page = written(folder, PAGE.read_text(encoding="utf-8"))
    (folder / PAGE.name).write_text(page, encoding="utf-8")
    say(f"{folder / PAGE.name}, {DOCUMENT} and {picture.name} are written")


if __name__ == "__main__":
    run_command(command, "ci/bench")
