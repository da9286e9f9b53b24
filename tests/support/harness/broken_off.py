"""Runs ``llorch`` in a process that breaks off while it writes a file: ``python -m support.harness.broken_off
HOW SIZE PATH ARGUMENTS``.

HOW ``killed``: the process kills itself when PATH grows beyond SIZE bytes, with a part of a line written.
``full``: no file may grow beyond SIZE bytes, as on a disk that is full.
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


def broken_off(how: Literal["killed", "full"], size: int, path: Path, *arguments: object) -> Outcome:
    """Run a command that ends so."""
    words = [sys.executable, "-m", __name__, how, size, path, *arguments]
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


def _kill_in_write(size: int, path: Path) -> None:
    write = os.write

    def write_or_die(handle: int, data: bytes) -> int:
        found = os.fstat(handle)
        room = size - found.st_size
        if len(data) <= room or not path.exists() or not os.path.samestat(found, path.stat()):
            return write(handle, data)
        write(handle, data[: max(1, room)].rstrip(b"\n"))
        os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError("a killed process went on")

    os.write = write_or_die


def main() -> None:
    """Read the arguments, arrange the end, and run the command."""
    how, size, path, *arguments = sys.argv[1:]
    if how == "killed":
        _kill_in_write(int(size), Path(path))
    else:
        resource.setrlimit(resource.RLIMIT_FSIZE, (int(size), resource.RLIM_INFINITY))
    sys.argv = ["llorch", *arguments]
    cli.main()


if __name__ == "__main__":
    main()
