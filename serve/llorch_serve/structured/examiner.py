"""The worker's end of the examination: one process that is kept, killed when a grammar holds it, and started
again.

Compiling cannot be interrupted inside this process, and some short grammars take minutes, gigabytes or the
stack.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from typing import Final

import msgspec
import psutil

from llorch_serve.errors import LlorchError
from llorch_serve.python_child import child_environment, module_command
from llorch_serve.structured.limits import EXAMINATION_BYTES, EXAMINATION_S

_START_S: Final = 60.0
_BUSY: Final = 10  # so many times the limit may pass on the clock of a busy machine
_SHORTEST_WAIT_S: Final = 0.02


class Examiner:
    """Tries grammars in a process of its own. For one thread at a time.

    size, special: the vocabulary's size and special tokens.
    limit_s, limit_bytes: processor time in seconds and memory that a grammar may take.
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
        self._late = False
        self.grammar_bytes = 0
        """Memory that the last grammar took which could be compiled."""

    def refusal(self, grammar: str) -> str | None:
        """Return why a grammar cannot be compiled, in the library's words or ours; None if it can.

        Raises LlorchError or OSError where the process does not start.
        """
        if self._process is not None and self._process.poll() is not None:
            self.close()  # it ended without a grammar; whatever ended it, this one is not to blame
        if self._process is None:
            self._process = subprocess.Popen(
                module_command(sys.executable, "llorch_serve.structured.examination"),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env=child_environment(),
                start_new_session=True,  # Ctrl-C is for the worker, which ends it
            )
            if self._ask(self._process, self._greeting, _START_S) is None:
                raise LlorchError(
                    f"the process that examines grammars does not start; see what `{sys.executable} -P -m "
                    "llorch_serve.structured.examination` says"
                )
        reply = self._ask(self._process, msgspec.json.encode(grammar), self._limit_s)
        if reply is not None:
            reason, self.grammar_bytes = msgspec.json.decode(reply, type=tuple[str | None, int])
            return reason
        if self._late:
            return f"it takes more than {self._limit_s:g} s to compile; ask for something smaller"
        return (
            f"it takes more than {self._limit_bytes >> 20} MiB to compile, or is nested too deeply; "
            "ask for something smaller"
        )

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
        answered = threading.Event()
        watch = threading.Thread(target=self._watch, args=(process.pid, process.kill, limit_s, answered))
        watch.start()
        try:
            process.stdin.write(line + b"\n")
            process.stdin.flush()
            reply = process.stdout.readline()
        except BrokenPipeError:
            reply = b""
        finally:
            answered.set()
            watch.join()
        if not reply or self._late:  # killed, if just after it had answered
            self.close()
        return reply or None

    def _watch(self, pid: int, kill: Callable[[], None], limit_s: float, answered: threading.Event) -> None:
        """Kill a process that has used its time. A thread of its own; ``late`` says afterwards whether it
        did.

        Counted is the processor's time, so that nothing is refused because the machine is busy.
        """
        self._late = False
        deadline = time.monotonic() + _BUSY * limit_s
        try:
            process = psutil.Process(pid)
            end = _used(process) + limit_s
            left = limit_s
            while not answered.wait(max(left, _SHORTEST_WAIT_S)):
                left = end - _used(process)
                if left <= 0 or time.monotonic() >= deadline:
                    self._late = True
                    kill()
                    return
        except psutil.NoSuchProcess:  # it has ended by itself
            return


def _used(process: psutil.Process) -> float:
    times = process.cpu_times()
    return times.user + times.system
