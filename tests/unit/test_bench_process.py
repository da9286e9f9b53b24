"""The process of an entry from outside: small scripts stand for interpreters that lack llorch, crash, or talk
nonsense.
"""

from __future__ import annotations

import sys
import textwrap

import pytest

from llorch_serve.bench.process import EntryProcess, ProblemError
from llorch_serve.bench.protocol import PROTOCOL, Close, Closed, Opened

READY = f'{{"type": "Ready", "protocol": {PROTOCOL}, "version": "1"}}'
GREETING = f"import sys; print({READY!r}, flush=True)"


def started(script: str, lines: list[str] | None = None) -> EntryProcess:
    tell = (lambda _line: None) if lines is None else lines.append
    return EntryProcess(sys.executable, tell, command=[sys.executable, "-c", textwrap.dedent(script)])


def greet_and_ask(process: EntryProcess) -> None:
    process.greet()
    process.ask(Close(), Closed)


def failure(script: str) -> str:
    process = started(script)
    try:
        with pytest.raises(ProblemError) as caught:
            greet_and_ask(process)
    finally:
        process.close()
    return f"{caught.value.problem.exit_code} {caught.value.problem.message}"


def test_questions_are_answered_and_the_process_ends_with_its_input() -> None:
    process = started(
        f"""
        {GREETING}
        for line in sys.stdin:
            print('{{"type": "Closed", "peak_rss_mib": 5.5}}', flush=True)
        """
    )
    process.greet()
    assert process.ask(Close(), Closed).peak_rss_mib == 5.5
    assert process.ask(Close(), Closed).peak_rss_mib == 5.5
    process.close()
    process.close()


def test_an_interpreter_without_llorch() -> None:
    found = failure("import no_such_module")
    assert found.startswith(f"4 {sys.executable} does not run llorch (its process ended with exit code 1: ")
    assert "No module named 'no_such_module'" in found


def test_an_interpreter_that_is_none() -> None:
    with pytest.raises(ProblemError, match="/no/such/python cannot be run"):
        EntryProcess("/no/such/python", lambda _line: None)


@pytest.mark.parametrize("other", [PROTOCOL - 1, PROTOCOL + 1])
def test_another_llorch_is_refused_by_both_numbers(other: int) -> None:
    greeting = READY.replace(f'"protocol": {PROTOCOL}', f'"protocol": {other}')
    found = failure(f"print({greeting!r}, flush=True); import sys; sys.stdin.read()")
    assert found.startswith("4 ")
    assert f"measures by protocol {other}; this one by {PROTOCOL}" in found
    assert "Install the same llorch there" in found


def test_a_crash_is_told_with_its_signal_and_last_words() -> None:
    found = failure(
        f"""
        import os, signal
        {GREETING}
        print('about to go', file=sys.stderr, flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
        """
    )
    assert found == "1 its process was ended by signal 9: about to go"


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        ("hello", "4 its process answers what is no answer"),
        ('{"type": "Ran", "values": {}}', "4 its process answers with Ran where Closed was asked for"),
        ('{"type": "Failed", "problem": {"exit_code": 6, "message": "too big"}}', "6 too big"),
    ],
)
def test_other_answers(answer: str, says: str) -> None:
    found = failure(f"{GREETING}\nprint({answer!r}, flush=True); sys.stdin.read()")
    assert found.startswith(says)


def test_a_failure_of_one_test_says_that_the_next_can_be_tried() -> None:
    answer = '{"type": "Failed", "problem": {"exit_code": 4, "message": "m"}, "goes_on": true}'
    process = started(f"{GREETING}\nprint({answer!r}, flush=True); sys.stdin.read()")
    process.greet()
    with pytest.raises(ProblemError) as caught:
        process.ask(Close(), Opened)
    process.close()
    assert caught.value.goes_on


def test_what_it_writes_to_stderr_is_passed_on() -> None:
    lines: list[str] = []
    process = started(f"{GREETING}\nprint('\\x1b[0;93mnote: so\\x1b[m', file=sys.stderr)", lines)
    process.greet()
    process.close()
    assert lines == ["note: so"]
