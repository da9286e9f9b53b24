"""``llorch chat`` at a terminal and in a pipe, with an artifact and with a worker."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from support.harness.processes import PATIENCE_S, Outcome, WorkerProcess, environment
from support.harness.terminal import ALT_ENTER, CTRL_C, CTRL_D, ENTER, SENT, UP, terminal

PROMPT = r"\n>"


def piped(lines: str, *arguments: object, **variables: str | Path) -> Outcome:
    result = subprocess.run(
        [sys.executable, "-m", "llorch_serve", "chat", *map(str, arguments)],
        input=lines,
        capture_output=True,
        check=False,
        encoding="utf-8",
        env=environment(**variables),
        timeout=PATIENCE_S,
    )
    return Outcome(result.returncode, result.stdout, result.stderr)


def test_a_pipe_is_answered_line_by_line_without_styles_or_history(tiny: Path, tmp_path: Path) -> None:
    saved = tmp_path / "chat.json"
    lines = f"Hello\n//slash\n/system Be brief.\n/set temperature 9\n/save {saved}\n/nothing\n/quit\nnever\n"
    found = piped(lines, tiny, "--max-tokens", "6", XDG_STATE_HOME=tmp_path / "state")
    assert found.code == 0
    assert "\x1b" not in found.stdout + found.stderr
    assert found.stderr.count("tokens/s; ended by the limit of tokens") == 2
    assert "temperature: found 9.0" in found.stderr
    assert "there is no command /nothing" in found.stderr
    messages = json.loads(saved.read_text())
    assert [message["role"] for message in messages] == ["system", "user", "assistant", "user", "assistant"]
    assert messages[3]["content"] == "/slash"
    assert found.stdout == f"{messages[2]['content']}\n{messages[4]['content']}\n"
    assert saved.stat().st_mode & 0o777 == 0o600
    assert not (tmp_path / "state").exists()


def test_a_terminal_has_history_and_ctrl_c_stops_the_answer_alone(long: Path, tmp_path: Path) -> None:
    variables = {"XDG_STATE_HOME": tmp_path}
    flags = ("--max-context", "20000", "--temperature", "0", "--stop", "never that")
    with terminal("chat", long, *flags, **variables) as screen:
        screen.wait_for("/help for help, Ctrl-D to leave")
        screen.wait_for(PROMPT)
        screen.press("first line" + ALT_ENTER + "second line\\" + ENTER + "third" + ENTER)
        screen.wait_for(rf"third[\s\S]*{SENT}[\s\S]{{20}}")  # the answer is under way
        screen.press(CTRL_C)
        screen.wait_for(r"\(stopped\)")
        screen.wait_for(PROMPT)
        screen.press("half a line" + CTRL_C)
        screen.wait_for(r"\(Ctrl-D leaves\)")
        screen.wait_for(PROMPT)
        screen.press("/set max_tokens 5" + ENTER)
        screen.wait_for("set: .*max_tokens 5")
        screen.wait_for(PROMPT)
        screen.press("/regenerate" + ENTER)
        screen.wait_for(r"5 tokens, [\d.]+ tokens/s; ended by the limit")
        screen.wait_for(r"\| \d+ of 20000 tokens \| [\d.]+ tokens/s")
        screen.press(CTRL_D)
        assert screen.wait() == 0
        assert "\x1b[2m" in screen.raw
    [history] = tmp_path.rglob("*history")
    assert history.stat().st_mode & 0o777 == 0o600
    assert history.parent.stat().st_mode & 0o777 == 0o700
    assert "second line" in history.read_text()
    with terminal("chat", long, *flags, NO_COLOR="1", **variables) as screen:
        screen.wait_for(PROMPT)
        screen.press(UP)
        screen.wait_for("/regenerate")
        screen.press(CTRL_C)
        screen.wait_for(r"\(Ctrl-D leaves\)")
        screen.wait_for(PROMPT)
        screen.press(CTRL_D)
        assert screen.wait() == 0
        assert "\x1b[2m" not in screen.raw


def test_a_worker_is_chatted_with(tiny_worker: WorkerProcess) -> None:
    found = piped(
        "Hello\n/regenerate\n", "--connect", tiny_worker.address, "--max-tokens", "4", "--temperature", "0"
    )
    assert found.code == 0
    assert found.stderr.count("4 tokens, ") == 2
    refused = piped("", "--connect", tiny_worker.address, "--max-context", "64")
    assert refused.code == 2
    assert "--max-context has no effect" in refused.error()


def test_a_refused_question_is_taken_back_and_the_chat_goes_on(tiny: Path) -> None:
    found = piped(f"{'word ' * 200}\n/undo\nHi\n", tiny, "--max-tokens", "3")
    assert found.code == 0
    assert "the context holds 128" in found.stderr
    assert "there is nothing to take back" in found.stderr
    assert "3 tokens, " in found.stderr


def test_arguments_of_the_template_are_checked_with_the_first_question(tiny: Path) -> None:
    found = piped("Hi\n", tiny, "--template-arguments", "{")
    assert found.code == 0
    assert "input.chat.template_arguments: is not JSON" in found.stderr


@pytest.mark.real_model
def test_the_real_model_answers_in_its_context(smollm2: Callable[..., Path]) -> None:
    lines = "What is the capital of France?\nAnd of Italy?\n"
    found = piped(lines, smollm2("fp32"), "--temperature", "0", "--max-tokens", "24")
    assert found.code == 0
    first, second = found.stdout.splitlines()
    assert "Paris" in first
    assert "Rome" in second
