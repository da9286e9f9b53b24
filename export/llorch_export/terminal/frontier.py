"""``llorch frontier``: what each precision costs this model, as a table and a picture."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from llorch_export.terminal.export_flags import RevisionFlags, SourceArgument
from llorch_serve.errors import UsageError
from llorch_serve.terminal.console import say, step_progress, write, write_json
from llorch_serve.terminal.groups import composed
from llorch_serve.terminal.requirements import required

if TYPE_CHECKING:
    from llorch_export.frontier.measure import Point

_MAX_TEXT_BYTES = 2**22


@composed
def command(
    source: SourceArgument,
    hub: RevisionFlags,
    text: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Text to measure on, UTF-8; its first 2,048 tokens. Default: an English sample.",
            show_default=False,
        ),
    ] = None,
    compare: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="FILE",
            help="A GGUF file of the same model, quantised elsewhere; may be repeated.",
            show_default=False,
        ),
    ] = None,
    recipe: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME|FILE",
            help="Measure this recipe, and not those worth comparing by default; may be repeated.",
            show_default=False,
        ),
    ] = None,
    calibration: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Text that recipes with quantizer gptq, static activations or spikiest measure on; not the "
            "one of --text.",
            show_default=False,
        ),
    ] = None,
    png: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Draw the points to this file (extra: report).", show_default=False
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document on stdout.")] = False,
) -> None:
    """Measure divergence against bits per weight, for the recipes worth comparing.

    Each recipe is exported to a temporary folder and run; KL is against the source in fp32 by transformers. A
    GGUF file to compare with runs there too, with its weights widened to fp32.

    For example:

        llorch frontier ./small-llama --text heldout.txt --compare small-llama.Q4_K_M.gguf --png frontier.png

        llorch frontier ./small-llama --text heldout.txt --recipe int4 --recipe int4-mixed --recipe mine.toml

    """
    _require_libraries(draws=png is not None)
    from llorch_export.frontier.measure import candidates, frontier, recipe_candidates

    source = hub.of(source)
    peers = compare or []
    if calibration is not None and not recipe:
        raise UsageError(f"--calibration {calibration} is for recipes given with --recipe; leave it out")
    chosen = recipe_candidates(source, recipe, calibration) if recipe else candidates(source)
    with step_progress("measuring recipes", len(chosen) + len(peers)) as step:
        points = frontier(source, chosen, peers, _read(text), step)
    _show(points, as_json=as_json)
    if png is not None:
        from llorch_export.frontier.picture import draw

        draw(points, png)
        say(f"{png} is drawn")


def _show(points: Sequence[Point], *, as_json: bool) -> None:
    if as_json:
        write_json({"points": points})
    else:
        write("| | bits per weight | KL, nats | top-1 |\n|---|---|---|---|\n")
        for point in points:
            write(f"| {point.label} | {point.bits_per_weight:.3f} | {point.kl:.3g} | {point.top1:.2%} |\n")


def _require_libraries(*, draws: bool) -> None:
    """Raise ProviderError, with the line that installs it, for a library that is missing."""
    os.environ.setdefault("TQDM_DISABLE", "1")  # transformers' own progress bars; read when tqdm is imported
    with required("export"):
        import llorch_export.source.open  # noqa: F401 - fails here, with the line to install it
    with required("reference"):
        import torch  # noqa: F401 - as above
        import transformers  # noqa: F401 - as above
    if draws:
        with required("report"):
            import matplotlib  # noqa: F401 - as above


def _read(text: Path | None) -> str | None:
    if text is None:
        return None
    try:
        with text.open("rb") as file:
            return file.read(_MAX_TEXT_BYTES).decode("utf-8", errors="ignore")
    except OSError as error:
        raise UsageError(f"--text {text} cannot be read: {error.strerror}") from error
