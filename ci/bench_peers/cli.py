"""The end of a script of this package: a command whose refusal becomes one line and an exit code."""

from __future__ import annotations

import sys
from collections.abc import Callable

import typer

from bench_peers.protocol import ProtocolError
from llorch_serve.errors import LlorchError
from llorch_serve.terminal.console import fail


def run_command(command: Callable[..., None], name: str) -> None:
    """Run ``command`` with the process's arguments; name: of the script, for its help."""
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.command()(command)
    try:
        app(prog_name=name)
    except LlorchError as error:
        sys.exit(fail(str(error), error.exit_code))
    except ProtocolError as error:
        sys.exit(fail(str(error), 1))
