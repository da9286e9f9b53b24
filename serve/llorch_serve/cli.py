"""The ``llorch`` front door: finds the command, runs it, and turns every refusal into one line and an exit
code.

A command's module is imported only when it is named or listed, and imports what is heavy only when it runs,
so ``llorch serve --help`` loads neither a runtime nor torch.
"""

from __future__ import annotations

import atexit
import gc
import importlib
import io
import os
import sys
from typing import Annotated, Any, Final

import typer
from typer.core import TyperCommand, TyperGroup
from typer.main import get_command

from llorch_serve.errors import LlorchError, UsageError
from llorch_serve.loading.collection import uncollected
from llorch_serve.terminal.console import fail, say
from llorch_serve.terminal.plain_values import with_plain_values

# Command name -> module with a function ``command``. The order is the one of ``llorch --help``.
COMMANDS: Final = {
    "export": "llorch_export.terminal.export",
    "verify": "llorch_export.terminal.verify",
    "frontier": "llorch_export.terminal.frontier",
    "tune": "llorch_export.terminal.tune",
    "inspect": "llorch_export.terminal.inspect",
    "sign": "llorch_serve.terminal.sign",
    "pull": "llorch_serve.terminal.pull",
    "push": "llorch_serve.terminal.push",
    "serve": "llorch_serve.terminal.serve",
    "generate": "llorch_serve.terminal.generate",
    "chat": "llorch_serve.terminal.chat",
    "score": "llorch_serve.terminal.score",
    "embed": "llorch_serve.terminal.embed",
    "batch": "llorch_serve.terminal.batch",
    "eval": "llorch_serve.terminal.evaluate",
    "bench": "llorch_serve.terminal.bench",
    "bench compare": "llorch_serve.terminal.bench_compare",
    "cluster deploy": "llorch_serve.terminal.cluster_deploy",
    "cluster status": "llorch_serve.terminal.cluster_status",
    "cluster delete": "llorch_serve.terminal.cluster_delete",
    "doctor": "llorch_serve.terminal.doctor",
}

INTERRUPTED: Final = 130


class _Reader:
    """Reads flags, without looking for garbage, of which that makes next to none."""

    def make_context(self, *arguments: Any, **options: Any) -> Any:
        with uncollected():
            return super().make_context(*arguments, **options)  # type: ignore[misc]  # of the command

    def get_params(self, ctx: Any) -> Any:
        return with_plain_values(super().get_params(ctx))  # type: ignore[misc]  # of the command


class _Command(_Reader, TyperCommand):
    """One command."""


class _LazyCommands(_Reader, TyperGroup):
    """Imports a command's module when the command is asked for."""

    def list_commands(self, ctx: Any) -> list[str]:
        return list(COMMANDS)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Take the first two words as one where that is a command; a folder of the second's name is
        ``./NAME``.
        """
        if (both := " ".join(args[:2])) in COMMANDS:
            args = [both, *args[2:]]
        elif args[0] not in COMMANDS and (seconds := _second_words(args[0])):
            raise UsageError(f"llorch {args[0]} takes one more word: {', '.join(seconds)}")
        return super().resolve_command(ctx, args)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name not in COMMANDS:
            return None
        with uncollected():
            module = importlib.import_module(COMMANDS[cmd_name])
        app = typer.Typer(add_completion=False, rich_markup_mode="markdown")
        needs_argument = cmd_name in (
            "export",
            "verify",
            "frontier",
            "tune",
            "inspect",
            "sign",
            "pull",
            "push",
            "batch",
            "bench compare",
            "cluster deploy",
        )
        # A worker is often configured by its environment: --max-context is LLORCH_MAX_CONTEXT, and a flag
        # wins.
        settings = {"auto_envvar_prefix": "LLORCH"} if cmd_name == "serve" else {}
        app.command(name=cmd_name, cls=_Command, no_args_is_help=needs_argument, context_settings=settings)(
            module.command
        )
        return get_command(app)


def _second_words(first: str) -> list[str]:
    """Return what follows a word in commands of two."""
    return [name.removeprefix(f"{first} ") for name in COMMANDS if name.startswith(f"{first} ")]


app = typer.Typer(
    cls=_LazyCommands,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(value: bool) -> None:
    if value:
        from importlib.metadata import version

        typer.echo(f"llorch {version('llorch')}")
        raise typer.Exit


@app.callback()
def front_door(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and exit.", callback=_version, is_eager=True)
    ] = False,
    debug: Annotated[
        bool, typer.Option("--debug", help="Show tracebacks of errors.", envvar="LLORCH_DEBUG")
    ] = False,
) -> None:
    """Export Llama-family models to ONNX Runtime, and serve them.

    Exit codes: 0 done, 1 failed or an unexpected error, 2 usage, 3 artifact or checkpoint, 4 runtime or
    provider, 5 port, 6 memory or disk, 7 worker or hub unreachable, 130 interrupted.
    """
    if debug:
        os.environ["LLORCH_DEBUG"] = "1"


def main() -> None:
    """Run the command line and exit with the code of its outcome."""
    _write_what_can_be_written()
    atexit.register(gc.freeze)  # else Python looks through all that is left, to free it a moment earlier
    try:
        app(prog_name="llorch")
    except LlorchError as error:
        _show_traceback()
        sys.exit(fail(str(error), error.exit_code))
    except MemoryError as error:
        _show_traceback()
        what = f"memory does not suffice ({error})" if str(error) else "memory does not suffice"
        sys.exit(fail(f"{what}; free some, or use a smaller model, fewer slots or a shorter context", 6))
    except SystemExit as end:
        if end.code == INTERRUPTED:  # Typer's answer to Ctrl-C, without a word
            say("interrupted")
        raise
    except Exception as error:  # noqa: BLE001 - the last resort: no traceback unless asked for
        _show_traceback()
        what = f"unexpected {type(error).__name__}: {error}"
        sys.exit(fail(f"{what}. Run again with 'llorch --debug ...' and report what it shows.", 1))


def _write_what_can_be_written() -> None:
    """Have stdout write a replacement for each character that its encoding lacks, as ASCII lacks most."""
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
        sys.stdout.reconfigure(errors="replace")


def _show_traceback() -> None:
    if os.environ.get("LLORCH_DEBUG", "") not in ("", "0"):
        import traceback

        from llorch_serve.hub.credentials import hide_credentials

        sys.stderr.write(hide_credentials(traceback.format_exc()))  # which a person may paste into a report
