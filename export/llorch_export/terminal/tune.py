"""``llorch tune``: the best recipe for this machine, within bounds of divergence and memory."""

from __future__ import annotations

import os
import re
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final, Literal

import typer
from msgspec.structs import replace

from llorch_export.terminal.export_flags import ReplaceFlags, RevisionFlags, SourceArgument
from llorch_export.terminal.interrupts import unwind_on_signals
from llorch_serve.config import read_size
from llorch_serve.errors import ResourceError, UsageError
from llorch_serve.terminal.bench_flags import read_counts
from llorch_serve.terminal.console import note, say, write, write_json
from llorch_serve.terminal.groups import FlagGroup, composed, only
from llorch_serve.terminal.requirements import required

if TYPE_CHECKING:
    from llorch_export.tune.report import TuneReport
    from llorch_export.tune.tuning import Tuning, Wish

_SECONDS: Final = {"": 1.0, "s": 1.0, "m": 60.0, "h": 3600.0}
_TIME: Final = re.compile(r"(\d+(?:\.\d+)?)([smh]?)")


class WishFlags(FlagGroup, frozen=True):
    """Bounds of what is chosen, and what it shall be fast at."""

    max_kl: Annotated[float, typer.Option(metavar="NATS", help="Most divergence from the model in fp32.")] = (
        0.01
    )
    memory: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE",
            help="Most memory of a process that serves these streams, like 2GiB. Default: any.",
            show_default=False,
        ),
    ] = None
    streams: Annotated[str, typer.Option(metavar="1,8", help="Numbers of streams that start together.")] = (
        "1,8"
    )
    prompt_tokens: Annotated[
        int | None,
        typer.Option(
            min=1, help="Tokens of each prompt. Default: 512, or what the context holds.", show_default=False
        ),
    ] = None
    prefer: Annotated[
        Literal["balance", "prompts", "answers"],
        typer.Option(help="Whose speed weighs three times that of the other."),
    ] = "balance"
    time: Annotated[
        str, typer.Option(metavar="10m", help="For the search, like 90s, 10m or 2h. A run is not cut short.")
    ] = "10m"


@composed
def command(
    source: SourceArgument,
    hub: RevisionFlags,
    wishes: WishFlags,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            metavar="DIR",
            help="Export the chosen recipe to this folder, and write the recipe beside it, as DIR.toml.",
            show_default=False,
        ),
    ] = None,
    *,
    replacing: Annotated[ReplaceFlags, only("force")],
    reference: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Compare with this, made by llorch verify --write-reference, in place of running the model "
            "in fp32 here.",
            show_default=False,
        ),
    ] = None,
    png: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Draw speed against divergence to this file (extra: report).",
            show_default=False,
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document on stdout.")] = False,
) -> None:
    """Try recipes on this machine, and keep the fastest within bounds of divergence and memory.

    Recipes run by turns with the default one, which is kept unless another one is faster by more than noise.
    What was measured is kept: the same command goes on where it was interrupted. docs/tune.md says more.

    For example:

        llorch tune SmolLM2-135M-Instruct.gguf --output artifacts/tuned

        llorch tune ./small-llama --max-kl 0.003 --memory 1GiB --streams 1,8,32 --prefer answers --time 30m

        llorch export SmolLM2-135M-Instruct.gguf --recipe artifacts/tuned.toml --output artifacts/again

    """
    _require_libraries(draws=png is not None)
    if png is not None and (png.is_dir() or not png.absolute().parent.is_dir()):
        raise UsageError(f"--png is {png}; expected a file in a folder that exists")
    from llorch_export.tune.tuning import opened

    unwind_on_signals()
    wish = _wish(hub.of(source), wishes, output, reference, force=replacing.force)
    with opened(wish, say) as tuning:
        try:
            tuning.run()
        except KeyboardInterrupt:
            report = tuning.report(complete=False)
            if report is not None:
                _show(report, as_json=as_json)
            say("what was measured is kept; the same command goes on from here")
            raise
        _finish(tuning, png, as_json=as_json)


def _wish(
    source: str, wishes: WishFlags, output: Path | None, reference: Path | None, *, force: bool
) -> Wish:
    from llorch_export.tune.standing import Bounds
    from llorch_export.tune.tuning import Wish

    if not wishes.max_kl > 0:
        raise UsageError(f"--max-kl is {wishes.max_kl}; expected nats above 0, like 0.01")
    if force and output is None:
        raise UsageError("--force has no effect without --output; leave it out")
    memory = read_size("--memory", wishes.memory)
    return Wish(
        source=source,
        bounds=Bounds(wishes.max_kl, None if memory is None else memory / 2**20),
        streams=tuple(read_counts("--streams", wishes.streams, least=1)),
        prompt_tokens=wishes.prompt_tokens,
        seconds=_seconds(wishes.time),
        prefer=wishes.prefer,
        output=output,
        force=force,
        command=shlex.join(["llorch", *sys.argv[1:]]),
        reference=reference,
    )


def _seconds(value: str) -> float:
    match = _TIME.fullmatch(value.strip().lower())
    seconds = 0.0 if match is None else float(match[1]) * _SECONDS[match[2]]
    if match is None or seconds <= 0:
        raise UsageError(f"--time is {value!r}; expected a time like 90s, 10m or 2h")
    return seconds


def _finish(tuning: Tuning, png: Path | None, *, as_json: bool) -> None:
    """Keep and export what was chosen, and print it. Raises ResourceError if nothing keeps the bounds."""
    report = tuning.report(complete=True)
    assert report is not None, "a search that ended has measured the default"
    if report.chosen is None:
        _show(report, as_json=as_json)
        raise ResourceError(_nothing(report))
    path, command, serve = tuning.keep(report)
    say(f"{path} is the recipe; export by it with: {command}")
    say(f"and serve it as it was measured with: {serve}")
    result = tuning.export()
    tuning.clean()
    folder = None if result is None else str(result.artifact.folder)
    report = replace(report, recipe=str(path), artifact=folder, export=command, serve=serve)
    _show(report, as_json=as_json)
    if png is not None:
        _draw(report, png)
    say(_verdict(report))
    if result is not None:
        say(f"{result.artifact.folder} is exported")
        for notice in result.notices:
            note(notice)


def _show(report: TuneReport, *, as_json: bool) -> None:
    from llorch_export.tune.report import table

    if as_json:
        write_json(report)
        return
    write(table(report))
    write(f"KL over {report.positions} tokens, from {report.oracle}\n")


def _draw(report: TuneReport, png: Path) -> None:
    from llorch_export.frontier.picture import Mark, draw_marks
    from llorch_export.tune.report import marks

    drawn = [Mark(*one) for one in marks(report)]
    draw_marks(drawn, png, x="speed, to the default recipe's", y="KL(fp32 || model), nats")
    say(f"{png} is drawn")


def _verdict(report: TuneReport) -> str:
    chosen = next(one for one in report.tried if one.label == report.chosen)
    if report.chosen == report.default:
        others = len(report.tried) - 1
        return f"the default, {report.default}, stays: none of {others} others is faster by more than noise"
    margin = 0.0 if chosen.margin is None or chosen.ratio is None else chosen.ratio * chosen.margin
    return f"{report.chosen}: {chosen.ratio:.3f} ± {margin:.3f} of the default's speed, KL {chosen.kl:.3g}"


def _nothing(report: TuneReport) -> str:
    known = [one for one in report.tried if one.kl is not None]
    nearest = min(known, key=lambda one: one.kl or 0.0)
    smallest = min((one for one in known if one.peak_mib is not None), key=lambda one: one.peak_mib or 0.0)
    bound = "" if report.memory_mib is None else f" and {report.memory_mib:,.0f} MiB"
    return (
        f"none of {len(report.tried)} recipes keeps KL {report.max_kl:g}{bound}; the nearest has KL "
        f"{nearest.kl:.3g} ({nearest.label}), the smallest takes {smallest.peak_mib:,.0f} MiB "
        f"({smallest.label}). Raise the bound, or --time"
    )


def _require_libraries(*, draws: bool) -> None:
    """Raise ProviderError, with the line that installs it, for a library that is missing."""
    os.environ.setdefault("TQDM_DISABLE", "1")  # transformers' own progress bars; read when tqdm is imported
    with required("export"):
        import llorch_export.source.open  # noqa: F401 - fails here, with the line to install it
    if draws:
        with required("report"):
            import matplotlib  # noqa: F401 - as above
