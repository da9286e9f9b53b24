"""``ci/bench-1b``: a larger model's shape with random weights, ours beside llama.cpp on the same blocks."""

from __future__ import annotations

import datetime
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Final

import typer

from bench_peers.__main__ import CACHE, PAGE, work_of
from bench_peers.cli import run_command
from bench_peers.contestant import Closeness, Contestant, Work
from bench_peers.machine import this_machine
from bench_peers.markdown import replace_section, show_ratio, table
from bench_peers.models import PeersFolder
from bench_peers.ours import Recipe
from bench_peers.peers import LLAMA_CPP, Peer
from bench_peers.protocol import Measurement
from bench_peers.random_llama import SHAPE, make
from bench_peers.reference import reference
from bench_peers.results import Machine, ratio
from llorch_serve.providers import usable_cpus
from llorch_serve.terminal.console import say

KINDS: Final = ("Q8_0", "Q4_0")
_PROMPT_TOKENS: Final = 512
_NEW_TOKENS: Final = 64
_POSITIONS: Final = 128
_DECODE_ASKED: Final = 1.1

Rounds = dict[str, list[Measurement]]


def command(
    gguf: Annotated[Path, typer.Option(help="A GGUF file with the tokenizer. ci/bench-1b sets it.")],
    peers_folder: Annotated[
        Path, typer.Option("--peers", help="What ci/peers printed. ci/bench-1b sets it.")
    ],
    rounds: Annotated[
        int, typer.Option(min=3, help="Rounds; every engine has one turn with each type in each.")
    ] = 3,
) -> None:
    """Measure llorch beside llama.cpp on a random model of a larger shape and write the figures into docs/performance.md.

    Takes 20 minutes on two cores and 5 GB of disk, and means something on a machine with nothing else to do.
    """
    machine = this_machine()
    peers = PeersFolder(peers_folder)
    say(f"a random model of {SHAPE}'s shape")
    files = make(KINDS, gguf, CACHE / "1b", peers)
    pairs = [_pair(kind, files[kind], peers) for kind in KINDS]
    for (recipe, _), kind in zip(pairs, KINDS, strict=True):
        say(f"exporting {recipe.label}")
        recipe.export(files[kind])
    everyone: list[Contestant] = [one for pair in pairs for one in pair]
    with tempfile.TemporaryDirectory(prefix="llorch-bench-") as folder:
        scratch = Path(folder)
        close = {
            one.label: found
            for pair, kind in zip(pairs, KINDS, strict=True)
            for one, found in _closeness(pair, kind, files[kind], scratch)
        }
        work = work_of(pairs[0][0].folder, scratch, _PROMPT_TOKENS, _NEW_TOKENS, (1,))
        found = _rounds(everyone, work, rounds)
    text = section(machine, work, [(ours.label, theirs.label) for ours, theirs in pairs], close, found)
    PAGE.write_text(
        replace_section(PAGE.read_text(encoding="utf-8"), text, by="ci/bench-1b"), encoding="utf-8"
    )
    say(f"{PAGE} is written")


def _pair(kind: str, path: Path, peers: PeersFolder) -> tuple[Recipe, Peer]:
    ours = Recipe(f"llorch, {kind}", ("--precision", "source"), CACHE / "1b" / f"source-{kind}")
    theirs = Peer(
        label=f"{LLAMA_CPP}, {kind}",
        module="peer_llama_cpp",
        python=peers.main_python,
        model=path,
        made="the same file",
    )
    return ours, theirs


def _closeness(
    pair: Sequence[Contestant], kind: str, gguf: Path, scratch: Path
) -> list[tuple[Contestant, Closeness]]:
    ours = pair[0]
    assert isinstance(ours, Recipe)
    say(f"fidelity on {kind}")
    kept = reference(gguf, ours.folder, CACHE / "1b" / f"reference-{kind}", _POSITIONS)
    return [(one, one.closeness(kept, scratch, usable_cpus())) for one in pair]


def _rounds(everyone: Sequence[Contestant], work: Work, count: int) -> Rounds:
    found: Rounds = {one.label: [] for one in everyone}
    for index in range(count):
        for one in everyone[::-1] if index % 2 else everyone:
            say(f"round {index + 1} of {count}: {one.label}")
            found[one.label] += one.measure(work)
    return found


def section(
    machine: Machine, work: Work, pairs: Sequence[tuple[str, str]], close: dict[str, Closeness], found: Rounds
) -> str:
    """Return the page's section: medians, and ratios of ours to llama.cpp's."""
    date = datetime.datetime.now(datetime.UTC).date().isoformat()
    lines = [
        (label, f"{close[label].kl:.2g}", f"{close[label].top1:.1%}", *_medians(of))
        for label, of in found.items()
    ]
    versions = sorted({f"{one.engine} {one.version}" for of in found.values() for one in of})
    ratios = []
    for ours, theirs in pairs:
        for name, asked in (("decode", f">= {_DECODE_ASKED}"), ("prefill", "")):
            both = [_speeds(found[label], name) for label in (ours, theirs)]
            one = ratio(*both)
            holds = ("yes" if one.value >= _DECODE_ASKED else "**no**") if asked else ""
            ratios.append((f"{name}, {ours.partition(', ')[2]}", asked, show_ratio(one), holds))
    return "\n\n".join(
        (
            f"{date}, `ci/bench-1b`: {machine.cpu}, {machine.cores} cores, load before {machine.load:.2f}; {'; '.join(versions)}. "
            f"{len(work.prompt_ids)} prompt tokens and {work.new_tokens} greedy tokens, one stream, {work.threads} threads, "
            f"{len(next(iter(found.values())))} rounds. KL over {_POSITIONS} tokens, against the file's own weights in fp32.",
            table(("", "KL, nats", "top-1", "prefill, tokens/s", "decode, tokens/s", "peak MiB"), lines),
            table(("llorch to llama.cpp", "asked", "measured", "holds"), ratios),
        )
    )


def _medians(of: Sequence[Measurement]) -> tuple[str, str, str]:
    peak = max((one.peak_mib for one in of if one.peak_mib is not None), default=None)
    speeds = [f"{statistics.median(_speeds(of, name)):.1f}" for name in ("prefill", "decode")]
    return speeds[0], speeds[1], "" if peak is None else f"{peak:.0f}"


def _speeds(of: Sequence[Measurement], name: str) -> tuple[float, ...]:
    return tuple(one.decode_tokens_per_s if name == "decode" else one.prefill_tokens_per_s for one in of)


if __name__ == "__main__":
    run_command(command, "ci/bench-1b")
