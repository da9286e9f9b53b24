"""The process of an entry, seen from the one that compares: started in any interpreter, asked, and ended
whatever happens.
"""

from __future__ import annotations

import contextlib
import re
import subprocess
import threading
from collections import deque
from collections.abc import Callable
from typing import Final, TypeVar

import msgspec

from llorch_serve.bench.protocol import PROTOCOL, Answer, Failed, Question, Ready
from llorch_serve.bench.schema import Problem
from llorch_serve.files.json_errors import NOT_JSON
from llorch_serve.python_child import child_environment, module_command

_END_S: Final = 10.0  # for a process whose stdin is closed to end by itself
_KEPT_LINES: Final = 5
_STYLES: Final = re.compile(r"\x1b\[[0-9;]*m")  # colours, which runtimes print wherever they run
_Answer = TypeVar("_Answer")


class ProblemError(Exception):
    """A question was not answered; ``problem`` says why. goes_on: the next one can be."""

    def __init__(self, problem: Problem, *, goes_on: bool = False) -> None:
        self.problem = problem
        self.goes_on = goes_on
        super().__init__(problem.message)


class EntryProcess:
    """Starts ``PYTHON -m llorch_serve.bench.child`` and asks it. tell: takes each line that it writes to
    stderr.

    command: what to start in its place.

    Raises ProblemError, from every method, if the process cannot run or has ended.
    """

    def __init__(
        self,
        python: str,
        tell: Callable[[str], None],
        *,
        command: list[str] | None = None,
    ) -> None:
        self._python = python
        self._lines: deque[str] = deque(maxlen=_KEPT_LINES)
        self._decoder = msgspec.json.Decoder(Answer)
        try:
            self._process = subprocess.Popen(
                command or module_command(python, "llorch_serve.bench.child"),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env=child_environment(),
            )
        except OSError as error:
            raise ProblemError(
                Problem(exit_code=4, message=f"{python} cannot be run ({error.strerror})")
            ) from error
        self._reader = threading.Thread(target=self._read_errors, args=(tell,), daemon=True)
        self._reader.start()

    def greet(self) -> None:
        """Wait until it runs, and see that it is of this llorch."""
        try:
            ready = self._take(Ready)
        except ProblemError as error:
            message = f"{self._python} does not run llorch ({error.problem.message}); install llorch there"
            raise ProblemError(Problem(exit_code=4, message=message)) from error
        if ready.protocol != PROTOCOL:
            message = (
                f"{self._python} has llorch {ready.version}, which measures by protocol {ready.protocol}; "
                f"this one by {PROTOCOL}. "
                "Install the same llorch there"
            )
            raise ProblemError(Problem(exit_code=4, message=message))

    def ask(self, question: Question, kind: type[_Answer]) -> _Answer:
        """Return the answer, which is of this kind. Raises ProblemError for a failure."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(msgspec.json.encode(question) + b"\n")
            self._process.stdin.flush()
        except OSError:
            raise ProblemError(self._ended()) from None
        return self._take(kind)

    def close(self) -> None:
        """End the process: it ends with its stdin, and is killed if it does not. Idempotent."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        try:
            self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._reader.join()
        self._process.stdout.close()

    def _take(self, kind: type[_Answer]) -> _Answer:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise ProblemError(self._ended())
        try:
            answer = self._decoder.decode(line)
        except NOT_JSON as error:
            message = f"its process answers what is no answer ({error})"
            raise ProblemError(Problem(exit_code=4, message=message)) from error
        if isinstance(answer, Failed):
            raise ProblemError(answer.problem, goes_on=answer.goes_on)
        if not isinstance(answer, kind):
            message = f"its process answers with {type(answer).__name__} where {kind.__name__} was asked for"
            raise ProblemError(Problem(exit_code=4, message=message))
        return answer

    def _ended(self) -> Problem:
        """Return how the process ended, with its last words."""
        code = self._process.wait()
        self._reader.join()
        how = (
            f"its process was ended by signal {-code}"
            if code < 0
            else f"its process ended with exit code {code}"
        )
        last = next((line for line in reversed(self._lines) if line.strip()), "")
        return Problem(exit_code=1, message=f"{how}: {last.strip()}" if last else how)

    def _read_errors(self, tell: Callable[[str], None]) -> None:
        assert self._process.stderr is not None
        with self._process.stderr as stream:
            for line in stream:
                text = _STYLES.sub("", line.decode("utf-8", "replace")).rstrip()
                self._lines.append(text)
                tell(text)
