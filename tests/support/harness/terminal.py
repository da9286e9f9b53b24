"""``llorch`` at a terminal of its own, whose keys a test presses and whose screen it reads."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import re
import select
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from pathlib import Path

from support.harness.processes import PATIENCE_S, environment

CTRL_C, CTRL_D, ENTER, ALT_ENTER, UP = "\x03", "\x04", "\r", "\x1b\r", "\x1b[A"

# Stands in what is read for the moment when a line has been sent.
SENT = "<sent>"
_PASTE_OFF = "\x1b[?2004l"

# Makes the terminal the one whose Ctrl-C reaches the process, then becomes the command.
_TAKE_TERMINAL = (
    "import fcntl, os, sys, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0); os.execv(sys.argv[1], "
    "sys.argv[1:])"
)
_STYLES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|\x1b[=>]|\x1b\][^\x07]*\x07")


class Terminal:
    """A command at a terminal of 200 columns."""

    def __init__(
        self, arguments: tuple[object, ...], python: object, variables: dict[str, str | Path]
    ) -> None:
        self._screen, inner = pty.openpty()
        fcntl.ioctl(inner, termios.TIOCSWINSZ, struct.pack("HHHH", 50, 200, 0, 0))
        extra = {"TERM": "xterm-256color", **variables}
        self.process = subprocess.Popen(
            [str(python), "-c", _TAKE_TERMINAL, str(python), "-m", "llorch_serve", *map(str, arguments)],
            stdin=inner,
            stdout=inner,
            stderr=inner,
            env=environment(**extra),
            start_new_session=True,
        )
        os.close(inner)
        self.raw = ""
        self._seen = 0  # of the text without styles

    def press(self, keys: str) -> None:
        """Press keys."""
        os.write(self._screen, keys.encode())

    def wait_for(self, pattern: str) -> re.Match[str]:
        """Return the match of ``pattern`` in what came after the last match, without styles; fails if it does
        not come.
        """
        deadline = time.monotonic() + PATIENCE_S
        while True:
            text = _STYLES.sub("", self.raw.replace(_PASTE_OFF, SENT))
            if match := re.compile(pattern).search(text, self._seen):
                self._seen = match.end()
                return match
            assert self._read(deadline), f"no {pattern!r} in {text[self._seen :]!r}"

    def wait(self) -> int:
        """Return the exit code, once all that was written has been read."""
        deadline = time.monotonic() + PATIENCE_S
        while self._read(deadline):
            pass
        return self.process.wait(PATIENCE_S)

    def end(self) -> None:
        """Stop the process whatever it does."""
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        os.close(self._screen)

    def _read(self, deadline: float) -> bool:
        """Read some more; return whether there was anything before the process ended."""
        ready, _, _ = select.select([self._screen], [], [], max(0.0, deadline - time.monotonic()))
        assert ready, f"nothing in time after {self.raw[-2000:]!r}"
        try:
            data = os.read(self._screen, 65536)
        except OSError:  # Linux's word for the end of a terminal
            return False
        self.raw += data.decode("utf-8", "replace")
        if b"\x1b[6n" in data:  # a terminal is asked where its cursor is
            self.press("\x1b[10;1R")
        return bool(data)


@contextlib.contextmanager
def terminal(
    *arguments: object, python: object = sys.executable, **variables: str | Path
) -> Iterator[Terminal]:
    """Start a command at a terminal, and end it afterwards."""
    made = Terminal(arguments, python, variables)
    try:
        yield made
    finally:
        made.end()
