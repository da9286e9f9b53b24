"""Flags of ``llorch bench`` that put a running worker under load."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from llorch_serve.errors import UsageError
from llorch_serve.terminal.groups import FlagGroup


class LoadFlags(FlagGroup, frozen=True):
    """Requests that come one after the other, from clients or at a rate."""

    concurrency: Annotated[
        str | None,
        typer.Option(
            "--concurrency",
            metavar="1,8",
            help="With --connect: closed loops of so many clients, each of which sends when its last request "
            "is answered.",
            show_default=False,
        ),
    ] = None
    request_rate: Annotated[
        str | None,
        typer.Option(
            "--request-rate",
            metavar="2,4",
            help="With --connect: open loops of so many requests per second, at random moments that no "
            "answer delays.",
            show_default=False,
        ),
    ] = None
    burstiness: Annotated[
        float | None,
        typer.Option(
            "--burstiness",
            metavar="B",
            help="With --request-rate: below 1 requests come in bursts, above 1 evenly. Default: 1, Poisson "
            "arrivals.",
            show_default=False,
        ),
    ] = None
    requests: Annotated[
        int | None,
        typer.Option(
            "--requests", min=1, help="Requests of a run under load. Default: 100.", show_default=False
        ),
    ] = None
    duration: Annotated[
        float | None,
        typer.Option(
            "--duration",
            metavar="SECONDS",
            help="Instead of --requests: for how long requests are sent.",
            show_default=False,
        ),
    ] = None
    spread: Annotated[
        float | None,
        typer.Option(
            "--spread",
            metavar="R",
            help="Under load: draw lengths evenly from (1 - R) to (1 + R) of --prompt-tokens and "
            "--max-tokens.",
            show_default=False,
        ),
    ] = None
    dataset: Annotated[
        Path | None,
        typer.Option(
            "--dataset",
            metavar="FILE",
            help='Under load: prompts from a file of JSON lines, {"prompt": "..."} or {"messages": [...]}, '
            'each with "max_tokens" or not.',
            show_default=False,
        ),
    ] = None
    seed: Annotated[
        int | None,
        typer.Option(
            "--seed",
            min=0,
            help="Under load: of the moments and lengths drawn. Default: 0.",
            show_default=False,
        ),
    ] = None
    slo: Annotated[
        list[str] | None,
        typer.Option(
            "--slo",
            metavar="NAME:MS",
            help="Under load: a limit in ms that a good request keeps, like ttft:200, tpot:50 or e2e:5000; "
            "may be repeated.",
            show_default=False,
        ),
    ] = None

    def check(self, connect: str | None, streams: str | None) -> None:
        """Raise UsageError where there is no worker to put under load, or something else is asked of it,
        too.
        """
        given = self.given()
        if given and connect is None:
            raise UsageError(f"{given[0]} puts a running worker under load; name it with --connect")
        if given and streams is not None:
            raise UsageError(
                f"--streams start together and {given[0]} is for requests that come one after the "
                f"other; leave one out"
            )
        if connect is not None and "://" in connect and not given:
            raise UsageError(
                f"--connect is {connect}; over HTTP a worker is measured with --concurrency or "
                f"--request-rate, else expected HOST:PORT"
            )
