"""The worker's end of the examination: one process that is kept, killed when a grammar holds it, and started again.

Compiling cannot be interrupted inside this process, and some short grammars take minutes, gigabytes or the stack.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
import threading
from collections.abc import Mapping
from typing import Final

import msgspec

from llorch_serve.structured.limits import EXAMINATION_BYTES, EXAMINATION_S

_START_S: Final = 60.0


class Examiner:
    """Tries grammars in a process of its own. For one thread at a time.

    size, special: the vocabulary's size and special tokens.
    limit_s, limit_bytes: seconds and memory that a grammar may take.
    """

    def __init__(
        self,
        size: int,
        special: Mapping[int, str],
        *,
        limit_s: float = EXAMINATION_S,
        limit_bytes: int = EXAMINATION_BYTES,
    ) -> None:
        self._greeting = msgspec.json.encode((size, dict(special), limit_bytes))
        self._limit_s = limit_s
        self._limit_bytes = limit_bytes
        self._process: subprocess.Popen[bytes] | None = None

    def refusal(self, grammar: str) -> str | None:
        """Return why a grammar cannot be compiled, in the library's words or ours; None if it can."""
        if self._process is None:
            self._process = subprocess.Popen(
                # -P: nothing is imported from the folder that the worker happens to run in.
                [sys.executable, "-P", "-m", "llorch_serve.structured.examination"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C is for the worker, which ends it
            )
            if self._ask(self._process, self._greeting, _START_S) is None:
                return "the process that examines grammars does not start"
        reply = self._ask(self._process, msgspec.json.encode(grammar), self._limit_s)
        if reply is None:
            return (
                f"it takes more than {self._limit_s:g} s or {self._limit_bytes >> 20} MiB to compile, "
                "or is nested too deeply; ask for something smaller"
            )
        return msgspec.json.decode(reply, type=str | None)

    def close(self) -> None:
        """End the process; any thread. What is being examined is refused."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait()
            for stream in (process.stdin, process.stdout):
                # What was not written has no reader any more.
                with contextlib.suppress(BrokenPipeError):
                    if stream is not None:
                        stream.close()

    def _ask(self, process: subprocess.Popen[bytes], line: bytes, limit_s: float) -> bytes | None:
        """Return the process' answer; None if there is none in time, and then the process is ended."""
        assert process.stdin is not None
        assert process.stdout is not None
        timer = threading.Timer(limit_s, process.kill)
        timer.start()
        try:
            process.stdin.write(line + b"\n")
            process.stdin.flush()
            reply = process.stdout.readline()
        except BrokenPipeError:
            reply = b""
        finally:
            timer.cancel()
        if not reply:
            self.close()
        return reply or None
