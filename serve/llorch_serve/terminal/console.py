"""Printing: results to stdout, everything else to stderr, colour and progress bars only on a terminal.

What a model writes, or a worker elsewhere, reaches a terminal without control characters, which could do more
than show text.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import sys
from collections.abc import Callable, Iterator
from typing import Final

import msgspec

from llorch_serve.files.text import encode_json, writable
from llorch_serve.observe.logs import writes_json

DIM: Final = "2"
RED: Final = "31"
_NOT_ASCII: Final = re.compile(r"[^\x00-\x7f]+")
_CONTROLS: Final = dict.fromkeys(c for c in (*range(32), *range(127, 160)) if chr(c) not in "\n\t")

logger = logging.getLogger(__name__)


def say(message: str) -> None:
    """Print a line for people on stderr; one of the log where that is JSON."""
    if writes_json():
        logger.info("%s", message)
        return
    _print(_harmless(message))


def _print(text: str) -> None:
    print(text, file=sys.stderr, flush=True)  # noqa: T201 - the terminal is this module's job


def note(message: str) -> None:
    """Say what a person should know, in one line: names of strangers in it make no further ones."""
    say(f"note: {' '.join(message.split())}")


def fail(message: str, code: int) -> int:
    """Print an error on stderr in one line; return ``code``."""
    line = " ".join(_harmless(message).split())
    if sys.stderr.isatty() and not writes_json():
        _print(f"\033[1;31merror:\033[0m {line}")
    else:
        say(f"error: {line}")
    return code


def write(text: str) -> None:
    """Print text on stdout, at once. Ends the process with 0 if the reader has gone, as in ``| head``."""
    try:
        sys.stdout.write(writable(_harmless(text) if sys.stdout.isatty() else text))
        sys.stdout.flush()
    except BrokenPipeError:
        # What is still buffered would fail once more when the interpreter closes the stream.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(0) from None


def show_aside(text: str, style: str = DIM, *, end: str = "\n") -> None:
    """Print what is not the result itself, like a model's thoughts, on stderr; in a style where a terminal
    shows it.
    """
    terminal = sys.stderr.isatty()
    shown = _harmless(text) if terminal else text
    if terminal and not os.environ.get("NO_COLOR"):
        shown = f"\033[{style}m{shown}\033[0m"
    print(shown, end=end, file=sys.stderr, flush=True)  # noqa: T201 - the terminal is this module's job


def _harmless(text: str) -> str:
    return text.translate(_CONTROLS)


def write_json(document: object) -> None:
    """Print one JSON document on stdout, with escapes for characters that its encoding lacks."""
    text = msgspec.json.format(encode_json(document), indent=2).decode() + "\n"
    write(_escaped(text, sys.stdout.encoding or "utf-8"))


def _escaped(text: str, encoding: str) -> str:
    """Return JSON text in which what an encoding lacks is written as JSON writes it in ASCII."""
    try:
        text.encode(encoding)
    except UnicodeEncodeError:
        return _NOT_ASCII.sub(lambda found: json.dumps(found[0])[1:-1], text)
    return text


@contextlib.contextmanager
def byte_progress() -> Iterator[Callable[[str, int, int], None]]:
    """Show a progress bar with bytes on stderr, one for each phase; nothing where stderr is not a terminal.

    Yields a function that takes (phase, bytes since the last call, total bytes of the phase).
    """
    if not sys.stderr.isatty():
        yield lambda _phase, _done, _total: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TaskID, TextColumn, TransferSpeedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    tasks: dict[str, TaskID] = {}
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:

        def advance(phase: str, done: int, total: int) -> None:
            if phase not in tasks:
                tasks[phase] = progress.add_task(phase, total=total)
            progress.advance(tasks[phase], done)

        yield advance


@contextlib.contextmanager
def step_progress(phase: str, total: int) -> Iterator[Callable[[], None]]:
    """Show a progress bar of ``total`` steps on stderr; nothing where stderr is not a terminal.

    Yields a function that counts one step.
    """
    if not sys.stderr.isatty():
        yield lambda: None
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(phase, total=total)
        yield lambda: progress.advance(task)
