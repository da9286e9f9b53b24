"""Runs ``llorch`` in a process that breaks off while it writes a file: ``python -m support.harness.broken_off
HOW COUNT PATH ARGUMENTS``.

HOW ``killed``: the process kills itself in the middle of the write to PATH before which COUNT were made.
``full``: no file may grow beyond COUNT bytes, as on a disk that is full.
"""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
from pathlib import Path
from typing import Literal

from llorch_serve import cli
from support.harness.processes import PATIENCE_S, Outcome, environment, with_scripts


def broken_off(how: Literal["killed", "full"], count: int, path: Path, *arguments: object) -> Outcome:
    """Run a command that ends so."""
    words = [sys.executable, "-m", __name__, how, count, path, *arguments]
    result = subprocess.run(
        list(map(str, words)),
        capture_output=True,
        check=False,
        encoding="utf-8",
        stdin=subprocess.DEVNULL,
        env=with_scripts(environment()),
        timeout=PATIENCE_S,
    )
    return Outcome(result.returncode, result.stdout, result.stderr)


def _kill_in_write(count: int, path: Path) -> None:
    write, left = os.write, count

    def write_or_die(handle: int, data: bytes) -> int:
        nonlocal left
        if path.exists() and os.path.samestat(os.fstat(handle), path.stat()):
            left -= 1
            if left < 0:
                write(handle, data[: len(data) // 2])
                os.kill(os.getpid(), signal.SIGKILL)
        return write(handle, data)

    os.write = write_or_die


def main() -> None:
    """Read the arguments, arrange the end, and run the command."""
    how, count, path, *arguments = sys.argv[1:]
    if how == "killed":
        _kill_in_write(int(count), Path(path))
    else:
        resource.setrlimit(resource.RLIMIT_FSIZE, (int(count), resource.RLIM_INFINITY))
    sys.argv = ["llorch", *arguments]
    cli.main()


if __name__ == "__main__":
    main()
