"""``ci/bench-1b``: a larger model's shape with random weights, ours beside llama.cpp: in as many bits, and on
the same blocks.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Final

import typer

from bench_peers.__main__ import CACHE, work_of
from bench_peers.cli import run_command
from bench_peers.contestant import Closeness, Contestant, Work
from bench_peers.machine import this_machine
from bench_peers.markdown import show_closeness, table
from bench_peers.models import PeersFolder
from bench_peers.ours import Recipe
from bench_peers.page import put
from bench_peers.peers import LLAMA_CPP, Peer
from bench_peers.random_llama import LLAMA_1B, WHOLE, make
from bench_peers.reference import reference
from bench_peers.results import Machine
from bench_peers.turns import Match, Measurements, by_turns, conditions, medians, ratios
from llorch_serve.fidelity.reference_file import ReferenceFile
from llorch_serve.providers import usable_cpus
from llorch_serve.terminal.console import say

KINDS: Final = ("Q8_0", "Q4_0")
RECIPES: Final[dict[str, tuple[str, tuple[str, ...]]]] = {
    "Q8_0": ("cpu", ("--recipe", "cpu")),
    "Q4_0": ("int4", ("--precision", "int4")),
}
"""Our own form of as many bits as llama.cpp's type: its name, and what ``llorch export`` is told."""
_PROMPT_TOKENS: Final = 512
_NEW_TOKENS: Final = 64
_POSITIONS: Final = 128
_DECODE_ASKED: Final = 1.1


@dataclass(frozen=True, slots=True)
class Found:
    """One engine's divergence. whole: from the model in fp16 weights. own: from the weights of its file, if
    that is quantised.
    """

    whole: Closeness
    own: Closeness | None


def command(
    gguf: Annotated[Path, typer.Option(help="A GGUF file with the tokenizer. ci/bench-1b sets it.")],
    peers_folder: Annotated[
        Path, typer.Option("--peers", help="What ci/peers printed. ci/bench-1b sets it.")
    ],
    rounds: Annotated[
        int, typer.Option(min=3, help="Rounds; every engine has one turn with each type in each.")
    ] = 3,
) -> None:
    """Measure llorch beside llama.cpp on a random model of a larger shape and write the figures into
    docs/performance.md.

    Takes 15 minutes on two cores and 10 GB of disk, and means something on a machine with nothing else to do.
    """
    machine = this_machine()
    peers = PeersFolder(peers_folder)
    say(f"a random model of {LLAMA_1B.name}'s shape")
    files = make(LLAMA_1B, KINDS, gguf, CACHE / "1b", peers)
    own = {kind: _own(kind) for kind in KINDS}
    same = {kind: _same(kind) for kind in KINDS}
    theirs = {kind: _peer(kind, files[kind], peers) for kind in KINDS}
    for kind in KINDS:
        for recipe, file in ((own[kind], files[WHOLE]), (same[kind], files[kind])):
            say(f"exporting {recipe.label}")
            recipe.export(file)
    everyone: list[Contestant] = [one for kind in KINDS for one in (own[kind], same[kind], theirs[kind])]
    with tempfile.TemporaryDirectory(prefix="llorch-bench-") as folder:
        scratch = Path(folder)
        say("fidelity")
        tokenizer = own[KINDS[0]].folder
        whole = _reference(WHOLE, files, tokenizer)
        close = {one.label: Found(one.closeness(whole, scratch, usable_cpus()), None) for one in everyone}
        for kind in KINDS:
            kept = _reference(kind, files, tokenizer)
            for one in (same[kind], theirs[kind]):
                close[one.label] = replace(close[one.label], own=one.closeness(kept, scratch, usable_cpus()))
        work = work_of(tokenizer, scratch, _PROMPT_TOKENS, _NEW_TOKENS, (1,))
        found = by_turns(everyone, work, rounds, say)
    matches = [
        *(_match(f"{RECIPES[kind][0]} to {kind}", own[kind], theirs[kind]) for kind in KINDS),
        *(_match(f"{kind}, the same blocks", same[kind], theirs[kind]) for kind in KINDS),
    ]
    text = section(machine, work, matches, close, found)
    put(text, machine, by="ci/bench-1b")


def _match(name: str, ours: Recipe, theirs: Peer) -> Match:
    return Match(name, ours.label, theirs.label, _DECODE_ASKED)


def _own(kind: str) -> Recipe:
    name, flags = RECIPES[kind]
    return Recipe(f"llorch, {name}", flags, CACHE / "1b" / name)


def _same(kind: str) -> Recipe:
    return Recipe(f"llorch, {kind}", ("--precision", "source"), CACHE / "1b" / f"source-{kind}")


def _peer(kind: str, path: Path, peers: PeersFolder) -> Peer:
    return Peer(
        label=f"{LLAMA_CPP}, {kind}",
        module="peer_llama_cpp",
        python=peers.main_python,
        model=path,
        made="the same file",
    )


def _reference(kind: str, files: dict[str, Path], artifact: Path) -> ReferenceFile:
    return reference(files[kind], artifact, CACHE / "1b" / f"reference-{kind}", _POSITIONS)


def section(
    machine: Machine, work: Work, matches: Sequence[Match], close: dict[str, Found], found: Measurements
) -> str:
    """Return the page's section: medians, and ratios of ours to llama.cpp's."""
    lines = [
        (
            label,
            *show_closeness(close[label].whole),
            "" if (own := close[label].own) is None else show_closeness(own)[0],
            *medians(of, (1,)),
        )
        for label, of in found.items()
    ]
    return "\n\n".join(
        (
            conditions("ci/bench-1b", machine, work, found)
            + f" KL and top-1 over {_POSITIONS} tokens, against the model's fp16 weights in fp32; in the "
            "next column KL against the quantised file's own weights.",
            table(
                ("", "KL, nats", "top-1", "KL to own", "prefill, tokens/s", "decode, tokens/s", "peak MiB"),
                lines,
            ),
            ratios(matches, found),
        )
    )


if __name__ == "__main__":
    run_command(command, "ci/bench-1b")
