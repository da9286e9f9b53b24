"""What ``llorch generate`` prints of an answer: its text as it comes, and beside it thoughts, calls and
limits.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from llorch_serve.engine.sequence import FinishReason
from llorch_serve.errors import UsageError
from llorch_serve.requests import Completion, GenerationUpdate, Timings, ToolCallDelta
from llorch_serve.terminal.answers import show_answers
from llorch_serve.terminal.prompt_flags import read_tools

DONE = Completion(FinishReason.STOP, None, 1, 2, 3, Timings(0, 0, 0))


def test_thoughts_end_their_line_before_the_answer(capsys: pytest.CaptureFixture[str]) -> None:
    updates = [
        GenerationUpdate("r", "", (1,), reasoning="Let me", open_answers=1),
        GenerationUpdate("r", "", (2,), reasoning=" see.", open_answers=1),
        GenerationUpdate("r", "Pa", (3,), open_answers=1),
        GenerationUpdate("r", "ris", (4,), DONE),
    ]
    show_answers(iter(updates), 1, as_json=False)
    shown = capsys.readouterr()
    assert (shown.out, shown.err) == ("Paris\n", "Let me see.\n")


def test_an_answer_of_calls_alone_is_not_silent(capsys: pytest.CaptureFixture[str]) -> None:
    calls = (ToolCallDelta(0, "a", "weather", "{}"), ToolCallDelta(1, "b", "time", "{}"))
    show_answers(iter([GenerationUpdate("r", "", (1,), DONE, tool_calls=calls)]), 1, as_json=False)
    assert capsys.readouterr().err == "(calls weather, time; --json shows with what)\n"


@pytest.mark.parametrize("data", [b'[{"name": "\xff"}]', b"[" * 100_000, b"{}", b""])
def test_a_file_that_holds_no_tools_is_a_usage_error(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "tools.json"
    path.write_bytes(data)
    with pytest.raises(UsageError, match="holds no JSON list of tools"):
        read_tools(path)
