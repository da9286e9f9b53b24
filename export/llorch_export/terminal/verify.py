"""Answer ``llorch verify``: whether, and by how much, an artifact differs from the trained model."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from llorch_export.terminal.requirements import required
from llorch_serve.terminal.console import byte_progress, say, write, write_json


def command(
    artifact: Annotated[Path, typer.Argument(help="Artifact folder.", show_default=False)],
    against: Annotated[
        str, typer.Option(metavar="SOURCE", help="The checkpoint it was exported from.", show_default=False)
    ],
    lora: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="The PEFT folder that was merged into it.", show_default=False),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document on stdout.")] = False,
) -> None:
    """Compare an artifact's logits with the source's own, computed by transformers in fp32.

    Prints the mean KL divergence in nats, the share of equal likeliest tokens and the largest difference of logits.
    Exits with 1 if the divergence is beyond the recipe's limit.

    Example:
        llorch verify artifacts/smollm2 --against SmolLM2-135M-Instruct.gguf

    """
    os.environ.setdefault("TQDM_DISABLE", "1")  # transformers' own progress bars; read when tqdm is imported
    with required("export"):
        import llorch_export.checkpoint.source  # noqa: F401 - fails here, with the line to install it
    with required("reference"):
        import torch  # noqa: F401 - as above
        import transformers  # noqa: F401 - as above
    from llorch_export.verify import verify

    with byte_progress() as progress:
        result = verify(artifact, against, progress, lora=lora)
    if not result.same_source:
        say(f"note: {artifact} was exported from other files than {against}")
    if as_json:
        write_json(result)
    else:
        write(
            f"KL {result.kl:.3g} nats (limit {result.limit:g}), top-1 {result.top1:.2%}, largest difference "
            f"{result.max_abs:.3g}, {result.tokens} tokens of {result.text} text\nagainst {result.oracle}\n"
        )
    if not result.passed:
        say(f"error: the divergence {result.kl:.3g} is beyond the recipe's limit {result.limit:g}")
        raise typer.Exit(1)
