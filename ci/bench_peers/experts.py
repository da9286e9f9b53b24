"""``ci/bench-experts``: a random model of eight experts, ours beside the dense model that one token of it is,
and beside llama.cpp.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Final

import typer

from bench_peers.__main__ import CACHE, work_of
from bench_peers.cli import run_command
from bench_peers.contestant import Contestant, Work
from bench_peers.machine import this_machine
from bench_peers.markdown import table
from bench_peers.models import PeersFolder
from bench_peers.ours import Recipe
from bench_peers.page import put
from bench_peers.peers import LLAMA_CPP, Peer
from bench_peers.random_llama import WHOLE, Shape, make
from bench_peers.results import Machine
from bench_peers.turns import Match, Measurements, by_turns, conditions, medians, ratios
from llorch_serve.terminal.console import say

EXPERTS: Final = Shape(
    "8-experts",
    hidden=1536,
    layers=8,
    heads=24,
    kv_heads=6,
    head_dim=64,
    intermediate=2560,
    vocabulary=49_152,
    experts=8,
    active=2,
)
DENSE: Final = replace(
    EXPERTS, name="dense", intermediate=EXPERTS.intermediate * EXPERTS.active, experts=0, active=0
)
"""As wide as the experts that a token takes, so that a step reads as many bytes."""
KINDS: Final = {"Q8_0": "int8", "Q4_0": "int4"}
"""llama.cpp's type, and our precision of as many bits."""
_PROMPT_TOKENS: Final = 128
_NEW_TOKENS: Final = 64
_OF_DENSE: Final = 0.8


def command(
    gguf: Annotated[Path, typer.Option(help="A GGUF file with the tokenizer. ci/bench-experts sets it.")],
    peers_folder: Annotated[
        Path, typer.Option("--peers", help="What ci/peers printed. ci/bench-experts sets it.")
    ],
    rounds: Annotated[int, typer.Option(min=1, help="Rounds; every engine has one turn in each.")] = 5,
) -> None:
    """Measure a model of experts beside its dense size and llama.cpp, and write docs/performance.md.

    Takes 6 minutes on two cores once models and exports are there (5 GB of disk), and means something on a
    machine with nothing else to do.
    """
    machine = this_machine()
    peers = PeersFolder(peers_folder)
    everyone: list[Contestant] = []
    matches = []
    for shape in (EXPERTS, DENSE):
        say(f"a random model: {shape.name}")
        files = make(shape, tuple(KINDS), gguf, CACHE / "experts", peers)
        for kind, precision in KINDS.items():
            everyone += [_ours(shape, precision, files[WHOLE]), _theirs(shape, kind, files[kind], peers)]
    for kind, precision in KINDS.items():
        ours, dense, theirs = (
            f"llorch, {EXPERTS.name}, {precision}",
            f"llorch, {DENSE.name}, {precision}",
            f"{LLAMA_CPP}, {EXPERTS.name}, {kind}",
        )
        matches += [
            Match(f"{precision}: experts to dense", ours, dense, _OF_DENSE),
            Match(f"{precision} to {LLAMA_CPP}'s {kind}", ours, theirs),
            Match(f"{LLAMA_CPP}'s {kind}: experts to dense", theirs, f"{LLAMA_CPP}, {DENSE.name}, {kind}"),
        ]
    with TemporaryDirectory(prefix="llorch-bench-") as folder:
        first = next(one for one in everyone if isinstance(one, Recipe))
        work = work_of(first.folder, Path(folder), _PROMPT_TOKENS, _NEW_TOKENS, (1,))
        found = by_turns(everyone, work, rounds, say)
    text = section(machine, work, matches, found)
    put(text, machine, by="ci/bench-experts")


def _ours(shape: Shape, precision: str, source: Path) -> Recipe:
    label = f"llorch, {shape.name}, {precision}"
    # Weights that mean nothing need no text to be quantised by.
    flags = ("--precision", precision, *(("--quantizer", "affine") if precision == "int4" else ()))
    recipe = Recipe(label, flags, CACHE / "experts" / f"{shape.name}-{precision}")
    say(f"exporting {label}")
    recipe.export(source)
    return recipe


def _theirs(shape: Shape, kind: str, path: Path, peers: PeersFolder) -> Peer:
    return Peer(
        label=f"{LLAMA_CPP}, {shape.name}, {kind}",
        module="peer_llama_cpp",
        python=peers.main_python,
        model=path,
        made=f"its quantizer: {kind}",
    )


def section(machine: Machine, work: Work, matches: list[Match], found: Measurements) -> str:
    """Return the page's section: medians, and ratios."""
    lines = [(label, *medians(of, (1,))) for label, of in found.items()]
    sizes = (
        f" {EXPERTS.layers} layers of {EXPERTS.hidden} channels; {EXPERTS.experts} experts of "
        f"{EXPERTS.intermediate}, of which a token takes {EXPERTS.active}; dense: one block of "
        f"{DENSE.intermediate}. The weights are random."
    )
    return "\n\n".join(
        (
            conditions("ci/bench-experts", machine, work, found) + sizes,
            table(("", "prefill, tokens/s", "decode, tokens/s", "peak MiB"), lines),
            ratios(matches, found),
        )
    )


if __name__ == "__main__":
    run_command(command, "ci/bench-experts")
