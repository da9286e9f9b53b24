"""Results go to stdout and nothing else does; errors are one line; bars are for terminals only."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from contextlib import redirect_stderr
from dataclasses import dataclass

import pytest

from llorch_serve.requests import Timings
from llorch_serve.terminal.console import byte_progress, fail, note, say, step_progress, write, write_json


class Terminal(io.StringIO):
    """A stderr that says it is a terminal."""

    def isatty(self) -> bool:
        return True


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    monkeypatch.setenv("TERM", "xterm")
    for name in ("NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
        monkeypatch.delenv(name, raising=False)
    return Terminal()


def test_names_of_strangers_do_nothing_but_show(capsys: pytest.CaptureFixture[str]) -> None:
    note("ignored: a\x1b[2J\nnote: all is well\x9b1m")
    say("cleared \x1b[2J")
    assert capsys.readouterr().err == "note: ignored: a[2J note: all is well1m\ncleared [2J\n"


def test_text_goes_to_stdout_unchanged_and_messages_to_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    write("Größe 🙂\n no end")
    say("for people")
    out, err = capsys.readouterr()
    assert out == "Größe 🙂\n no end"
    assert err == "for people\n"


def test_an_error_is_one_plain_line_and_its_code_comes_back(capsys: pytest.CaptureFixture[str]) -> None:
    assert fail("first line\n  second\tline", 6) == 6
    out, err = capsys.readouterr()
    assert out == ""
    assert err == "error: first line second line\n"


def test_on_a_terminal_the_label_is_coloured_and_the_message_is_not(terminal: Terminal) -> None:
    with redirect_stderr(terminal):
        fail("broken", 1)
    assert terminal.getvalue() == "\x1b[1;31merror:\x1b[0m broken\n"


@dataclass(frozen=True, slots=True)
class Document:
    text: str
    timings: Timings
    seed: int | None = None


def test_json_is_one_document_with_dataclasses_as_objects(capsys: pytest.CaptureFixture[str]) -> None:
    write_json(Document('quote " and ü', Timings(0.5, 1.0, 2.0), None))
    out, err = capsys.readouterr()
    assert json.loads(out) == {
        "text": 'quote " and ü',
        "timings": {"queue_s": 0.5, "prefill_s": 1.0, "decode_s": 2.0},
        "seed": None,
    }
    assert out.endswith("}\n")
    assert err == ""


def test_a_reader_that_has_gone_is_no_error() -> None:
    code = "from llorch_serve.terminal.console import write\nfor _ in range(10000): write('x' * 1000)"
    with subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.read(10)
        process.stdout.close()
        assert process.stderr.read() == b""
        assert process.wait(20) == 0


def test_bars_are_silent_where_stderr_is_no_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    with byte_progress() as advance:
        advance("writing", 10, 100)
    with step_progress("measuring", 3) as count:
        count()
    assert capsys.readouterr() == ("", "")


def test_a_bar_shows_phase_and_bytes_on_a_terminal_and_goes_away(
    terminal: Terminal, capsys: pytest.CaptureFixture[str]
) -> None:
    with redirect_stderr(terminal), byte_progress() as advance:
        advance("reading source", 2_000_000, 4_000_000)
        advance("writing weights", 1_000_000, 1_000_000)
    shown = terminal.getvalue()
    assert "reading source" in shown
    assert "writing weights" in shown
    assert "2.0/4.0 MB" in shown
    assert shown.endswith("\x1b[2K")
    assert capsys.readouterr().out == ""


def test_steps_are_shown_on_a_terminal(terminal: Terminal) -> None:
    with redirect_stderr(terminal), step_progress("measuring", 4) as count:
        for _ in range(4):
            count()
    assert "measuring" in terminal.getvalue()
    assert "100%" in terminal.getvalue()
