"""The loop of ``llorch chat``: what is asked, what stays in the conversation, and what a screen may be
sent.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from llorch_serve.engine.sequence import FinishReason
from llorch_serve.errors import FieldViolation, InvalidRequestError, ProviderError
from llorch_serve.requests import (
    ChatMessage,
    ChatPrompt,
    Completion,
    GenerationRequest,
    GenerationUpdate,
    Timings,
)
from llorch_serve.sampling.params import SamplingParams
from llorch_serve.terminal.chat_history import history_file, private_file
from llorch_serve.terminal.chat_loop import ChatLoop
from llorch_serve.terminal.chat_screen import TerminalReader
from llorch_serve.terminal.console import fail, show_aside, write
from llorch_serve.terminal.conversation import Conversation
from support.fakes.generator import INFO

DONE = Completion(FinishReason.STOP, "</s>", 7, 5, 1, Timings(0, 1, 2))
# An answer is its pieces, an exception among them is raised.
Answer = list[str | BaseException]


class Keyboard:
    """Lines, ends and interrupts, one after the other."""

    def __init__(self, *lines: str | BaseException) -> None:
        self._lines = list(lines)

    def read(self) -> str:
        if not self._lines:
            raise EOFError
        line = self._lines.pop(0)
        if isinstance(line, BaseException):
            raise line
        return line


class Model:
    """Answers as a test has written; keeps what it was asked."""

    def __init__(self, *answers: Answer) -> None:
        self._answers = list(answers)
        self.asked: list[GenerationRequest] = []
        self.closed = 0

    def generate(self, request: GenerationRequest) -> Iterator[GenerationUpdate]:
        self.asked.append(request)
        try:
            for piece in self._answers.pop(0):
                if isinstance(piece, BaseException):
                    raise piece
                thought, _, text = piece.rpartition("|")
                yield GenerationUpdate(request.request_id, text, (1,), reasoning=thought)
            yield GenerationUpdate(request.request_id, "", (), DONE)
        finally:
            self.closed += 1

    def prompts(self) -> list[list[tuple[str, Any]]]:
        found = []
        for request in self.asked:
            assert isinstance(request.prompt, ChatPrompt)
            found.append([(m.role, m.content) for m in request.prompt.messages])
        return found


def chat(model: Model, *lines: str | BaseException, conversation: Conversation | None = None) -> ChatLoop:
    loop = ChatLoop(conversation or Conversation(), INFO, model.generate)
    loop.run(Keyboard(*lines))
    assert model.closed == len(model.asked)
    return loop


def test_answers_become_part_of_the_conversation(capsys: pytest.CaptureFixture[str]) -> None:
    model = Model(["Hm.|", "He", "llo"], ["Bye\n"])
    loop = chat(model, "Hi", "  ", "/system Be brief.", "Really?", conversation=Conversation("Be long."))
    assert model.prompts() == [
        [("system", "Be long."), ("user", "Hi")],
        [("system", "Be brief."), ("user", "Hi"), ("assistant", "Hello"), ("user", "Really?")],
    ]
    assert loop.conversation.messages[1] == ChatMessage("assistant", "Hello", reasoning_content="Hm.")
    shown = capsys.readouterr()
    assert shown.out == "Hello\nBye\n"
    assert shown.err.count("5 tokens, 2.0 tokens/s") == 2
    assert shown.err.startswith("Hm.\n5 tokens")
    assert loop.status() == "fake-1M | 12 of 4096 tokens | 2.0 tokens/s"


def test_ctrl_c_keeps_what_was_shown_and_the_program(capsys: pytest.CaptureFixture[str]) -> None:
    model = Model(["One, two", KeyboardInterrupt()], [KeyboardInterrupt()], ["ok"])
    loop = chat(model, "Count", KeyboardInterrupt(), "Nothing yet", "Go on")
    assert model.prompts()[-1] == [("user", "Count"), ("assistant", "One, two"), ("user", "Go on")]
    assert [m.role for m in loop.conversation.messages] == ["user", "assistant"] * 2
    assert capsys.readouterr().err.count("(stopped)") == 2


def test_a_refusal_is_told_and_its_question_taken_back(capsys: pytest.CaptureFixture[str]) -> None:
    refusal = InvalidRequestError([FieldViolation("input", "found a prompt of 9 tokens")])
    model = Model([refusal], ["Hello"])
    chat(model, "Too long", "Hi")
    assert model.prompts()[-1] == [("user", "Hi")]
    assert "input: found a prompt of 9 tokens" in capsys.readouterr().err


def test_questions_can_be_answered_again_taken_back_and_forgotten(capsys: pytest.CaptureFixture[str]) -> None:
    model = Model(["a"], ["b"], ["c"], ["d"])
    loop = chat(model, "1", "2", "/regenerate", "/undo", "/undo", "/undo", "/regenerate", "3", "/reset")
    assert model.prompts()[2] == [("user", "1"), ("assistant", "a"), ("user", "2")]
    assert model.prompts()[3] == [("user", "3")]
    assert loop.conversation.messages == []
    words = capsys.readouterr().err
    assert "taken back: 1" in words
    assert "there is nothing to take back" in words
    assert "there is nothing to answer again" in words


def test_settings_are_those_of_sampling_and_are_checked_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    lines = [
        "/set temperature 0.5",
        "/set stop 'a b' c",
        "/set stop_token_ids 1 2",
        "/set ignore_eos true",
        "/set seed 7",
        "/set seed none",
    ]
    bad = [
        "/set temperature 3",
        "/set top_k x",
        "/set nothing 1",
        "/set stop_token_ids 99999",
        "/set seed",
        "/set stop 'a",
    ]
    model = Model(["ok"])
    loop = chat(model, *lines, *bad, "/set", "Hi")
    expected = SamplingParams(temperature=0.5, stop=("a b", "c"), stop_token_ids=(1, 2), ignore_eos=True)
    assert model.asked[0].sampling == expected == loop.conversation.sampling
    words = capsys.readouterr().err
    for part in (
        "found 3.0",
        "top_k: found 'x'",
        "no setting 'nothing'",
        "stop_token_ids",
        "expected a value",
        "stop: found",
    ):
        assert part in words


def test_a_conversation_is_saved_for_its_user_alone_and_never_over_a_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "chat.json"
    chat(Model(["Hm.|Hello"]), "Hi", f"/save {path}", f"/save {path}", "/save", "/help", "/quit", "never")
    assert json.loads(path.read_text()) == [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Hello", "reasoning_content": "Hm."},
    ]
    assert path.stat().st_mode & 0o777 == 0o600
    words = capsys.readouterr().err
    assert "File exists" in words
    assert "expected a file name" in words
    assert "/regenerate" in words


@pytest.mark.parametrize("name", ["n 2", "best_of 2", "logprobs 1", "prompt_logprobs 1", "echo true"])
def test_what_a_conversation_does_not_show_cannot_be_set(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    loop = chat(Model(), f"/set {name}")
    assert f"there is no setting {name.split()[0]!r}" in capsys.readouterr().err
    assert loop.conversation.sampling == SamplingParams()


@pytest.mark.parametrize("name", ["~nobody-of-that-name/chat", "a\0b"])
def test_a_file_that_cannot_be_does_not_end_the_chat(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    model = Model(["still there"])
    chat(model, f"/save {name}", "Hi")
    shown = capsys.readouterr()
    assert f"{name} cannot be written" in shown.err
    assert shown.out == "still there\n"


def test_two_slashes_begin_a_message() -> None:
    model = Model(["ok"])
    chat(model, "//etc/hosts?", "/etc")
    assert model.prompts() == [[("user", "/etc/hosts?")]]


def test_a_terminal_is_sent_no_control_characters(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    attack = "a\x1b]0;title\x07\x9b2J\r\b\tb\n"
    write(attack)
    assert capsys.readouterr().out == attack  # a pipe gets the text as it is
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setenv("NO_COLOR", "1")
    write(attack)
    show_aside(attack, end="")
    shown = capsys.readouterr()
    assert shown.out == shown.err == "a]0;title2J\tb\n"
    monkeypatch.setenv("NO_COLOR", "")
    show_aside("x")
    assert capsys.readouterr().err == "\x1b[2mx\x1b[0m\n"
    fail(attack, 1)
    assert capsys.readouterr().err == "\x1b[1;31merror:\x1b[0m a]0;title2J b\n"


def test_the_history_file_is_private_and_where_xdg_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    assert history_file() == tmp_path / "llorch" / "chat_history"
    path = private_file(history_file())
    path.write_text("+Hello\n")
    path.chmod(0o644)
    assert private_file(path).read_text() == "+Hello\n"
    assert path.stat().st_mode & 0o777 == 0o600
    for unusable in ("", "relative/folder"):
        monkeypatch.setenv("XDG_STATE_HOME", unusable)
        assert history_file() == Path.home() / ".local" / "state" / "llorch" / "chat_history"
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OSError, match="symbolic links"):
        private_file(link)
    assert not (tmp_path / "elsewhere").exists()


def test_a_missing_library_is_said_with_the_line_that_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "prompt_toolkit", None)
    with pytest.raises(ProviderError, match=r"pip install 'llorch\[chat\]'"):
        TerminalReader(lambda: "", keep_history=False)
