"""``ci/bench-depths``: SmolLM2 in long contexts, ours beside llama.cpp and OpenVINO GenAI, with a KV cache in
8 bits and in more.

Every engine runs each depth in a process of its own, so that its peak memory is that depth's. With one stream
the prompt is timed too; with more, contexts are filled before the clock starts.
"""

from __future__ import annotations

import re
import shutil
import statistics
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Final, Literal

import gguf as gguf_format
import typer

from bench_peers.__main__ import CACHE, work_of
from bench_peers.cli import run_command
from bench_peers.contestant import Closeness, Contestant, Work
from bench_peers.machine import slug_of, this_machine
from bench_peers.markdown import show_closeness, table
from bench_peers.models import PeersFolder, made, make_openvino_int8
from bench_peers.ours import Recipe
from bench_peers.page import put
from bench_peers.peers import LLAMA_CPP, OPENVINO, Peer, llama_cpp
from bench_peers.reference import reference
from bench_peers.results import Machine, ratio
from bench_peers.turns import Measurements, by_turns, judged, medians, place, speeds
from llorch_serve.errors import UsageError
from llorch_serve.providers import usable_cpus
from llorch_serve.terminal.console import say

CONTEXT: Final = 32_768
"""Positions that the model is given, beyond its own: speed does not ask whether it was trained there."""
RECIPES: Final[dict[str, tuple[str, ...]]] = {
    "llorch, its default": (),
    "llorch, its default, float32 cache": ("--kv-dtype", "float32"),
    "llorch, cpu-faithful": ("--recipe", "cpu-faithful"),
}
"""Ours: label, and what ``llorch export`` is told."""
NEAR: Final = 0.05
"""Nats. Engines that diverge by at most this are compared."""
_TIMED: Final[tuple[Literal["prefill", "decode"], ...]] = ("prefill", "decode")
_ASKED: Final = {(4096, 1): 1.2, (4096, 8): 1.2}
"""Of decode: our fastest to the fastest peer, by depth and streams."""
_NEW_TOKENS: Final = 64
_POSITIONS: Final = 2048
_RUNS: Final = ("4096x1", "4096x8", "16384x1")


@dataclass(frozen=True, slots=True)
class Setting:
    """One run: tokens in each stream's context, and streams."""

    depth: int
    streams: int

    def __str__(self) -> str:
        return f"{self.depth:,} tokens, {self.streams} stream{'' if self.streams == 1 else 's'}"


def parse_setting(text: str) -> Setting:
    """Read ``DEPTHxSTREAMS``. Raises UsageError for anything else, and for what there is no room for."""
    found = re.fullmatch(r"([1-9][0-9]{0,5})x([1-9][0-9]{0,2})", text)
    if found is None:
        raise UsageError(f"--run is {text}; expected a depth and a number of streams, as {_RUNS[0]}")
    setting = Setting(*map(int, found.groups()))
    if not 128 <= setting.depth <= CONTEXT - 2 * _NEW_TOKENS:
        raise UsageError(f"--run is {text}; the depth must be from 128 to {CONTEXT - 2 * _NEW_TOKENS}")
    return setting


def command(
    gguf: Annotated[Path, typer.Option(help="The GGUF file that all is made from. ci/bench-depths sets it.")],
    peers_folder: Annotated[
        Path, typer.Option("--peers", help="What ci/peers printed. ci/bench-depths sets it.")
    ],
    rounds: Annotated[int, typer.Option(min=1, help="Rounds; every engine has one turn in each.")] = 3,
    run: Annotated[
        list[str] | None,
        typer.Option(help="DEPTHxSTREAMS; may be repeated. Default: " + ", ".join(_RUNS)),
    ] = None,
) -> None:
    """Measure llorch beside its peers in long contexts and write the figures into docs/performance.md.

    Takes some twelve minutes a round on two cores, half of it a peer's prompts, and up to 4 GB of memory; the
    page is written after each setting. It means something on a machine with nothing else to do.
    """
    settings = [parse_setting(text) for text in run or _RUNS]
    machine = this_machine()
    places = PeersFolder(peers_folder)
    make_openvino_int8(places, gguf)
    folder = CACHE / "depths"
    long = with_context(gguf, folder / gguf.name, CONTEXT)
    recipes = [Recipe(label, flags, folder / slug_of(label)) for label, flags in RECIPES.items()]
    for recipe in recipes:
        say(f"exporting {recipe.label}")
        recipe.export(long)
    everyone: list[Contestant] = [*recipes, *peers(places, long)]
    with tempfile.TemporaryDirectory(prefix="llorch-bench-") as name:
        scratch, tokenizer = Path(name), recipes[0].folder
        say("the reference")
        kept = reference(long, tokenizer, folder / f"reference-{_POSITIONS}", _POSITIONS)
        close = {}
        for one in everyone:
            say(f"fidelity of {one.label}")
            close[one.label] = one.closeness(kept, scratch, usable_cpus())
        found = []
        for setting in settings:
            say(str(setting))
            work = work_of(tokenizer, scratch, setting.depth, _NEW_TOKENS, (setting.streams,))
            # A long prompt takes minutes, and has the memory of what comes behind it touched.
            work = replace(work, filled=setting.streams > 1, warm_up=False)
            found.append((setting, work, by_turns(everyone, work, rounds, say)))
            # What is known so far, as the next setting may take half an hour and be interrupted.
            put(section(machine, found, close, everyone), machine, by="ci/bench-depths")


def peers(places: PeersFolder, file: Path) -> list[Peer]:
    """Return llama.cpp with a cache of either type and flash attention, and OpenVINO GenAI with its own."""
    plain = llama_cpp(places, file, "Q4_1")
    return [
        *(
            replace(
                plain, label=f"{LLAMA_CPP}, {cache} cache", made=f"{plain.made}, flash attention", cache=cache
            )
            for cache in ("f16", "q8_0")
        ),
        Peer(
            label=f"{OPENVINO}, u8 cache",
            module="peer_openvino",
            python=places.openvino_python,
            model=places.openvino_int8,
            made="optimum-intel: int8",
            cache="u8",
        ),
    ]


def with_context(file: Path, target: Path, context: int) -> Path:
    """Return a copy of a Llama's GGUF file that takes ``context`` positions, made unless it is there."""

    def copy(place: Path) -> None:
        shutil.copyfile(file, place)
        field = gguf_format.GGUFReader(place, "r+").fields["llama.context_length"]
        field.parts[field.data[0]][0] = context

    made(target, copy)
    return target


def section(
    machine: Machine,
    found: Sequence[tuple[Setting, Work, Measurements]],
    close: dict[str, Closeness],
    engines: Sequence[Contestant],
) -> str:
    """Return the page's section: a table for each setting, and our fastest to the fastest peer."""
    _, work, first = found[0]
    rounds = len(next(iter(first.values())))
    made = [f"- {one.label}: {one.made}" for one in engines]
    return "\n\n".join(
        (
            f"{place('ci/bench-depths', machine, first)} SmolLM2-135M-Instruct, given {CONTEXT:,} positions; "
            f"{work.new_tokens} greedy tokens a stream behind each depth, {work.threads} threads, {rounds} "
            f"round{'' if rounds == 1 else 's'}; with more streams than one, contexts are filled before the "
            f"clock starts. KL and top-1 over {_POSITIONS} tokens, against the file's dequantised weights in "
            "fp32.",
            *(f"{setting}:\n\n{_speeds(setting, of, close)}" for setting, _, of in found),
            "\n".join(made),
            comparison(found, close, engines),
        )
    )


def _speeds(setting: Setting, of: Measurements, close: dict[str, Closeness]) -> str:
    """Return a setting's table. Prompts are timed with one stream alone."""
    first = 0 if setting.streams == 1 else 1
    header = ("prefill, tokens/s", "decode, tokens/s", "peak MiB")[first:]
    rows = [
        (
            label,
            *show_closeness(close[label]),
            *medians(one, (setting.streams,))[first:],
        )
        for label, one in of.items()
    ]
    return table(("", "KL, nats", "top-1", *header), rows)


def comparison(
    found: Sequence[tuple[Setting, Work, Measurements]],
    close: dict[str, Closeness],
    engines: Sequence[Contestant],
) -> str:
    """Return the table of our fastest engine to the fastest peer, of those that are near the reference."""
    near = [one for one in engines if close[one.label].kl <= NEAR]
    rows = []
    for setting, _, of in found:
        for name in _TIMED[0 if setting.streams == 1 else 1 :]:
            limit = _ASKED.get((setting.depth, setting.streams)) if name == "decode" else None
            series = {one.label: speeds(of[one.label], name, setting.streams) for one in near}
            ours = _fastest({one.label: series[one.label] for one in near if one.ours})
            theirs = _fastest({one.label: series[one.label] for one in near if not one.ours})
            compared, one = "nothing", None
            if ours is not None and theirs is not None:
                compared, one = f"{ours} to {theirs}", ratio(series[ours], series[theirs])
            rows.append((f"{name}, {setting}", compared, *judged(one, limit)))
    return table(("", "compared", "asked", "measured", "holds"), rows)


def _fastest(series: Mapping[str, Sequence[float]]) -> str | None:
    return max(series, key=lambda label: statistics.median(series[label]), default=None)


if __name__ == "__main__":
    run_command(command, "ci/bench-depths")
