"""Programs that are run for what they print, or for when they print it. How one ended becomes an error of one
line.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from llorch_serve.errors import ResourceError

_LIMIT_S: Final = 3600
"""Longest that one process may take; 32 streams of the slowest peer, or a converter, need some minutes."""
_FIRST_LIMIT_S: Final = 300
"""Longest that a command may take which prints one short answer."""


class CrashError(ResourceError):
    """A program was ended by SIGILL or SIGSEGV, as one that was built wrongly, or for another machine.

    signal: its name.
    """

    def __init__(self, message: str, name: str) -> None:
        self.signal = name
        super().__init__(message)


_CRASHES: Final = (signal.SIGILL, signal.SIGSEGV)


def run_process(
    *arguments: Path | str,
    stdin: str = "",
    python_path: Sequence[Path] | None = None,
    accept: tuple[int, ...] = (0,),
    **variables: str,
) -> str:
    """Run a program and return its stdout.

    python_path: the folders that PYTHONPATH shall name, for an interpreter other than this one, which is in
        no virtual environment of ours then; None leaves both alone.
    accept: exit codes that are no failure. variables: added to its environment.
    Raises ResourceError, with the last line the program said, and of that CrashError for SIGILL and SIGSEGV.
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
        raise ResourceError(f"{_shown(line)} took over {_LIMIT_S} seconds and was ended") from error
    if done.returncode not in accept:
        raise _failure(line, done.returncode, done.stderr or done.stdout)
    return done.stdout


@dataclass(frozen=True, slots=True)
class FirstOutput:
    """A program that ran to its end.

    first_s, whole_s: seconds from its start to the first byte on its stdout, and to its end. processor_s:
        seconds of processor time, of user and system together. peak_mib: most memory that was resident, as
        Linux counts it: at least what the process that started it had.
    """

    first_s: float
    whole_s: float
    processor_s: float
    peak_mib: float


def first_output(
    *arguments: Path | str, stdin: str = "", python_path: Sequence[Path] | None = None
) -> FirstOutput:
    """Run a program to its end and return when its first byte came, and what it took.

    Raises as ``run_process``, and ResourceError if it ends well without a word, or where no process is told
    what its children took.
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
                process.returncode, processor, peak = _waited(process.pid)
                whole = time.perf_counter() - started
            finally:
                deadline.cancel()
                process.kill()
        errors.seek(0)
        said = errors.read().decode("utf-8", "replace")
    if process.returncode:
        raise _failure(line, process.returncode, said)
    if not first:
        raise ResourceError(f"{_shown(line)} ended well and printed nothing")
    return FirstOutput(elapsed, whole, processor, peak)


def _waited(pid: int) -> tuple[int, float, float]:
    """Wait for a child; return its exit code, its processor time in seconds and its peak in MiB."""
    if sys.platform == "win32":
        raise ResourceError("what a process took is read as POSIX systems tell it; measure on one of those")
    else:  # noqa: RET506 - mypy on Windows takes what follows a bare raise for unreachable
        _, status, used = os.wait4(pid, 0)
        return os.waitstatus_to_exitcode(status), used.ru_utime + used.ru_stime, used.ru_maxrss / 2**10


def _environment(python_path: Sequence[Path] | None) -> dict[str, str]:
    environment = dict(os.environ)
    if python_path is not None:
        environment.pop("VIRTUAL_ENV", None)
        environment["PYTHONPATH"] = os.pathsep.join(map(str, python_path))
    return environment


def _shown(line: list[str]) -> str:
    """Return the beginning of a command line, without code of several lines."""
    return " ".join(argument for argument in line[:4] if "\n" not in argument)


def _failure(line: list[str], code: int, said: str) -> ResourceError:
    """Return the error of a process that ended with ``code``; negative ones are signals."""
    program = _shown(line)
    name = signal.Signals(-code).name if code < 0 else ""
    how = f"was ended by {name}" if name else f"ended with {code}"
    last = said.strip().splitlines()[-1:] or ["it said nothing"]
    message = f"{program} {how}: {last[0][:300]}"
    return CrashError(message, name) if -code in _CRASHES else ResourceError(message)
