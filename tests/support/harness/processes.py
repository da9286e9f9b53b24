"""Running ``llorch``: in this process for speed, as a process of its own where streams, signals or imports
matter.

Events are waited for (a line on stderr, a byte on stdout, the end of the process), each with a deadline;
nothing sleeps. No run sees the settings of whoever started the tests: neither models, tokenizers nor caches.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import msgspec

from llorch_serve import cli

PATIENCE_S = 600.0
_OURS = ("MODEL_PATH", "TOKENIZER_PATH", "HF_HUB_CACHE", "HF_HOME")
_PASSED = ("LLORCH_OPTIMUM_PYTHON", "LLORCH_GENAI_PYTHON")  # where ci/ put other tools
# A cache that cannot be written to: a test that exports into the cache names one of its own.
_ISOLATED = {
    "LLORCH_CACHE": "/dev/null/no-cache",
    "HF_HUB_OFFLINE": "1",
    "TQDM_DISABLE": "1",
    "COLUMNS": "200",
}


def interpreter(variable: str, script: str) -> str:
    """Return the interpreter that a script of ci/ has named for tests of what it installed there."""
    found = os.environ.get(variable)
    assert found, f"{variable} is not set; run {script}"
    return found


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a finished command left."""

    code: int
    stdout: str
    stderr: str

    def document(self) -> dict[str, object]:
        """Return stdout's one JSON document; fails if there is anything else on stdout."""
        assert self.code == 0, self
        return msgspec.json.decode(self.stdout, type=dict[str, object])

    def error(self) -> str:
        """Return the one line that says what went wrong; fails if stdout or stderr hold more."""
        assert self.code != 0, self
        assert self.stdout == "", self
        lines = self.stderr.splitlines()
        assert len(lines) == 1, self
        assert lines[0].startswith("error: "), self
        return lines[0].removeprefix("error: ")


def environment(**changes: str | Path) -> dict[str, str]:
    """Return an environment for a command, free of the caller's own settings."""
    settings = {key for key in os.environ if key.startswith("LLORCH_")}.difference(_PASSED)
    kept = {key: value for key, value in os.environ.items() if key not in settings.union(_OURS)}
    return kept | _ISOLATED | {key: str(value) for key, value in changes.items()}


def with_scripts(variables: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return an environment (by default this process's) whose Python finds the modules of tests/ and ci/
    too.
    """
    found = dict(os.environ if variables is None else variables)
    tests = Path(__file__).resolve().parents[2]
    places = [str(tests), str(tests.parent / "ci"), *filter(None, [found.get("PYTHONPATH")])]
    return found | {"PYTHONPATH": os.pathsep.join(places)}


def llorch(*arguments: object, python: object = sys.executable, **variables: str | Path) -> Outcome:
    """Run a command as a process; ``variables`` are added to its environment."""
    result = subprocess.run(
        [str(python), "-m", "llorch_serve", *map(str, arguments)],
        capture_output=True,
        check=False,
        encoding="utf-8",
        stdin=subprocess.DEVNULL,
        env=environment(**variables),
        timeout=PATIENCE_S,
    )
    return Outcome(result.returncode, result.stdout, result.stderr)


def llorch_here(*arguments: object, **variables: str | Path) -> Outcome:
    """Run a command in this process, which saves half a second of imports. Its own child processes are not
    captured.
    """
    out, err = io.StringIO(), io.StringIO()
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    code: object = 0
    with (
        mock.patch.object(sys, "argv", ["llorch", *map(str, arguments)]),
        mock.patch.dict(os.environ, environment(**variables), clear=True),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
    ):
        try:
            cli.main()
        except SystemExit as end:
            code = end.code or 0
        finally:
            for number, handler in handlers.items():
                signal.signal(number, handler)
    assert isinstance(code, int)
    return Outcome(code, out.getvalue(), err.getvalue())


class Running:
    """A command that runs; what it writes to stderr can be waited for, and stdout is read by the test."""

    def __init__(
        self, arguments: tuple[object, ...], python: object, variables: Mapping[str, str | Path]
    ) -> None:
        self.process = subprocess.Popen(
            [str(python), "-m", "llorch_serve", *map(str, arguments)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=environment(**variables),
            bufsize=0,
        )
        assert self.process.stdout is not None
        self.stdout = self.process.stdout
        self._log: list[str] = []
        self._ended = False
        self._changed = threading.Condition()
        self._reader = threading.Thread(target=self._read, name="test-stderr", daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stderr is not None
        with io.TextIOWrapper(self.process.stderr, encoding="utf-8") as lines:
            for line in lines:
                with self._changed:
                    self._log.append(line.rstrip("\n"))
                    self._changed.notify_all()
        with self._changed:
            self._ended = True
            self._changed.notify_all()

    @property
    def log(self) -> list[str]:
        """The lines on stderr so far."""
        with self._changed:
            return list(self._log)

    def wait_for_line(self, pattern: str) -> re.Match[str]:
        """Return the match of the first line on stderr that holds ``pattern``; fails if the process ends
        without.
        """
        deadline = time.monotonic() + PATIENCE_S
        with self._changed:
            seen = 0
            while True:
                for line in self._log[seen:]:
                    if match := re.search(pattern, line):
                        return match
                seen = len(self._log)
                left = deadline - time.monotonic()
                assert not self._ended, f"ended without {pattern!r}: {self._log}"
                assert left > 0, f"no {pattern!r} in time: {self._log}"
                self._changed.wait(left)

    def wait(self) -> int:
        """Return the exit code; fails if the process does not end."""
        code = self.process.wait(PATIENCE_S)
        self._reader.join(PATIENCE_S)
        return code

    def end(self) -> None:
        """Stop the process whatever it does, and close its streams."""
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(PATIENCE_S)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        self._reader.join(PATIENCE_S)
        self.stdout.close()


@contextlib.contextmanager
def running(
    *arguments: object, python: object = sys.executable, **variables: str | Path
) -> Iterator[Running]:
    """Start a command, and end it afterwards."""
    command = Running(arguments, python, variables)
    try:
        yield command
    finally:
        command.end()


@dataclass(frozen=True, slots=True)
class WorkerProcess:
    """A worker that serves at ``address`` (HOST:PORT)."""

    address: str
    command: Running

    @property
    def port(self) -> str:
        """The port alone."""
        return self.address.rsplit(":", 1)[1]


@contextlib.contextmanager
def serving(
    *arguments: object, python: object = sys.executable, **variables: str | Path
) -> Iterator[WorkerProcess]:
    """Run ``llorch serve`` on a free port, from SERVING on."""
    with running("serve", "--port", "0", *arguments, python=python, **variables) as command:
        yield WorkerProcess(command.wait_for_line(r"^serving .* at (\S+)$").group(1), command)
