"""``ci/bench-gemma3``: Gemma 3 270M, ours beside llama.cpp, onnxruntime-genai and OpenVINO GenAI."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Annotated, Final

import typer

from bench_peers.__main__ import CACHE, work_of
from bench_peers.cli import run_command
from bench_peers.contestant import Closeness, Contestant, Work
from bench_peers.machine import slug_of, this_machine
from bench_peers.markdown import show_closeness, table
from bench_peers.models import PeersFolder
from bench_peers.ours import Recipe
from bench_peers.page import put
from bench_peers.peers import GENAI, genai, llama_cpp, openvino
from bench_peers.reference import reference
from bench_peers.results import Machine
from bench_peers.turns import Match, Measurements, by_turns, conditions, medians, ratios
from llorch_serve.errors import ResourceError
from llorch_serve.providers import usable_cpus
from llorch_serve.terminal.console import say

PREFIX: Final = "gemma3-"
"""What the names of the peers' models begin with, as ``ci/peers`` is told."""
RECIPES: Final[dict[str, tuple[str, ...]]] = {
    "llorch, its default": (),
    "llorch, the file's blocks": ("--precision", "source"),
    # Last: onnxruntime-genai runs it too.
    "llorch, int4": ("--precision", "int4", "--interop", "genai"),
}
_PROMPT_TOKENS: Final = 256
_NEW_TOKENS: Final = 64
_STREAMS: Final = (1, 8)
_POSITIONS: Final = 256
_CONTEXT: Final = 2048


def command(
    gguf: Annotated[Path, typer.Option(help="The GGUF file that all is made from. ci/bench-gemma3 sets it.")],
    peers_folder: Annotated[
        Path, typer.Option("--peers", help="What ci/peers printed. ci/bench-gemma3 sets it.")
    ],
    rounds: Annotated[int, typer.Option(min=1, help="Rounds; every engine has one turn in each.")] = 3,
) -> None:
    """Measure llorch beside its peers on Gemma 3 270M and write the figures into docs/performance.md.

    Takes 8 minutes on two cores once exports and the peers' models are there, and means something on a
    machine with nothing else to do. An engine that does not take the model is named, and left out.
    """
    machine = this_machine()
    recipes = [
        Recipe(label, (*flags, "--max-context", str(_CONTEXT)), CACHE / "gemma3" / slug_of(label))
        for label, flags in RECIPES.items()
    ]
    for recipe in recipes:
        say(f"exporting {recipe.label}")
        recipe.export(gguf)
    places = PeersFolder(peers_folder, PREFIX)
    places.require()
    everyone: list[Contestant] = [
        *recipes,
        llama_cpp(places, gguf, "Q4_K_M"),
        genai(places, recipes[-1].folder, "the artifact of `llorch, int4`, whose KL is given"),
        openvino(places),
    ]
    with tempfile.TemporaryDirectory(prefix="llorch-bench-") as folder:
        scratch, tokenizer = Path(folder), recipes[0].folder
        say("the reference")
        kept = reference(gguf, tokenizer, CACHE / "gemma3" / f"reference-{_POSITIONS}", _POSITIONS)
        close: dict[str, Closeness] = {}
        problems = {}
        for one in everyone:
            say(f"fidelity of {one.label}")
            if one.label == GENAI:  # which asks that artifact for the last logits alone
                close[one.label] = close[recipes[-1].label]
                continue
            try:
                close[one.label] = one.closeness(kept, scratch, usable_cpus())
            except ResourceError as error:
                problems[one.label] = str(error)
        running = [one for one in everyone if one.label in close]
        work = work_of(tokenizer, scratch, _PROMPT_TOKENS, _NEW_TOKENS, _STREAMS)
        found = by_turns(running, work, rounds, say)
    text = section(machine, work, close, found, running, problems)
    put(text, machine, by="ci/bench-gemma3")


def section(
    machine: Machine,
    work: Work,
    close: dict[str, Closeness],
    found: Measurements,
    engines: list[Contestant],
    problems: dict[str, str],
) -> str:
    """Return the page's section: medians, and ratios of our default to each peer's.

    problems: by the label of an engine that does not take the model, what it said.
    """
    header = ("", "KL, nats", "top-1", "prefill, tokens/s", *_decodes(work.streams), "peak MiB")
    lines = [
        (label, *show_closeness(close[label]), *medians(of, work.streams)) for label, of in found.items()
    ]
    default = next(iter(RECIPES))
    matches = [Match(f"to {one.label}", default, one.label) for one in engines if not one.ours]
    made = [f"- {one.label}: {one.made}" for one in engines]
    made += [f"- {label} does not take the model: {problem}" for label, problem in problems.items()]
    return "\n\n".join(
        (
            conditions("ci/bench-gemma3", machine, work, found)
            + f" KL and top-1 over {_POSITIONS} tokens, against the file's dequantised weights in fp32.",
            table(header, lines),
            "\n".join(made),
            ratios(matches, found),
        )
    )


def _decodes(streams: tuple[int, ...]) -> list[str]:
    return [f"decode, {count} stream{'' if count == 1 else 's'}, tokens/s" for count in streams]


if __name__ == "__main__":
    run_command(command, "ci/bench-gemma3")
