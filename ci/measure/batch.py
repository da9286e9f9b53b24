"""How near ``llorch batch`` comes to the speed of ``llorch bench``, and what the order of prefixes saves.

    ci/measurement batch ARTIFACT [--rounds 3] [--slots 8] [--lines 96] [--prompt 256] [--answer 64]
        [--prompts 50] [--least 0.97]

Speed, by turns: ``bench`` runs as many streams as there are slots, three times after a warm-up, and ``batch``
a file of lines of the same lengths with the same slots; tokens of prompts and answers a second, of what is
timed inside either, without the load. Ends with 1 if the median of the rounds' ratios is below ``--least``.

Order: so many prompts times 10 questions, shuffled, as they are given and with ``--order prefix``: the tokens
of prompts that were computed. Means something on a machine with nothing else to do.
"""

from __future__ import annotations

import json
import random
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from llorch_serve.artifact.folder import load_artifact
from llorch_serve.bench.workload import sample_text
from llorch_serve.text.tokenizer import Tokenizer

QUESTIONS: Final = (
    "Who is it about?",
    "Where is it?",
    "When was it?",
    "What is new?",
    "Why is that so?",
    "What comes next?",
    "Is it long?",
    "Is it true?",
    "Name one thing.",
    "Say it in a word.",
)
_PROMPT_WORDS: Final = 120
_ANSWER_TOKENS: Final = 4


def llorch(*arguments: object) -> Any:
    """Run a command that prints one JSON document; return that."""
    command = [sys.executable, "-P", "-m", "llorch_serve", *map(str, arguments), "--json"]
    return json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)


def bench_speed(artifact: Path, slots: int, prompt: int, answer: int) -> float:
    """Return the tokens a second of so many streams together."""
    lengths = ("--prompt-tokens", prompt, "--max-tokens", answer)
    report = llorch("bench", artifact, "--tests", "mixed", "--streams", slots, *lengths, "--repeat", 3)
    figures = report["entries"][0]["rows"][0]["figures"]
    return float(figures["tokens_per_s"]["median"])


def batch_speed(artifact: Path, source: Path, slots: int) -> float:
    """Return the tokens a second of a whole file."""
    with tempfile.TemporaryDirectory() as folder:
        found = llorch("batch", source, Path(folder) / "out.jsonl", artifact, "--concurrency", slots)
    return float(found["prompt_tokens"] + found["completion_tokens"]) / float(found["seconds"])


def write_lines(path: Path, bodies: Iterator[dict[str, Any]]) -> Path:
    """Write completions as lines of a batch."""
    with path.open("w") as file:
        for number, body in enumerate(bodies):
            line = {"custom_id": f"{number}", "method": "POST", "url": "/v1/completions", "body": body}
            file.write(json.dumps(line) + "\n")
    return path


def same_work(artifact: Path, lines: int, prompt: int, answer: int) -> Iterator[dict[str, Any]]:
    """Yield bodies that ask for what a benchmark does: no prompt begins like another one."""
    loaded = load_artifact(artifact)
    ids = list(Tokenizer.load(loaded.tokenizer_path).encode(sample_text(), add_special_tokens=False))
    while len(ids) < prompt:
        ids += ids
    for number in range(lines):
        yield {
            "prompt": [number + 10, *ids[1:prompt]],
            "max_tokens": answer,
            "temperature": 0,
            "repetition_penalty": 1,
            "ignore_eos": True,
        }


def questions(count: int, seed: int = 7) -> Iterator[dict[str, Any]]:
    """Yield every question about each of so many prompts, shuffled."""
    draw = random.Random(seed)
    words = sample_text().split()
    prompts = []
    for _ in range(count):
        begin = draw.randrange(len(words) - _PROMPT_WORDS)
        prompts.append(" ".join(words[begin : begin + _PROMPT_WORDS]))
    asked = [f"{prompt}\n\n{question}" for prompt in prompts for question in QUESTIONS]
    draw.shuffle(asked)
    for text in asked:
        yield {"prompt": text, "max_tokens": _ANSWER_TOKENS, "temperature": 0, "ignore_eos": True}


def show_order(artifact: Path, folder: Path, prompts: int) -> None:
    """Tell the tokens that were computed, as given and with equal beginnings together."""
    source = write_lines(folder / "questions.jsonl", questions(prompts))
    computed: dict[str, int] = {}
    for order in ("given", "prefix"):
        found = llorch("batch", source, folder / f"{order}.jsonl", artifact, "--order", order)
        computed[order] = found["prompt_tokens"] - found["cached_tokens"]
        typer.echo(
            f"{order:6} computed {computed[order]} of {found['prompt_tokens']} tokens of prompts, "
            f"{found['seconds']:.1f} s"
        )
    typer.echo(f"prefix over given: {computed['prefix'] / computed['given']:.3f} of the tokens")


def main(
    artifact: Path,
    rounds: Annotated[int, typer.Option()] = 3,
    slots: Annotated[int, typer.Option()] = 8,
    lines: Annotated[int, typer.Option()] = 96,
    prompt: Annotated[int, typer.Option()] = 256,
    answer: Annotated[int, typer.Option()] = 64,
    prompts: Annotated[int, typer.Option()] = 50,
    least: Annotated[float, typer.Option()] = 0.97,
) -> None:
    """Measure both, by turns."""
    ratios: list[float] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        source = write_lines(folder / "in.jsonl", same_work(artifact, lines, prompt, answer))
        for turn in range(1, rounds + 1):
            bench, batch = bench_speed(artifact, slots, prompt, answer), batch_speed(artifact, source, slots)
            ratios.append(batch / bench)
            typer.echo(f"round {turn}: bench {bench:.1f}, batch {batch:.1f} tokens/s: {ratios[-1]:.3f}")
        show_order(artifact, folder, prompts)
    middle = statistics.median(ratios)
    typer.echo(f"batch over bench: {middle:.3f} in the median of {rounds}, asked {least}")
    if middle < least:
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
