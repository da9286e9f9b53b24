"""Programs that are run for what they print, or for when they print it. How one ended becomes an error of one
line.
"""

from __future__ import annotations

import os
import signal
import subprocess
import tempfile
import threading
import time
from pathlib import Path
from typing import Final

from llorch_serve.errors import ResourceError

_LIMIT_S: Final = 3600
"""Longest that one process may take; 32 streams of the slowest peer need some minutes."""
_FIRST_LIMIT_S: Final = 300
"""Longest that a command may take which prints one short answer."""


class IllegalInstructionError(ResourceError):
    """A program was ended by SIGILL: it was built for instructions that this machine does not run."""


def run_process(
    *arguments: Path | str,
    stdin: str = "",
    python_path: Path | None = None,
    accept: tuple[int, ...] = (0,),
    **variables: str,
) -> str:
    """Run a program and return its stdout.

    python_path: the one folder that PYTHONPATH shall name, for an interpreter other than this one; None
        leaves it alone.
    accept: exit codes that are no failure. variables: added to its environment.
    Raises ResourceError, with the last line the program said, and of that IllegalInstructionError for SIGILL.
    """
    line = [str(argument) for argument in arguments]
    try:
        done = subprocess.run(
            line,
            input=stdin,
            env=_environment(python_path) | variables,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_LIMIT_S,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise ResourceError(f"{' '.join(line[:4])} took over {_LIMIT_S} seconds and was ended") from error
    if done.returncode not in accept:
        raise _failure(line, done.returncode, done.stderr or done.stdout)
    return done.stdout


def first_output_s(*arguments: Path | str, stdin: str = "", python_path: Path | None = None) -> float:
    """Run a program to its end and return the seconds from its start to the first byte on its stdout.

    Raises as ``run_process``, and ResourceError if it ends well without a word.
    """
    line = [str(argument) for argument in arguments]
    # Files, not pipes: the program waits for nobody while its first byte is waited for.
    with tempfile.TemporaryFile() as given, tempfile.TemporaryFile() as errors:
        given.write(stdin.encode())
        given.seek(0)
        started = time.perf_counter()
        with subprocess.Popen(
            line, stdin=given, stdout=subprocess.PIPE, stderr=errors, env=_environment(python_path)
        ) as process:
            deadline = threading.Timer(_FIRST_LIMIT_S, process.kill)
            deadline.start()
            try:
                assert process.stdout is not None
                first = process.stdout.read(1)
                elapsed = time.perf_counter() - started
                process.stdout.read()
                code = process.wait()
            finally:
                deadline.cancel()
                process.kill()
        errors.seek(0)
        said = errors.read().decode("utf-8", "replace")
    if code:
        raise _failure(line, code, said)
    if not first:
        raise ResourceError(f"{' '.join(line[:4])} ended well and printed nothing")
    return elapsed


def _environment(python_path: Path | None) -> dict[str, str]:
    environment = dict(os.environ)
    if python_path is not None:
        environment.pop("VIRTUAL_ENV", None)
        environment["PYTHONPATH"] = str(python_path)
    return environment


def _failure(line: list[str], code: int, said: str) -> ResourceError:
    """Return the error of a process that ended with ``code``; negative ones are signals."""
    program = " ".join(line[:4])
    if code == -signal.SIGILL:
        return IllegalInstructionError(
            f"{program} met an illegal instruction (SIGILL): it was built for others than this machine runs"
        )
    how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with {code}"
    last = said.strip().splitlines()[-1:] or ["it said nothing"]
    return ResourceError(f"{program} {how}: {last[0][:300]}")
