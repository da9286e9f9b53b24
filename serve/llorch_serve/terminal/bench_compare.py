"""``llorch bench compare``: whether a later report is worse than an earlier one, for people and for CI."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from llorch_serve.terminal.console import write, write_json


def command(
    before: Annotated[Path, typer.Argument(metavar="A.json", help="What llorch bench --json wrote before.")],
    after: Annotated[Path, typer.Argument(metavar="B.json", help="The same, afterwards.")],
    fail_under: Annotated[
        float, typer.Option(min=0, help="The least ratio that passes; 1 is as good as before.")
    ] = 0.95,
    figure: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help="A figure that is held against the limit, like ttft_p50_ms; may be repeated. Default: every "
            "speed, and failed requests.",
            show_default=False,
        ),
    ] = None,
    across_machines: Annotated[
        bool,
        typer.Option("--across-machines/--same-machine", help="Compare reports of different machines too."),
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON document instead of a table.")
    ] = False,
) -> None:
    """Compare two reports, figure by figure. Above 1 the later one is better, in either direction of a
    figure.

    Exit codes: 0 passed; 1 a ratio below the limit, or something that was measured before is missing, fails
    or has lost its fidelity; 2 the reports cannot be compared.

    For example:

        llorch bench compare before.json after.json --fail-under 0.95

    """
    from llorch_serve.bench.comparison import Limits, compare_reports
    from llorch_serve.bench.schema import read_report
    from llorch_serve.bench.tables import compared

    limits = Limits(fail_under, tuple(figure or ()))
    found = compare_reports(read_report(before), read_report(after), limits, across_machines=across_machines)
    if as_json:
        write_json(found)
    else:
        write(compared(found))
    if not found.passed:
        raise SystemExit(1)
