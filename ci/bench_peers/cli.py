"""The end of a program of this package: a refusal becomes one line and an exit code."""

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
    exit_if_refused(lambda: app(prog_name=name))


def exit_if_refused(program: Callable[[], object]) -> None:
    """Run a program to its end, or end this process with what it raised, as one line, and its exit code."""
    try:
        program()
    except LlorchError as error:
        sys.exit(fail(str(error), error.exit_code))
    except ProtocolError as error:
        sys.exit(fail(str(error), 1))
