"""``ci/bench-cuda``: llorch on an NVIDIA GPU beside the peers that are there.

One that fails is named with the reason, and the others go on.
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Final

import msgspec
import typer

from bench_peers.__main__ import CACHE, work_of
from bench_peers.card import require_card
from bench_peers.cli import run_command
from bench_peers.contestant import Contestant, Work
from bench_peers.cuda_models import MODELS, PEERS, Entrant, forms
from bench_peers.cuda_page import ModelResults, Result, page
from bench_peers.machine import this_machine
from bench_peers.ours import Recipe
from bench_peers.protocol import ProtocolError
from bench_peers.reference import reference
from bench_peers.turns import order
from llorch_serve.errors import LlorchError, UsageError
from llorch_serve.providers import usable_cpus
from llorch_serve.terminal.bench_flags import read_counts
from llorch_serve.terminal.console import say

STREAMS: Final = (1, 8, 32, 128)
PROMPT_TOKENS: Final = 512
NEW_TOKENS: Final = 128
_POSITIONS: Final = {"smollm2": 2048}
_FEW_POSITIONS: Final = 128
"""Tokens that the divergence of a random model is measured on: its reference is computed on the CPU."""


def command(
    gguf: Annotated[Path, typer.Option(help="SmolLM2 as a GGUF file. ci/bench-cuda sets it.")],
    python: Annotated[Path, typer.Option(help="llorch's interpreter with CUDA. ci/bench-cuda sets it.")],
    peer: Annotated[
        list[str] | None, typer.Option(help="A peer's NAME=PYTHON, once each. ci/bench-cuda sets them.")
    ] = None,
    model: Annotated[
        list[str] | None, typer.Option(help=f"One of {', '.join(MODELS)}; may be repeated. Default: all.")
    ] = None,
    streams: Annotated[
        str, typer.Option(help="Numbers of streams that start together, separated by commas.")
    ] = ",".join(map(str, STREAMS)),
    rounds: Annotated[int, typer.Option(min=1, help="Rounds; every engine has one turn in each.")] = 3,
    output: Annotated[Path, typer.Option(help="Folder for cuda.md and cuda.json.")] = CACHE / "cuda",
) -> None:
    """Measure llorch on an NVIDIA GPU beside onnxruntime-genai, vLLM and llama.cpp: time to the first tokens,
    decode speed and divergence.

    All models together take tens of gigabytes of disk, and the random ones as much memory.
    """
    card = require_card("ci/bench-cuda")
    pythons = {"llorch": python, **_pythons(peer or [])}
    counts = tuple(sorted(read_counts("--streams", streams, least=1)))
    wanted = model or list(MODELS)
    if odd := sorted(set(wanted) - set(MODELS)):
        raise UsageError(f"--model is {odd[0]}; expected {', '.join(MODELS)}")
    machine, found = this_machine(), []
    absent = [name for name in PEERS if name not in pythons]
    output.mkdir(parents=True, exist_ok=True)
    for name in wanted:
        these = forms(name, gguf, CACHE / "cuda", pythons)
        found.append(run(name, these.entrants(), these.gguf, counts, rounds))
        # After each model: a larger one may end this process.
        encoded = msgspec.json.format(msgspec.json.encode(found), indent=1)
        (output / "cuda.json").write_bytes(encoded + b"\n")
        text = page(found, f"{card.name}, driver {card.driver}", machine, absent)
        (output / "cuda.md").write_text(text, encoding="utf-8")
        say(f"{output / 'cuda.md'} and cuda.json are written")


def run(
    name: str, entrants: Sequence[Entrant], gguf: Path, streams: tuple[int, ...], rounds: int
) -> ModelResults:
    """Make every engine's model, then measure its divergence, then its speed by turns.

    entrants: ours among them; the artifact of the first that can be made has the tokenizer of all.
    gguf: the model itself, for the reference.
    """
    results = {entrant.label: Result(entrant.label) for entrant in entrants}
    ready: dict[str, Contestant] = {}
    for entrant in entrants:
        say(f"making {entrant.label}")
        with _told(results[entrant.label]):
            ready[entrant.label] = one = entrant.make()
            results[entrant.label].made = one.made
    ours = next((one for one in ready.values() if isinstance(one, Recipe)), None)
    if ours is not None:
        with tempfile.TemporaryDirectory(prefix="llorch-bench-") as folder:
            scratch = Path(folder)
            say("the reference")
            positions = _POSITIONS.get(name, _FEW_POSITIONS)
            kept = reference(gguf, ours.folder, CACHE / "cuda" / name / f"reference-{positions}", positions)
            work = work_of(ours.folder, scratch, PROMPT_TOKENS, NEW_TOKENS, streams)
            for entrant in entrants:
                if entrant.gives_logits and entrant.label in ready:
                    say(f"fidelity of {entrant.label}")
                    with _told(results[entrant.label]):
                        one = ready[entrant.label]
                        results[entrant.label].closeness = one.closeness(kept, scratch, usable_cpus())
            _take_turns(ready, results, work, rounds)
    return ModelResults(name, list(streams), rounds, list(results.values()))


def _take_turns(
    ready: Mapping[str, Contestant], results: Mapping[str, Result], work: Work, rounds: int
) -> None:
    for index in range(rounds):
        for label in order(list(ready), index):
            if results[label].problem is None:
                say(f"round {index + 1} of {rounds}: {label}")
                with _told(results[label]):
                    results[label].measured += ready[label].measure(work)


@contextlib.contextmanager
def _told(result: Result) -> Iterator[None]:
    """Keep the error of one engine from the others."""
    try:
        yield
    except (LlorchError, ProtocolError) as error:
        result.problem = str(error)
        say(f"{result.label} is left out: {error}")


def _pythons(given: Sequence[str]) -> dict[str, Path]:
    """Return interpreters by the peers' names. Raises UsageError for another name."""
    found: dict[str, Path] = {}
    for text in given:
        name, _, python = text.partition("=")
        if name not in PEERS or not python:
            raise UsageError(f"--peer is {text!r}; expected NAME=PYTHON with a NAME of {', '.join(PEERS)}")
        found[name] = Path(python)
    return found


if __name__ == "__main__":
    run_command(command, "ci/bench-cuda")
